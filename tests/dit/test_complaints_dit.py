"""What users of other token-merging packages complain about, where it concerns transformers: none of it
happens here. Tests are numbered as in the list of complaints; those of 7, 9, 10, 11 and 13 are in other files
of this folder, under the same numbers."""

import inspect
import threading

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from small_dits import CONFIG, flux_inputs, make_flux, make_flux_pipeline, picture, prompt, run
from torch.utils._python_dispatch import TorchDispatchMode

import tomadiff
from tomadiff import MergeConfig
from tomadiff.patching.apply import session_of


def blocks(model):
    return tomadiff.summary(model, show=False)["blocks"]


def test_03_diffusion_transformers_are_supported():
    supported = tomadiff.supported_models()
    assert {"FluxTransformer2DModel", "SD3Transformer2DModel"} <= set(supported)


def test_01_all_blocks_but_the_first_of_a_kind_merge_by_default():
    model = tomadiff.apply(make_flux(5, 6), 0.5)
    run(model, flux_inputs((16, 16)))
    merged = {row["block"]: (row["tokens"], row["merged"]) for row in blocks(model)}
    left_alone = {name for name, (before, after) in merged.items() if before == after}
    assert left_alone == {f"{kind}transformer_blocks.0" for kind in ("", "single_")}
    assert {after for _, after in merged.values()} == {256, 128}


def test_02_too_small_to_gain_is_left_alone_and_says_so(main_family):
    model, inputs = main_family
    expected = run(model, inputs((7, 9)))
    tomadiff.apply(model, config=MergeConfig())
    assert torch.equal(run(model, inputs((7, 9))), expected)
    assert {row["note"] for row in blocks(model)} == {"left alone: under 64 tokens"}


def test_04_a_picture_of_1920_x_1080(main_family):
    """Which is 68 x 120 tokens."""
    model, inputs = main_family
    if hasattr(model, "pos_embed") and hasattr(model.pos_embed, "pos_embed_max_size"):
        size = (34, 48)  # as large as this small model's positions go
    else:
        size = (68, 120)
    tomadiff.apply(model, config=MergeConfig())
    assert torch.isfinite(run(model, inputs(size))).all()


@pytest.mark.parametrize("ratio", [0.76, 0.9, 0.97])
def test_05_a_ratio_above_three_quarters_is_done_not_capped(ratio):
    model = tomadiff.apply(make_flux(), config=MergeConfig(ratio=ratio))
    run(model, flux_inputs((16, 16)))
    assert {row["merged"] for row in blocks(model)} == {4 * round((1 - ratio) * 64)}


def test_06_the_wrong_object_is_an_error_that_names_what_is_supported():
    with pytest.raises(TypeError, match="SD3Transformer2DModel"):
        tomadiff.apply(make_flux().transformer_blocks[0], 0.5)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_08_odd_batches_plan_for_every_element(batch):
    model = tomadiff.apply(make_flux(), config=CONFIG)
    run(model, flux_inputs(batch=batch))
    inputs = flux_inputs(batch=batch)
    run(model, inputs)
    positions = session_of(model).clock.current.plans["single"].positions
    assert positions.shape == (batch, 48)
    assert len({tuple(row.tolist()) for row in positions}) == batch


def test_12_enabling_after_a_first_run(main_family):
    model, inputs = main_family
    original = run(model, inputs())
    merged = run(tomadiff.apply(model, config=CONFIG), inputs())
    assert torch.equal(run(tomadiff.apply(model, config=CONFIG), inputs()), merged)
    assert torch.equal(run(tomadiff.remove(model), inputs()), original)
    assert torch.equal(run(tomadiff.apply(model, config=CONFIG), inputs()), merged)


def test_14_ratios_of_single_modules_and_of_single_passes():
    overrides = {"transformer_blocks.*.ff": 0.25, "single_transformer_blocks.0.*": 0.0}
    model = tomadiff.apply(make_flux(), config=CONFIG.replace(overrides=overrides))
    run(model, flux_inputs())
    merged = {(row["block"], module): row["merged"] for row in blocks(model) for module in row["modules"]}
    assert merged["transformer_blocks.1", "self"] == 48
    assert merged["transformer_blocks.1", "ff"] == 72
    assert merged["single_transformer_blocks.0", "self+ff"] == 96
    with tomadiff.merged(model, config=CONFIG.replace(ratio=0.75)):  # the pass at high resolution, say
        run(model, flux_inputs())
        assert {row["merged"] for row in blocks(model)} == {24}
    run(model, flux_inputs())
    assert {row["merged"] for row in blocks(model)} == {48, 72, 96}


def test_16_merging_only_in_a_window_of_steps():
    """Of a real generation: the first of four steps runs at noise level 1, the last at a quarter."""
    pipe = make_flux_pipeline(FluxPipeline)
    notes = []

    def look(pipe, step, timestep, kwargs):
        notes.append({row["note"] for row in blocks(pipe)})
        return kwargs

    tomadiff.apply(pipe, config=CONFIG.replace(start=0.4))
    picture(pipe, **prompt(), height=32, width=48, num_inference_steps=4, callback_on_step_end=look)
    assert notes[0] == {"resting at this step"}
    assert notes[-1] == {""}


def test_18_no_forward_is_replaced_by_a_copy(main_family):
    """Every forward that runs is diffusers' own; ours only wrap around it."""
    model, _ = main_family
    tomadiff.apply(model, config=CONFIG)
    hooked = [module for module in model.modules() if "forward" in vars(module)]
    assert hooked
    for module in hooked:
        assert inspect.unwrap(vars(module)["forward"]).__func__ is type(module).forward
        assert not any(hasattr(hook, "new_forward") for hook in module._diffusers_hook.hooks.values())


def test_19_a_sampler_that_adds_noise_at_every_step():
    pipe = make_flux_pipeline(FluxPipeline)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    tomadiff.apply(pipe, config=CONFIG)
    call = {**prompt(), "height": 32, "width": 48, "num_inference_steps": 4}
    first = picture(pipe, **call)
    assert torch.isfinite(first).all()
    assert torch.equal(picture(pipe, **call), first)


def test_20_tiles_of_one_picture_get_plans_of_their_own():
    """Tiled sampling calls the model several times at one timestep with the same text."""
    model = tomadiff.apply(make_flux(), config=CONFIG.replace(select_every=100, weights_every=100))
    tiles = [flux_inputs(seed=1), flux_inputs(seed=2), flux_inputs((8, 5), seed=3)]
    text = tiles[0]["encoder_hidden_states"]
    tiles = [tile | {"encoder_hidden_states": text} for tile in tiles]
    first = [run(model, tile) for tile in tiles]
    generations = session_of(model).clock._generations
    assert sum(len(generation.passes) for generation in generations) == 3
    alone = run(tomadiff.apply(model, config=CONFIG), tiles[1])
    torch.testing.assert_close(first[1], alone, atol=1e-5, rtol=1e-5)


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().removeprefix("aten::").split(".")[0])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("mode", ["each", "once"])
def test_21_no_sort_scatter_or_gather(main_family, mode):
    """Some devices have no such kernels. A reading of the rotary ids is no part of a step."""
    model, inputs = main_family
    tomadiff.apply(model, config=CONFIG.replace(mode=mode))
    call = inputs(batch=2)
    run(model, call)
    with _Operations() as operations:
        run(model, call | {"timestep": call["timestep"] * 0.9})
    forbidden = {"sort", "topk", "scatter", "scatter_add", "scatter_reduce", "gather", "index", "nonzero"}
    assert operations.names & forbidden == set()


def test_22_a_lora_trains_through_merged_tokens():
    from peft import LoraConfig

    model = tomadiff.apply(make_flux(), config=CONFIG)
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "proj_out"]))
    model(**flux_inputs()).sample.square().mean().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if "lora" in name}
    assert trained
    assert all(grad is not None and grad.abs().sum() > 0 for grad in trained.values())


def test_two_threads_share_a_model():
    model = tomadiff.apply(make_flux(), config=CONFIG)
    inputs = [flux_inputs(), flux_inputs((6, 7), batch=2)]
    expected = [run(model, some) for some in inputs]
    results = [[], []]

    def work(index):
        for _ in range(4):
            results[index].append(run(model, inputs[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outs, want in zip(results, expected, strict=True):
        assert len(outs) == 4
        assert all(torch.equal(out, want) for out in outs)
