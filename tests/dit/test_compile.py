"""`torch.compile`, whole or block by block, with merging applied."""

import pytest
import torch
from diffusers import MagCacheConfig
from small_dits import CONFIG, flux_inputs, make_flux, make_sd3, run, sd3_inputs
from torch._dynamo.testing import CompileCounterWithBackend

import tomadiff
from tomadiff.patching import joint


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def generation(model, inputs, steps=4):
    call = inputs(batch=2)
    whole = call["timestep"]
    return torch.stack([run(model, call | {"timestep": whole * (1 - step / 8)}) for step in range(steps)])


@pytest.mark.parametrize("changes", [{}, {"mode": "once"}, {"merge_region": "global"}])
def test_10_one_full_graph(main_family, changes):
    """A new plan at every step compiles nothing anew, and nothing breaks the graph."""
    model, inputs = main_family
    tomadiff.apply(model, config=CONFIG.replace(**changes))
    expected = generation(model, inputs)
    tomadiff.apply(model, config=CONFIG.replace(**changes))
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    torch.testing.assert_close(generation(compiled, inputs), expected, atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 1
    generation(compiled, inputs)
    assert counter.frame_count == 1


def test_extra_head_dimensions_compile(monkeypatch):
    monkeypatch.setattr(joint, "MASK_BACKENDS", ())
    model = tomadiff.apply(make_flux(), config=CONFIG)
    expected = generation(model, flux_inputs, 2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(generation(compiled, flux_inputs, 2), expected, atol=1e-4, rtol=1e-4)
    assert model.transformer_blocks[0].attn.head_dim == 16


@pytest.mark.parametrize("mode", ["each", "once"])
def test_compile_repeated_blocks(mode):
    """As diffusers advises for big models: each kind of block is compiled once, also with more blocks than
    the compiler is ready to compile the same code anew for."""
    model = tomadiff.apply(make_flux(10, 12), config=CONFIG.replace(mode=mode))
    expected = generation(model, flux_inputs, 3)
    tomadiff.apply(model, config=CONFIG.replace(mode=mode))
    counter = CompileCounterWithBackend("eager")
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    torch.testing.assert_close(generation(model, flux_inputs, 3), expected, atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= 4  # each kind with and without making a plan


def test_compile_repeated_blocks_of_sd3():
    model = tomadiff.apply(make_sd3("medium", layers=10), config=CONFIG)
    expected = generation(model, sd3_inputs, 3)
    counter = CompileCounterWithBackend("eager")
    for block in model.transformer_blocks:
        block.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(generation(model, sd3_inputs, 3), expected, atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= 8


def test_apply_and_remove_around_a_compiled_model(main_family):
    model, inputs = main_family
    original = generation(model, inputs, 1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(generation(compiled, inputs, 1), original)
    tomadiff.apply(compiled, config=CONFIG)
    merged = generation(compiled, inputs, 1)
    assert not torch.allclose(merged, original, atol=1e-3)
    tomadiff.remove(compiled)
    assert torch.equal(generation(compiled, inputs, 1), original)


def test_compiled_blocks_with_a_cache():
    """A cache breaks the graph by itself; merging along with it still gives what it gives eagerly."""
    cache = MagCacheConfig(mag_ratios=[1.0] * 4, num_inference_steps=4, threshold=0.5, retention_ratio=0.3)
    model = tomadiff.apply(make_flux(), config=CONFIG)
    model.enable_cache(cache)
    expected = generation(model, flux_inputs)
    model._reset_stateful_cache()
    model.compile_repeated_blocks(backend="eager")
    torch.testing.assert_close(generation(model, flux_inputs), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_inductor_gives_the_same_result():
    """The real compiler, with its own kernels and their rounding."""
    model = tomadiff.apply(make_flux(1, 1), config=CONFIG)
    expected = generation(model, flux_inputs, 2)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(generation(compiled, flux_inputs, 2), expected, atol=1e-4, rtol=1e-4)
