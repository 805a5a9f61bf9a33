"""What users of other token-merging packages complain about, as far as UNets go: none of it happens here."""

import inspect

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tomadiff
from tomadiff import MergeConfig, preset
from tomadiff.bench.shapes import sdxl_inputs, sdxl_unet
from tomadiff.core.selection import facility_location
from tomadiff.flops import count_flops
from tomadiff.methods.toma import ToMA
from tomadiff.patching.apply import session_of


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    ).eval()


def call(unet, size=(16, 16), batch=1, timestep=900, text=None):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 4, *size, generator=random)
    text = torch.randn(batch, 7, 32, generator=random) if text is None else text
    return unet(x, timestep, text).sample


def blocks(unet):
    return tomadiff.summary(unet, show=False)["blocks"]


def test_01_sdxl_is_merged_at_both_its_levels():
    unet = tomadiff.apply(sdxl_unet(), 0.5)
    with torch.no_grad():
        unet(timestep=900, **sdxl_inputs(1024, 1024))
    assert {(row["tokens"], row["merged"]) for row in blocks(unet)} == {(4096, 2048), (1024, 512)}
    assert all(row["modules"] == ["block"] for row in blocks(unet))  # self, cross and ff together


def test_02_blocks_too_small_to_gain_are_left_alone_and_say_so(unet):
    tomadiff.apply(unet, 0.5)
    with torch.no_grad():
        call(unet, (14, 14))
    assert {row["note"] for row in blocks(unet)} == {"left alone: under 64 tokens"}
    tomadiff.apply(unet, 0.5)
    with torch.no_grad():
        call(unet, (16, 16))
    assert {row["note"] for row in blocks(unet)} == {""}


@pytest.mark.parametrize("size", [(135, 240), (17, 31), (1, 1), (2, 90)])
def test_04_any_size_works(unet, size):
    """(135, 240) are the latents of a 1920 x 1080 picture."""
    tomadiff.apply(unet, config=MergeConfig(min_tokens=0))
    with torch.no_grad():
        assert torch.isfinite(call(unet, size)).all()


@pytest.mark.parametrize(("ratio", "tile"), [(0.8, 4), (0.9, 4), (0.94, 4), (0.97, 8)])
def test_05_a_ratio_above_three_quarters_is_done_not_capped(unet, ratio, tile):
    """As far as a tile goes, which keeps at least one token: 15 of 16 in tiles of 4."""
    tomadiff.apply(unet, config=preset("sd", ratio=ratio, select_size=tile, merge_size=tile))
    with torch.no_grad():
        call(unet, (32, 32))
    assert blocks(unet)[0]["merged"] == (16 // tile) ** 2 * round((1 - ratio) * tile**2)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), object(), "a pipeline"])
def test_06_the_wrong_object_is_an_error_that_names_what_is_supported(thing):
    with pytest.raises(TypeError, match="UNet2DConditionModel"):
        tomadiff.apply(thing, 0.5)


def test_07_random_numbers_are_not_touched(unet):
    before = torch.random.get_rng_state()
    tomadiff.apply(unet, 0.5)
    with torch.no_grad():
        call(unet)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_08_odd_batches_plan_for_every_element(unet, batch):
    tomadiff.apply(unet, 0.5)
    with torch.no_grad():
        x, text = torch.randn(batch, 4, 16, 16), torch.randn(batch, 7, 32)
        together = unet(x, 900, text).sample
        alone = torch.cat([unet(x[i : i + 1], 900, text[i : i + 1]).sample for i in range(batch)])
    assert torch.allclose(together, alone, atol=1e-4)


def test_12_enabling_after_a_first_run(unet):
    with torch.no_grad():
        original = call(unet)
        tomadiff.apply(unet, 0.5)
        merged = call(unet)
        tomadiff.apply(unet, 0.5)
        assert torch.equal(call(unet), merged)
        tomadiff.remove(unet)
        assert torch.equal(call(unet), original)


def test_14_ratios_of_single_modules_and_of_single_passes(unet):
    tomadiff.apply(unet, config=MergeConfig(ratio=0.5, overrides={"*.attn2": 0.25, "mid_block.*": 0.0}))
    with torch.no_grad():
        call(unet)
        rows = [(row["block"].split("_")[0], row) for row in blocks(unet)]
        merged = {(block, module): row["merged"] for block, row in rows for module in row["modules"]}
        assert (merged["down", "self"], merged["down", "cross"], merged["mid", "self"]) == (32, 48, 64)
        with tomadiff.merged(unet, 0.75):  # the pass at high resolution, say
            call(unet)
            assert {row["merged"] for row in blocks(unet)} == {16}
        call(unet)
        assert {row["merged"] for row in blocks(unet)} == {32, 48, 64}


def test_16_merging_only_in_a_window_of_steps(unet):
    with torch.no_grad():
        early, late = call(unet, timestep=900), call(unet, timestep=100)
        tomadiff.apply(unet, config=MergeConfig(start=0.2, end=0.8))
        assert torch.equal(call(unet, timestep=900), early)
        assert not torch.equal(call(unet, timestep=500), late)
        assert torch.equal(call(unet, timestep=100), late)


def test_17_a_ratio_is_enough():
    required = [
        name
        for name, parameter in inspect.signature(tomadiff.apply).parameters.items()
        if parameter.default is inspect.Parameter.empty
    ]
    assert required == ["target"]


def test_18_no_forward_is_replaced_by_a_copy(unet):
    """Every forward that runs is diffusers' own; ours only wrap around it."""
    tomadiff.apply(unet, 0.5)
    for module in unet.modules():
        forward = vars(module).get("forward")
        if forward is not None:
            assert inspect.unwrap(forward).__func__ is type(module).forward
            assert not any(hasattr(hook, "new_forward") for hook in module._diffusers_hook.hooks.values())


def test_20_tiles_of_one_picture_get_plans_of_their_own(unet):
    """Tiled sampling calls the model several times at one timestep with the same text; sizes at the edge
    differ."""
    tomadiff.apply(unet, config=MergeConfig(select_every=100, weights_every=100))
    text = torch.randn(1, 7, 32)
    tiles = [torch.randn(1, 4, 16, 16), torch.randn(1, 4, 16, 16), torch.randn(1, 4, 16, 12)]
    with torch.no_grad():
        first = [unet(tile, 900, text).sample for tile in tiles]
        plans = session_of(unet).clock._generations
        assert sum(len(generation.passes) for generation in plans) == 3
        again = [unet(tile, 899, text).sample for tile in tiles]
        alone = tomadiff.apply(unet, config=MergeConfig())(tiles[1], 900, text).sample
    assert torch.allclose(first[1], alone, atol=1e-5)
    assert all(torch.isfinite(image).all() for image in again)


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().removeprefix("aten::").split(".")[0])
        return func(*args, **kwargs or {})


def test_21_no_sort_scatter_or_gather():
    """Neither when a plan is made nor when it is used; some devices have no such kernels."""
    method = ToMA(MergeConfig())
    layout = method.layout(((16, 24),), 0.5, "cpu")
    x = torch.randn(2, 384, 16)
    with _Operations() as operations:
        plan = method.plan(x, layout)
        plan.unmerge(plan.merge(x))
        plan.refresh(x)
        # The operator hides what it does from the mode; its implementation is called apart.
        facility_location._init_fn(torch.eye(6)[None], 3)
    forbidden = {"sort", "topk", "scatter", "scatter_add", "scatter_reduce", "gather", "index", "nonzero"}
    assert operations.names & forbidden == set()
    assert {"bmm", "argmax"} <= operations.names


@pytest.mark.parametrize("mode", ["each", "once"])
def test_22_gradients_flow_for_training(unet, mode):
    tomadiff.apply(unet, config=MergeConfig(mode=mode))
    unet.train()
    call(unet, batch=2).square().mean().backward()
    weights = dict(unet.named_parameters())
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in weights.values())
    assert weights["mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight"].grad.abs().sum() > 0


def test_22_gradient_checkpointing_sees_the_same_plan(unet):
    tomadiff.apply(unet, 0.5)
    unet.train()
    text = torch.randn(2, 7, 32)
    grads = []
    for checkpointing in (False, True):
        unet.gradient_checkpointing = checkpointing
        unet.enable_gradient_checkpointing() if checkpointing else unet.disable_gradient_checkpointing()
        unet.zero_grad()
        call(unet, batch=2, text=text.clone()).square().mean().backward()
        grads.append(unet.conv_in.weight.grad.clone())
    assert torch.allclose(grads[0], grads[1], atol=1e-6)


def test_training_after_generating_in_inference_mode(unet):
    tomadiff.apply(unet, 0.5)
    text = torch.randn(1, 7, 32)
    with torch.inference_mode():
        call(unet, text=text)
    call(unet, text=text, timestep=899).square().mean().backward()
    assert unet.conv_in.weight.grad is not None


def test_plans_of_the_real_sdxl_unet_take_less_than_a_percent_of_its_weights():
    unet, inputs = sdxl_unet(), sdxl_inputs(1024, 1024)
    tomadiff.apply(unet, 0.5)
    unet(timestep=900, **inputs)
    kept = [leaf for leaf in tree_leaves(session_of(unet).clock.current.plans) if torch.is_tensor(leaf)]
    assert kept
    weights = sum(parameter.nbytes for parameter in unet.parameters())
    assert 0 < sum(tensor.nbytes for tensor in kept) < 0.01 * weights


@pytest.mark.parametrize(("ratio", "ceiling"), [(0.25, 1.26), (0.5, 1.66), (0.75, 2.36)])
def test_flops_of_the_real_sdxl_unet_are_within_2_percent_of_the_ceiling(ratio, ceiling):
    """The ceiling: every transformer module on (1 - ratio) of its tokens, merging itself for nothing."""
    unet, inputs = sdxl_unet(), sdxl_inputs(1024, 1024)
    unmerged = count_flops(lambda: unet(timestep=900, **inputs))
    tomadiff.apply(unet, ratio)
    count_flops(lambda: unet(timestep=900, **inputs))  # makes the plans
    merged = count_flops(lambda: unet(timestep=899, **inputs))
    assert blocks(unet)[0]["reused"] == 1
    assert unmerged / merged == pytest.approx(ceiling, rel=0.02)
