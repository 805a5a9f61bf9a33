"""What every method promises, whatever it does to tokens."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tomadiff import MergeConfig, apply, merged, preset, remove, summary
from tomadiff.config import PRESETS
from tomadiff.methods import METHODS

CPU = torch.device("cpu")
PEERS = ("tome", "tofu", "todo", "free")
RANDOM = ("tome", "tofu", "tomesd")


def configs(*names: str) -> list:
    return [pytest.param(preset(name), id=name) for name in names]


@torch.no_grad()
def run(model, call: tuple, config: MergeConfig) -> torch.Tensor:
    with merged(model, config=config):
        return model(*call).sample


def test_every_method_has_a_preset_of_its_name():
    assert {name: PRESETS[name].method for name in (*PEERS, "none")} == {n: n for n in (*PEERS, "none")}
    assert set(PEERS) | {"none", "toma"} == set(METHODS)


@pytest.mark.parametrize("name", [*METHODS, "tomesd"])
def test_presets_survive_json(name):
    config = preset(name) if name != "toma" else MergeConfig()
    assert MergeConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("config", configs(*PEERS, "none", "tomesd"))
def test_ratio_zero_is_exactly_the_original(unet, config, inputs):
    call = inputs(16, 16)
    base = unet(*call).sample
    assert torch.equal(run(unet, call, config.replace(ratio=0, overrides={})), base)
    # The same for the part of the steps in which a changing ratio is 0.
    later = ((0.0, 0.0), (0.9, config.ratios[0]))
    assert torch.equal(run(unet, call, config.replace(ratio=later, overrides={})), base)


@pytest.mark.parametrize("config", configs(*PEERS, "none", "tomesd"))
@torch.no_grad()
def test_removal_gives_the_original_back(unet, config, inputs):
    call = inputs(16, 16)
    base, weights = unet(*call).sample, copy.deepcopy(unet.state_dict())
    apply(unet, config=config)
    merging = unet(*call).sample
    assert torch.equal(merging, base) == (config.method == "none")
    remove(unet)
    assert torch.equal(unet(*call).sample, base)
    assert all(torch.equal(value, weights[name]) for name, value in unet.state_dict().items())


@pytest.mark.parametrize("config", configs(*PEERS, "tomesd"))
def test_every_element_of_a_batch_is_merged_on_its_own(unet, config, inputs):
    latents, timestep, text = inputs(16, 16, batch=3)
    together = run(unet, (latents, timestep, text), config)
    for i in range(3):
        alone = run(unet, (latents[i : i + 1], timestep, text[i : i + 1]), config)
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", configs(*PEERS))
@torch.no_grad()
def test_any_size_one_after_the_other(unet, config, inputs):
    apply(unet, config=config)
    for height, width in ((16, 16), (17, 13), (8, 24), (9, 31), (16, 16)):
        out = unet(*inputs(height, width)).sample
        assert out.shape == (2, 4, height, width)
        assert out.isfinite().all()
        row = summary(unet, show=False)["blocks"][0]
        tokens = height * width
        wanted = tokens - int(tokens * config.ratio)
        if config.method == "todo":
            wanted = -(-height // 2) * -(-width // 2)
        elif config.method == "free":
            wanted = round(tokens * (1 - config.ratio))
        assert (row["tokens"], row["merged"]) == (tokens, wanted)


@pytest.mark.parametrize("name", RANDOM)
def test_a_seed_decides(unet, name, inputs, small_unet):
    call = inputs(16, 16)
    first = run(unet, call, preset(name, seed=3))
    torch.manual_seed(12345)
    assert torch.equal(run(unet, call, preset(name, seed=3)), first)
    assert torch.equal(run(small_unet(), call, preset(name, seed=3)), first)
    assert not torch.allclose(run(unet, call, preset(name, seed=4)), first)
    assert not torch.allclose(run(unet, call, preset(name, seed=None)), first)


@pytest.mark.parametrize("name", RANDOM)
@torch.no_grad()
def test_random_destinations_repeat_from_generation_to_generation(unet, name, inputs):
    apply(unet, config=preset(name, seed=3))
    latents, _, text = inputs(16, 16)

    def generate() -> list[torch.Tensor]:
        return [unet(latents, timestep, text).sample for timestep in (900, 500, 100)]

    first, second = generate(), generate()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("config", configs(*PEERS, "none", "tomesd"))
def test_no_random_numbers_are_taken_from_anyone(unet, config, inputs):
    def states() -> tuple:
        return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()

    before = states()
    run(unet, inputs(16, 16), config)
    assert states() == before


@pytest.mark.parametrize("config", configs("tome", "tofu", "free"))
@torch.no_grad()
def test_all_knobs_of_reuse_and_mode_work(unet, config, inputs):
    text = inputs(16, 16)[2]
    for changes in ({"mode": "once"}, {"share": "kind", "select_every": 4, "weights_every": 2}):
        apply(unet, config=config.replace(proportional=True, **changes))
        for step, timestep in enumerate((900, 700, 500, 300, 100)):
            out = unet(inputs(16, 16, seed=step)[0], timestep, text).sample
            assert out.isfinite().all()
    row = summary(unet, show=False)["blocks"][0]
    assert (row["selected"], row["weighed"], row["reused"]) == (2, 3, 2)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["toma", *PEERS, "none"]),
    st.lists(st.tuples(st.integers(2, 8), st.integers(2, 8)), min_size=1, max_size=2),
    st.integers(1, 3),
)
def test_the_interface_on_any_grids(name, grids, batch):
    """One picture, or two of different sizes side by side, as with a reference picture."""
    config = MergeConfig() if name == "toma" else preset(name)
    method = METHODS[name](config)
    layout = method.layout(tuple(grids), config.ratios[0], CPU, step=1, variant=method.variant(0.9))
    x = torch.randn(batch, sum(h * w for h, w in grids), 8)
    plan = method.plan(x, layout)
    assert layout.tokens == x.shape[1]
    assert plan.merge(x).shape == (batch, layout.kept, 8)
    assert plan.sizes.shape == plan.positions.shape == (batch, layout.kept)
    assert all(len(set(row)) == layout.kept for row in plan.positions.tolist())
    if name != "free":
        torch.testing.assert_close(plan.sizes.sum(1), torch.full((batch,), float(x.shape[1])))
    if not method.keys_only:
        assert plan.unmerge(plan.merge(x)).shape == x.shape
    again = plan.refresh(x)
    assert torch.equal(again.merge(x), plan.merge(x))
    assert torch.equal(again.positions, plan.positions)


@pytest.mark.parametrize(
    ("name", "variant"), [("tome", ""), ("tofu", "prune"), ("tofu", "merge"), ("todo", ""), ("free", "")]
)
def test_merge_and_unmerge_are_one_graph_and_new_plans_do_not_recompile(name, variant):
    method = METHODS[name](preset(name))
    layout = method.layout(((8, 8),), preset(name).ratios[0], CPU, variant=variant)
    compiled = []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph

    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend)
    def around(x, plan):
        y = 2 * plan.merge(x)
        return y if method.keys_only else plan.unmerge(y)

    for _ in range(3):
        x = torch.randn(2, 64, 8)
        plan = method.plan(x, layout)
        want = 2 * plan.merge(x)
        torch.testing.assert_close(around(x, plan), want if method.keys_only else plan.unmerge(want))
    assert len(compiled) == 1


@pytest.mark.parametrize("config", configs("tome", "todo"))
@torch.no_grad()
def test_a_whole_model_compiles_to_one_graph(config, inputs, small_unet):
    unet = small_unet(
        block_out_channels=(16, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    latents, _, text = inputs(16, 16)
    apply(unet, config=config.replace(select_every=5, weights_every=5))
    steps = [torch.tensor(t) for t in (900, 700)]
    eager = [unet(latents, step, text).sample for step in steps]
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(unet, fullgraph=True, backend=backend)
    for step, want in zip(steps, eager, strict=True):
        torch.testing.assert_close(compiled(latents, step, text).sample, want, atol=1e-5, rtol=0)
    assert len(graphs) == 2, "one that plans, one that uses the plans"


@pytest.mark.parametrize("config", configs(*PEERS))
def test_shapes_can_be_counted_without_values(config, inputs, small_unet):
    model = small_unet().to("meta")
    call = tuple(x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs(16, 16))
    assert run(model, call, config).shape == (2, 4, 16, 16)


@pytest.mark.parametrize("config", configs(*PEERS))
def test_only_cross_attention_blocks_have_no_self_attention_to_merge(config, inputs, small_unet):
    model = small_unet(only_cross_attention=(True, False, False, False))
    apply(model, config=config)
    out = model(*inputs(16, 16)).sample
    assert out.isfinite().all()
    parts = {row["block"]: row["modules"] for row in summary(model, show=False)["blocks"]}
    assert "self" not in parts.get("down_blocks.0.attentions.0.transformer_blocks.0", [])


@pytest.mark.parametrize("config", configs(*PEERS))
def test_gradients_reach_the_weights(unet, config, inputs):
    with merged(unet, config=config):
        unet(*inputs(16, 16)).sample.square().mean().backward()
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    assert all(
        layer.weight.grad.abs().sum() > 0 for layer in (attention.to_q, attention.to_k, attention.to_v)
    )


@pytest.mark.parametrize("config", configs(*PEERS))
@torch.no_grad()
def test_sdxl_where_the_originals_do_nothing(small_unet, inputs, config):
    model = small_unet(
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=2,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 16,
    )
    more = {"added_cond_kwargs": {"text_embeds": torch.randn(2, 16), "time_ids": torch.randn(2, 6)}}
    call = inputs(16, 24)
    base = model(*call, **more).sample
    apply(model, config=config)
    assert not torch.allclose(model(*call, **more).sample, base, atol=1e-3)
    assert all(row["merged"] < row["tokens"] == 96 for row in summary(model, show=False)["blocks"])
    assert torch.equal(remove(model)(*call, **more).sample, base)
