"""`ff_min_tokens`: on coarse grids attention merges, and the feed-forward sees every token."""

import pytest
import torch
from diffusers import PyramidAttentionBroadcastConfig
from diffusers.hooks import apply_pyramid_attention_broadcast
from small_dits import make_flux

import tomadiff
from tomadiff import MergeConfig, preset

FINE, COARSE = 256, 64
CONFIG = MergeConfig(min_tokens=0, ff_min_tokens=200, tau=1e-6)
PLACES = {FINE: "down_blocks.0.attentions.0", COARSE: "down_blocks.1.attentions.0"}


@pytest.fixture
def unet(make_unet):
    """Blocks with 256 tokens and blocks with 64."""
    return make_unet(
        down_block_types=["CrossAttnDownBlock2D"] * 2,
        up_block_types=["CrossAttnUpBlock2D"] * 2,
        transformer_layers_per_block=2,
    )


@torch.no_grad()
def run(unet, text, timesteps=(900,)):
    x = torch.randn(text.shape[0], 4, 16, 16, generator=torch.Generator().manual_seed(1))
    return [unet(x, torch.tensor(t), text).sample for t in timesteps]


def seen_inside(unet, text):
    """How many tokens the modules of the second block of a stack see, on the fine and on the coarse grid."""
    seen = {}
    for tokens, place in PLACES.items():
        block = unet.get_submodule(f"{place}.transformer_blocks.1")
        for part, module in {
            "self": block.attn1.to_q,
            "cross": block.attn2.to_q,
            "ff": block.ff.net[0],
        }.items():
            module.register_forward_pre_hook(
                lambda _, args, key=(tokens, part): seen.update({key: args[0].shape[1]})
            )
    run(unet, text)
    return seen


def rows(unet):
    of = {
        row["block"].rpartition(".transformer_blocks")[0]: row
        for row in tomadiff.summary(unet, False)["blocks"]
    }
    return {tokens: of[place] for tokens, place in PLACES.items()}


@pytest.mark.parametrize("mode", ["each", "once", "stack"])
def test_feed_forwards_of_coarse_grids_see_every_token(unet, text, mode):
    tomadiff.apply(unet, config=CONFIG.replace(mode=mode))
    fine = {(FINE, part): FINE // 2 for part in ("self", "cross", "ff")}
    coarse = {(COARSE, "self"): COARSE // 2, (COARSE, "cross"): COARSE // 2, (COARSE, "ff"): COARSE}
    assert seen_inside(unet, text) == fine | coarse


@pytest.mark.parametrize("mode", ["once", "stack"])
def test_it_is_what_merging_the_modules_themselves_does(unet, text, mode):
    coarse = CONFIG.replace(ff_min_tokens=1000)
    with tomadiff.merged(unet, config=coarse.replace(mode=mode)):
        whole = run(unet, text, (900, 800))
    with tomadiff.merged(
        unet, config=coarse.replace(mode="each", ff_min_tokens=0, modules=("self", "cross"))
    ):
        modules = run(unet, text, (900, 800))
    original = run(unet, text, (900, 800))
    for ours, expected, unmerged in zip(whole, modules, original, strict=True):
        assert torch.equal(ours, expected)
        assert not torch.allclose(ours, unmerged, atol=1e-4)
    assert all(map(torch.equal, run(unet, text, (900, 800)), original))


def test_summary_says_what_is_left_alone(unet, text):
    tomadiff.apply(unet, config=CONFIG.replace(mode="stack"))
    run(unet, text)
    fine, coarse = rows(unet).values()
    assert (fine["modules"], fine["merged"], fine["note"]) == (["block"], FINE // 2, "")
    assert (coarse["modules"], coarse["merged"]) == (["self", "cross"], COARSE // 2)
    assert coarse["note"] == "feed-forward left alone: under 200 tokens"
    tomadiff.apply(unet, config=CONFIG.replace(mode="each", modules=("ff",)))
    run(unet, text)
    fine, coarse = rows(unet).values()
    assert (fine["modules"], fine["merged"], fine["note"]) == (["ff"], FINE // 2, "")
    assert (coarse["modules"], coarse["merged"]) == (["ff"], COARSE)
    assert coarse["note"] == "left alone: under 200 tokens"


@pytest.mark.parametrize("cache_first", [False, True])
def test_a_cache_keeps_every_token(unet, text, cache_first):
    """A cache holds what attention on a coarse grid gave after unmerging, whichever of the two came first."""
    cache = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 2000),
        spatial_attention_block_identifiers=("transformer_blocks",),
        current_timestep_callback=lambda: 500,
    )
    if cache_first:
        apply_pyramid_attention_broadcast(unet, cache)
    tomadiff.apply(unet, config=CONFIG.replace(mode="stack"))
    if not cache_first:
        apply_pyramid_attention_broadcast(unet, cache)
    merged = run(unet, text, (900, 800, 700))
    for tokens, place in PLACES.items():
        attention = unet.get_submodule(f"{place}.transformer_blocks.0.attn1")
        state = attention._diffusers_hook.get_hook("pyramid_attention_broadcast").state
        assert state.cache.shape[1] == tokens
    original = run(tomadiff.remove(unet), text, (900, 800, 700))
    assert not torch.equal(merged[-1], original[-1])


def test_sdxl_spares_coarse_feed_forwards_by_default():
    assert (preset("sdxl").min_tokens, preset("sdxl").ff_min_tokens) == (128, 512)


def test_a_model_with_one_grid_refuses_it():
    with pytest.raises(ValueError, match="ff_min_tokens is for UNets"):
        tomadiff.apply(make_flux(), config=preset("flux", ff_min_tokens=512))
