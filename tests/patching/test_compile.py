"""`torch.compile` with merging applied: one graph, the same results, and no new graph for new plans."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tomadiff
from tomadiff import MergeConfig

CONFIG = MergeConfig(select_every=4, weights_every=2)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


@torch.no_grad()
def run(model, text, steps=8, size=(16, 16)):
    random = torch.Generator().manual_seed(1)
    return [
        model(torch.randn(text.shape[0], 4, *size, generator=random), torch.tensor(900 - i), text).sample
        for i in range(steps)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mode": "once"},
        {"mode": "stack"},
        {"mode": "stack", "ff_min_tokens": 512},
        {"merge_region": "global"},
        {"unmerge": "ridge"},
    ],
)
def test_10_one_full_graph_for_each_kind_of_step(unet, text, changes):
    """`fullgraph=True` raises at any graph break, planning included; reusing a plan compiles nothing."""
    config = CONFIG.replace(**changes)
    tomadiff.apply(unet, config=config)
    expected = run(unet, text)
    tomadiff.apply(unet, config=config)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(unet, backend=counter, fullgraph=True)
    for result, eager in zip(run(compiled, text), expected, strict=True):
        assert torch.allclose(result, eager, atol=1e-4)
    assert counter.frame_count == 3  # destinations and weights, weights alone, reuse
    run(compiled, torch.randn_like(text))
    assert counter.frame_count == 3


@torch._dynamo.config.patch(recompile_limit=64)
def test_blocks_compiled_one_by_one(make_unet, text):
    """As diffusers advises for big models, with stacks of several blocks and at two resolutions. Every stack
    has graphs of its own."""
    unet = make_unet(
        transformer_layers_per_block=3,
        down_block_types=["CrossAttnDownBlock2D"] * 2,
        up_block_types=["CrossAttnUpBlock2D"] * 2,
    )
    config = CONFIG.replace(mode="stack")
    tomadiff.apply(unet, config=config)
    expected = run(unet, text)
    tomadiff.apply(unet, config=config)
    unet.compile_repeated_blocks(backend="eager", fullgraph=True)
    for result, eager in zip(run(unet, text), expected, strict=True):
        assert torch.allclose(result, eager, atol=1e-4)


def test_apply_remove_and_reapply_around_a_compiled_model(unet, text):
    original = run(unet, text, 1)[0]
    compiled = torch.compile(unet, backend="eager", fullgraph=True)
    assert torch.equal(run(compiled, text, 1)[0], original)
    tomadiff.apply(compiled, 0.5)
    merged = run(compiled, text, 1)[0]
    assert not torch.equal(merged, original)
    tomadiff.remove(compiled)
    assert torch.equal(run(compiled, text, 1)[0], original)
    tomadiff.apply(unet, 0.5)
    assert torch.equal(run(compiled, text, 1)[0], merged)


def test_compiled_in_place(unet, text):
    tomadiff.apply(unet, config=CONFIG)
    expected = run(unet, text, 3)
    unet.compile(backend="eager", fullgraph=True)
    tomadiff.apply(unet, config=CONFIG)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(run(unet, text, 3), expected, strict=True))


def test_inductor_gives_the_same_result(unet, text):
    """The real compiler, with its own kernels and their rounding."""
    config = MergeConfig(select_every=100, weights_every=100)
    tomadiff.apply(unet, config=config)
    expected = run(unet, text, 3)
    tomadiff.apply(unet, config=config)
    compiled = torch.compile(unet, fullgraph=True)
    for result, eager in zip(run(compiled, text, 3), expected, strict=True):
        assert torch.allclose(result, eager, atol=1e-4)
