"""Mode "stack": the blocks of a stack stay merged from the first to the last."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers import PyramidAttentionBroadcastConfig
from diffusers.hooks import apply_pyramid_attention_broadcast

import tomadiff
from tomadiff import MergeConfig, preset
from tomadiff.bench.targets import LoneBlock
from tomadiff.methods.toma import ToMAPlan
from tomadiff.patching.apply import session_of

HARD = MergeConfig(tau=1e-6, mode="stack")


@pytest.fixture
def unet(make_unet):
    return make_unet(transformer_layers_per_block=3)


@torch.no_grad()
def run(unet, text, size=(16, 24), timesteps=(900,), **kwargs):
    x = torch.randn(text.shape[0], 4, *size, generator=torch.Generator().manual_seed(1))
    return [unet(x, torch.tensor(t), text, **kwargs).sample for t in timesteps][-1]


@pytest.fixture
def merges(monkeypatch):
    """How many tokens each merge made."""
    made = []
    merge = ToMAPlan.merge

    def counted(self, x):
        made.append(x.shape[1])
        return merge(self, x)

    monkeypatch.setattr(ToMAPlan, "merge", counted)
    return made


def stacks(unet):
    return {
        row["block"].rpartition(".transformer_blocks")[0] for row in tomadiff.summary(unet, False)["blocks"]
    }


def test_it_is_the_default_of_unets():
    assert preset("sd").mode == preset("sdxl").mode == "stack"


def test_it_is_the_same_as_merging_around_every_block(unet, text):
    """A hard assignment: merging what was unmerged gives the merged tokens again."""
    with tomadiff.merged(unet, config=HARD):
        stacked = run(unet, text, timesteps=(900, 800))
    with tomadiff.merged(unet, config=HARD.replace(mode="once")):
        once = run(unet, text, timesteps=(900, 800))
    original = run(unet, text, timesteps=(900, 800))
    assert torch.allclose(stacked, once, atol=1e-5)
    assert not torch.allclose(stacked, original, atol=1e-3)


def test_tokens_merge_once_in_each_stack(unet, text, merges):
    tomadiff.apply(unet, config=HARD)
    run(unet, text)
    assert len(merges) == len(stacks(unet)) > 1
    merges.clear()
    tomadiff.apply(unet, config=HARD.replace(mode="once"))
    run(unet, text)
    assert len(merges) == 3 * len(stacks(unet))


def test_a_block_left_alone_sees_all_tokens(unet, text, merges):
    """It ends a run of merged blocks, and the next begins another."""
    middle = "mid_block.attentions.0.transformer_blocks"
    tomadiff.apply(unet, config=HARD.replace(overrides={"[du]*": 0.0, f"{middle}.1": 0.0}))
    seen = {}
    for index, block in enumerate(unet.mid_block.attentions[0].transformer_blocks):
        block.norm1.register_forward_pre_hook(
            lambda _, args, index=index: seen.update({index: args[0].shape[1]})
        )
    run(unet, text)
    assert seen == {0: 48, 1: 96, 2: 48}
    assert merges == [96, 96]


def test_blocks_with_plans_of_their_own_merge_for_themselves(unet, text, merges):
    tomadiff.apply(unet, config=HARD.replace(share="block"))
    run(unet, text)
    assert len(merges) == 3 * len(stacks(unet))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_merge_for_themselves_while_training(unet, text, checkpointing, merges):
    """Gradient checkpointing runs single blocks again."""
    unet.train().requires_grad_(True)
    tomadiff.apply(unet, config=HARD)
    if checkpointing:
        unet.enable_gradient_checkpointing()
    x = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    unet(x, torch.tensor(900), text).sample.square().mean().backward()
    assert len(merges) == 3 * len(stacks(unet)) * (2 if checkpointing else 1)
    assert all(torch.isfinite(weight.grad).all() for weight in unet.parameters())


@pytest.mark.parametrize(
    ("masks", "why"),
    [
        ({"attention_mask": torch.ones(2, 384)}, "attention mask"),
        ({"cross_attention_kwargs": {"ip_adapter_masks": None}}, ""),
    ],
)
def test_a_call_with_masks_runs_unmerged_and_says_so(make_unet, text, masks, why):
    unet = make_unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        mid_block_type="UNetMidBlock2D",
    )
    original = run(unet, text, **masks)
    tomadiff.apply(unet, 0.5)
    merged = run(unet, text, **masks)
    assert torch.equal(merged, original) == bool(why)
    notes = {row["note"] for row in tomadiff.summary(unet, show=False)["blocks"]}
    assert notes == {f"left alone: {why}" if why else ""}
    run(unet, text)
    assert {row["note"] for row in tomadiff.summary(unet, show=False)["blocks"]} == {""}


def test_ip_adapter_masks_and_chunks_are_seen(unet, text):
    session = session_of(tomadiff.apply(unet, 0.5))
    given = {"sample": torch.zeros(2, 4, 16, 16), "timestep": 900, "encoder_hidden_states": text}
    masks = {"cross_attention_kwargs": {"ip_adapter_masks": [torch.ones(1, 1, 16, 16)]}}
    assert session.adapter.read(given | masks).apart == "IP-Adapter masks"
    assert session.adapter.read(given).apart == ""
    for module in unet.modules():
        if hasattr(module, "set_chunk_feed_forward"):
            module.set_chunk_feed_forward(1, 0)
    assert session.adapter.read(given).apart == "forward chunking"


def test_parts_of_blocks_need_another_mode(unet):
    with pytest.raises(ValueError, match=r"merges whole blocks, not self and ff alone: use mode='each'"):
        preset("sdxl", modules=("self", "ff"))
    with pytest.raises(ValueError, match=r"have names in mode='each' only"):
        tomadiff.apply(unet, config=HARD.replace(overrides={"*.attn2": 0.25}))


@pytest.mark.parametrize("mode", ["once", "stack"])
@pytest.mark.parametrize("cache_first", [False, True])
def test_a_cache_on_attention_keeps_what_no_plan_decides(unet, text, mode, cache_first):
    """What is kept from a step must fit the plan of the next: kept unmerged, merged again."""
    cache = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 2000),
        spatial_attention_block_identifiers=("transformer_blocks",),
        current_timestep_callback=lambda: 500,
    )
    config = HARD.replace(mode=mode, select_every=1, weights_every=1)
    if cache_first:
        apply_pyramid_attention_broadcast(unet, cache)
    tomadiff.apply(unet, config=config)
    if not cache_first:
        apply_pyramid_attention_broadcast(unet, cache)
    result = run(unet, text, timesteps=(900, 800, 700))
    attention = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    state = attention._diffusers_hook.get_hook("pyramid_attention_broadcast").state
    assert state.cache.shape[1] == 96
    original = run(tomadiff.remove(unet), text, timesteps=(900, 800, 700))
    assert result.shape == original.shape
    assert not torch.equal(result, original)


def test_an_interrupted_call_leaves_nothing_behind(unet, text):
    tomadiff.apply(unet, config=HARD)
    expected = run(unet, text, timesteps=(900, 800))

    def interrupt(*_):
        raise KeyboardInterrupt

    inside = unet.mid_block.attentions[0].transformer_blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(unet, text)
    inside.remove()
    # A pipeline encodes its prompt anew.
    assert torch.equal(run(unet, text.clone(), timesteps=(900, 800)), expected)
    with ThreadPoolExecutor(1) as other:
        result = other.submit(run, unet, text.clone(), timesteps=(900, 800)).result(timeout=60)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("mode", ["each", "once", "stack"])
@torch.no_grad()
def test_autocast_leaves_the_residual_stream_in_its_precision(mode):
    block = LoneBlock(8, 32, 2, text_width=16).eval()
    x, text = torch.randn(1, 64, 32), torch.randn(1, 5, 16)
    with torch.autocast("cpu", torch.bfloat16), tomadiff.merged(block, config=HARD.replace(mode=mode)):
        merged = block(x, timestep=900, encoder_hidden_states=text)
    with tomadiff.merged(block, config=HARD.replace(mode=mode)):
        exact = block(x, timestep=900, encoder_hidden_states=text)
    assert merged.dtype == torch.float32
    assert torch.allclose(merged, exact, atol=0.05)
