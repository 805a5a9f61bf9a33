import copy
import threading

import pytest
import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

import tomadiff
from tomadiff import MergeConfig
from tomadiff.patching.apply import session_of


@torch.no_grad()
def run(unet, text, size=(16, 16), timesteps=(900,), seed=1):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(text.shape[0], 4, *size, generator=random)
    return [unet(x, torch.tensor(t), text).sample for t in timesteps][-1]


def blocks(model):
    return tomadiff.summary(model, show=False)["blocks"]


def test_apply_merges_and_remove_restores(unet, text):
    original = run(unet, text)
    assert tomadiff.apply(unet, 0.5) is unet
    assert not torch.equal(run(unet, text), original)
    assert tomadiff.remove(unet) is unet
    assert torch.equal(run(unet, text), original)
    assert session_of(unet) is None


def test_remove_leaves_nothing_behind(unet, text):
    before = {name: set(vars(module)) for name, module in unet.named_modules()}
    state = {name: value.clone() for name, value in unet.state_dict().items()}
    tomadiff.apply(unet, 0.5)
    run(unet, text)
    tomadiff.remove(unet)
    for name, module in unet.named_modules():
        # diffusers keeps an empty registry on a module that had hooks once.
        assert set(vars(module)) - before[name] <= {"_diffusers_hook"}
        assert getattr(module, "_diffusers_hook", None) is None or not module._diffusers_hook.hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert all(torch.equal(value, state[name]) for name, value in unet.state_dict().items())


def test_ratio_0_is_the_original_model(unet, text):
    original = run(unet, text)
    tomadiff.apply(unet, 0.0)
    assert torch.equal(run(unet, text), original)


def test_applying_again_replaces(unet, text):
    tomadiff.apply(unet, 0.25)
    a = run(unet, text)
    tomadiff.apply(unet, 0.75)
    tomadiff.apply(unet, 0.25)
    assert torch.equal(run(unet, text), a)
    tomadiff.remove(unet)
    tomadiff.remove(unet)


def test_apply_run_reapply_remove_in_any_order(unet, text):
    original = run(unet, text)
    for _ in range(2):
        tomadiff.apply(unet, 0.5)
        merged = run(unet, text)
        tomadiff.remove(unet)
        assert torch.equal(run(unet, text), original)
        tomadiff.apply(unet, 0.5)
        assert torch.equal(run(unet, text), merged)


def test_merged_context_restores_what_was_before(unet, text):
    original = run(unet, text)
    with tomadiff.merged(unet, 0.5):
        assert not torch.equal(run(unet, text), original)
    assert torch.equal(run(unet, text), original)
    tomadiff.apply(unet, 0.25)
    quarter = run(unet, text)
    with pytest.raises(KeyError), tomadiff.merged(unet, 0.75):
        raise KeyError
    assert torch.equal(run(unet, text), quarter)


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), "unet", None])
def test_unknown_objects_are_refused_by_name(thing):
    for verb in (tomadiff.apply, tomadiff.remove, tomadiff.summary):
        with pytest.raises(TypeError, match="UNet2DConditionModel"):
            verb(thing)


def test_the_error_names_what_a_pipeline_has():
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        block_out_channels=(8,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        norm_num_groups=4,
    )
    with pytest.raises(TypeError, match="DDPMPipeline with a UNet2DModel"):
        tomadiff.apply(DDPMPipeline(model, DDPMScheduler()))


def test_a_model_in_which_nothing_would_merge_is_refused(make_unet, unet):
    without = make_unet(
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        mid_block_type="UNetMidBlock2D",
    )
    with pytest.raises(ValueError, match="would merge nothing"):
        tomadiff.apply(without, 0.5)
    with pytest.raises(ValueError, match="would merge nothing"):
        tomadiff.apply(unet, config=MergeConfig(skip_first=100))
    assert session_of(unet) is None


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan"), 7, "half"])
def test_wrong_ratios_are_refused_and_change_nothing(unet, text, ratio):
    tomadiff.apply(unet, 0.5)
    before = run(unet, text)
    with pytest.raises(ValueError, match="0 <= ratio < 1"):
        tomadiff.apply(unet, ratio)
    assert torch.equal(run(unet, text), before)


def test_a_refused_configuration_leaves_the_old_one_in_place(unet, text):
    tomadiff.apply(unet, 0.5)
    before = run(unet, text)
    with pytest.raises(ValueError, match="matches no module"):
        tomadiff.apply(unet, config=MergeConfig(overrides={"nowhere.*": 0.5}))
    assert torch.equal(run(unet, text), before)


def test_ratio_and_config_together_are_refused(unet):
    with pytest.raises(ValueError, match="not both"):
        tomadiff.apply(unet, 0.5, MergeConfig())


def test_overrides_and_skip_first(unet, text):
    tomadiff.apply(
        unet, config=MergeConfig(ratio=0.5, overrides={"mid_block.*": 0.0, "*.attn2": 0.25, "up_*.ff": 0.75})
    )
    run(unet, text)
    merged = {
        (row["block"].split(".")[0], module): row["merged"]
        for row in blocks(unet)
        for module in row["modules"]
    }
    assert merged[("down_blocks", "self")] == 32
    assert merged[("mid_block", "self")] == 64
    assert merged[("mid_block", "cross")] == 48  # the last pattern that matches wins
    assert merged[("up_blocks", "cross")] == 48
    assert merged[("up_blocks", "ff")] == 16
    tomadiff.apply(unet, config=MergeConfig(skip_first=1))
    run(unet, text)
    assert [row["note"] for row in blocks(unet)] == ["left alone", "", "", ""]
    for share, left_alone in ((0.01, 1), (0.25, 1), (0.26, 2), (0.75, 3)):
        tomadiff.apply(unet, config=MergeConfig(skip_first=share))
        run(unet, text)
        assert sum(row["note"] == "left alone" for row in blocks(unet)) == left_alone


def test_summary_before_and_after_a_run(unet, text, capsys):
    assert tomadiff.summary(unet) == {"applied": False, "config": None, "blocks": []}
    assert "not applied" in capsys.readouterr().out
    tomadiff.apply(unet, 0.5)
    assert {row["note"] for row in blocks(unet)} == {"not run yet"}
    run(unet, text, size=(16, 26), timesteps=(900, 800))
    result = tomadiff.summary(unet)
    assert MergeConfig.from_json(result["config"]).ratio == 0.5
    row = result["blocks"][0]
    assert (row["tokens"], row["merged"]) == (8 * 13, 52)
    assert (row["selected"], row["weighed"], row["reused"]) == (1, 1, 1)
    assert row["regions"] == "28 of 2-4"
    out = capsys.readouterr().out
    assert "down_blocks.1.attentions.0.transformer_blocks.0" in out
    assert "  block    104     52      28 of 2-4" in out


def test_summary_says_why_a_block_is_left_alone(unet, text, capsys):
    tomadiff.apply(unet, config=MergeConfig(min_tokens=65))
    run(unet, text)
    assert {row["note"] for row in blocks(unet)} == {"left alone: under 65 tokens"}
    tomadiff.apply(unet, config=MergeConfig(merge_region="global", select_size=4, end=0.5))
    run(unet, text, timesteps=(600,))
    assert blocks(unet)[0]["regions"] == "4 of 16, merged in 1"
    run(unet, text, timesteps=(400,))
    assert {row["note"] for row in blocks(unet)} == {"resting at this step"}


def test_a_tile_that_does_not_fit_is_visible(unet, text):
    tomadiff.apply(unet, config=MergeConfig(min_tokens=0))
    run(unet, text, size=(6, 6))
    assert blocks(unet)[0]["regions"] == "1 of 9"


def test_reuse_follows_the_schedule_of_the_paper(unet, text):
    """50 steps, destinations every 10, weights every 5: 5 selections and 10 sets of weights."""
    tomadiff.apply(unet, config=tomadiff.preset("paper-tile"))
    run(unet, text, timesteps=range(981, 0, -20))
    for row in blocks(unet):
        assert (row["selected"], row["weighed"], row["reused"]) == (5, 10, 40)


def test_plans_are_really_made_that_often_and_shared(make_unet, text, monkeypatch):
    from tomadiff.methods.toma import ToMA

    unet = make_unet(transformer_layers_per_block=3)
    stacks = sum(isinstance(module, Transformer2DModel) for module in unet.modules())
    made = []
    for name in ("plan", "weigh"):
        original = getattr(ToMA, name)
        monkeypatch.setattr(
            ToMA, name, lambda *args, name=name, original=original: (made.append(name), original(*args))[1]
        )
    for share, plans in (("kind", 1), ("stack", stacks), ("block", 3 * stacks)):
        made.clear()
        tomadiff.apply(unet, config=tomadiff.preset("paper-tile", share=share))
        run(unet, text, timesteps=range(981, 0, -20))
        assert (made.count("plan"), made.count("weigh")) == (5 * plans, 5 * plans)


def test_reuse_and_planning_anew_differ_but_each_is_deterministic(unet, text):
    @torch.no_grad()
    def denoise(config):
        tomadiff.apply(unet, config=config)
        x = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(3))
        for t in range(900, 0, -100):
            x = x - 0.3 * unet(x, t, text).sample
        return x

    always, reused = MergeConfig(select_every=1, weights_every=1), MergeConfig()
    a, b = denoise(always), denoise(reused)
    assert not torch.equal(a, b)
    assert torch.equal(denoise(always), a)
    assert torch.equal(denoise(reused), b)


def test_step_window(unet, text):
    original = run(unet, text, timesteps=(800,))
    tomadiff.apply(unet, config=MergeConfig(start=0.5))
    assert torch.equal(run(unet, text, timesteps=(800,)), original)
    late = run(unet, text, timesteps=(800, 300))
    tomadiff.remove(unet)
    assert not torch.equal(run(unet, text, timesteps=(300,)), late)


def test_a_ratio_that_changes_over_the_steps(unet, text):
    tomadiff.apply(
        unet, config=MergeConfig(ratio=((0.0, 0.25), (0.5, 0.75)), select_every=100, weights_every=100)
    )
    run(unet, text, timesteps=(900, 800))
    assert blocks(unet)[0]["merged"] == 48
    run(unet, text, timesteps=(900, 800, 400, 300))
    assert blocks(unet)[0]["merged"] == 16
    assert blocks(unet)[0]["selected"] == 1 + 2  # each value is planned once in a run


@pytest.mark.parametrize("mode", ["each", "once"])
def test_as_many_destinations_as_tokens_changes_nothing(unet, text, mode):
    original = run(unet, text)
    tomadiff.apply(unet, config=MergeConfig(ratio=1e-9, tau=1e-3, mode=mode))
    assert torch.allclose(run(unet, text), original, atol=1e-4)
    assert blocks(unet)[0]["merged"] == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "once"},
        {"mode": "once", "proportional": False},
        {"proportional": False},
        {"normalise": "tokens"},
        {"unmerge": "pinv"},
        {"unmerge": "ridge"},
        {"modules": ("ff",)},
        {"merge_region": "global"},
        {"share": "kind"},
        {"share": "block"},
    ],
)
def test_every_knob_runs_and_matters(make_unet, text, changes):
    unet = make_unet(transformer_layers_per_block=2)
    with tomadiff.merged(unet, config=MergeConfig()):
        usual = run(unet, text, (24, 40), timesteps=(900, 800))
    with tomadiff.merged(unet, config=MergeConfig(**changes)):
        changed = run(unet, text, (24, 40), timesteps=(900, 800))
        assert torch.isfinite(changed).all()
        assert not torch.equal(changed, usual)
        assert torch.equal(run(unet, text, (24, 40), timesteps=(900, 800)), changed)


def test_proportional_attention_makes_duplicated_tokens_exact(make_unet, text):
    """An image of equal cells: with cluster sizes as key bias, attention over the merged tokens is that of
    all."""
    unet = make_unet()
    attention = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    uneven = torch.tensor([0] * 40 + [1] * 16 + [2] * 8)
    x, text = torch.randn(1, 3, 64)[:, uneven], text[:1]
    with torch.no_grad():
        expected = attention(x)
        results = {}
        for proportional in (True, False):
            config = MergeConfig(
                proportional=proportional, modules=("self",), ratio=0.95, tau=1e-3, overrides={"[du]*": 0.0}
            )
            with tomadiff.merged(unet, config=config):
                session = session_of(unet)
                session.enter(unet, (torch.zeros(1, 4, 16, 16), 900, text), {})
                (group,) = session.groups
                session.plan(group, x)
                results[proportional] = attention(x)
                session.exit(unet, (), {}, None)
    assert torch.allclose(results[True], expected, atol=1e-5)
    assert not torch.allclose(results[False], expected, atol=1e-3)


def test_copying_a_patched_model_is_refused(unet):
    """diffusers' hooks would go on calling the original's modules from the copy."""
    tomadiff.apply(unet, 0.5)
    with pytest.raises(TypeError, match=r"tomadiff.remove"):
        copy.deepcopy(unet)
    assert isinstance(copy.deepcopy(tomadiff.remove(unet)), type(unet))


def test_one_model_in_two_threads(unet):
    """Two pipelines that share a UNet: every call gets the plans of its own generation."""
    texts = [torch.randn(1, 7, 32) for _ in range(2)]
    tomadiff.apply(unet, 0.5)

    @torch.no_grad()
    def generate(text, seed, out):
        x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed))
        for t in range(900, 0, -100):
            x = x - 0.3 * unet(x, t, text).sample
        out[seed] = x

    alone, together = {}, {}
    for seed, text in enumerate(texts):
        generate(text, seed, alone)
    tomadiff.apply(unet, config=session_of(unet).config.replace(select_every=100, weights_every=100))
    for seed, text in enumerate(texts):
        generate(text, seed, alone)
    threads = [
        threading.Thread(target=generate, args=(text, seed, together)) for seed, text in enumerate(texts)
    ]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert all(torch.isfinite(together[seed]).all() for seed in (0, 1))
    # A generation that began while another was further on made the other plan anew, so the results agree
    # closely only.
    assert all((together[seed] - alone[seed]).abs().mean() < 0.05 for seed in (0, 1))


def test_a_call_that_raises_leaves_the_model_usable(unet, text):
    tomadiff.apply(unet, 0.5)
    good = run(unet, text)
    with pytest.raises(RuntimeError):
        unet(torch.randn(2, 4, 16, 16), 900, torch.randn(2, 7, 99))
    with pytest.raises(TypeError, match="sample"):
        unet()
    assert not session_of(unet).scratch
    assert torch.equal(run(unet, text), good)


def test_no_plan_outlives_its_generation(unet):
    tomadiff.apply(unet, 0.5)
    run(unet, torch.randn(1, 7, 32))
    session = session_of(unet)
    assert session.clock.current.plans == {}
    assert session.clock._generations == []


@pytest.mark.parametrize("batch", [1, 3])
def test_batch_elements_do_not_see_each_other(unet, batch):
    tomadiff.apply(unet, 0.5)
    text, x = torch.randn(batch, 7, 32), torch.randn(batch, 4, 16, 16)
    with torch.no_grad():
        together = unet(x, 900, text).sample
        for i in range(batch):
            alone = unet(x[i : i + 1], 900, text[i : i + 1]).sample
            assert torch.allclose(together[i : i + 1], alone, atol=1e-4)


def test_forward_chunking_runs_the_chunks_unmerged(unet, text):
    tomadiff.apply(unet, config=MergeConfig(modules=("ff",)))
    for block in unet.modules():
        if hasattr(block, "set_chunk_feed_forward"):
            block.set_chunk_feed_forward(1, 0)
    chunked = run(unet, text)
    tomadiff.remove(unet)
    assert torch.allclose(chunked, run(unet, text), atol=1e-5)


@pytest.mark.parametrize("part", ["self", "cross"])
def test_attention_with_a_mask_over_the_picture_runs_unmerged_and_in_its_order(unet, part):
    """A self-attention mask, or the masks of an IP-Adapter, belong to the tokens one by one."""
    block = unet.mid_block.attentions[0].transformer_blocks[0]
    x, text = torch.randn(1, 16 * 24, 64), torch.randn(1, 7, 32)
    mask = torch.zeros(1, 1, 16 * 24)
    mask[..., 100:] = -1e4
    masked = {
        "self": {"attention_mask": mask},
        "cross": {"cross_attention_kwargs": {"ip_adapter_masks": [torch.ones(1, 1, 16, 24)]}},
    }[part]
    config = MergeConfig(modules=(part,), overrides={"[du]*": 0.0})
    with torch.no_grad():
        expected = block(x, encoder_hidden_states=text, **masked)
        with tomadiff.merged(unet, config=config):
            session = session_of(unet)
            session.enter(unet, (torch.zeros(1, 4, 32, 48), 900, text), {})
            (layout,) = session.clock.current.layouts.values()
            assert layout.order is not None
            result = block(x, encoder_hidden_states=text, **masked)
            without = block(x, encoder_hidden_states=text)
            session.exit(unet, (), {}, None)
    assert torch.allclose(result, expected, atol=1e-5)
    assert not torch.allclose(without, expected, atol=1e-5)


def test_a_model_whose_tokens_are_elsewhere_is_an_error(unet, text):
    tomadiff.apply(unet, 0.5)
    session_of(unet).adapter._round_up = -1
    with pytest.raises(RuntimeError, match="not where tomadiff looks"):
        run(unet, text, size=(20, 20))


def test_downsampling_without_padding_rounds_down(make_unet, text):
    unet = make_unet(downsample_padding=0)
    tomadiff.apply(unet, config=MergeConfig(min_tokens=0))
    run(unet, text, size=(16, 18))
    assert blocks(unet)[0]["tokens"] == 72


def test_removing_under_another_hook_keeps_that_hook(unet, text):
    """diffusers' own removal forgets that the outer hook may have replaced the forward."""
    from diffusers.hooks import HookRegistry, ModelHook

    calls = []

    class Outer(ModelHook):
        def new_forward(self, module, *args, **kwargs):
            calls.append(1)
            return self.fn_ref.original_forward(*args, **kwargs)

    original = run(unet, text)
    tomadiff.apply(unet, 0.5)
    attention = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    HookRegistry.check_if_exists_or_initialize(attention).register_hook(Outer(), "outer")
    tomadiff.remove(unet)
    assert torch.equal(run(unet, text), original)
    assert len(calls) == 1
    attention._diffusers_hook.remove_hook("outer")
    assert torch.equal(run(unet, text), original)
    assert len(calls) == 1
