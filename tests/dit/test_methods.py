"""The peers on transformers with joint attention."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from small_dits import FAMILIES, make_flux, run
from torch.nn.functional import scaled_dot_product_attention

import tomadiff
from tomadiff import preset
from tomadiff.core.rotary import rotate
from tomadiff.patching.apply import session_of

PEERS = ("tome", "tofu", "todo", "free")


def small(name: str, **changes):
    return preset(name, min_tokens=0, **changes)


@pytest.mark.parametrize("name", PEERS)
def test_methods_work_on_every_family(family, name):
    model, inputs = family
    expected = run(model, inputs(batch=2))
    for changes in ({}, {"proportional": True}, {"share": "kind", "select_every": 2, "weights_every": 1}):
        tomadiff.apply(model, config=small(name, **changes))
        got = run(model, inputs(batch=2))
        assert got.shape == expected.shape
        assert got.isfinite().all()
        assert not torch.allclose(got, expected, atol=1e-3)
        rows = tomadiff.summary(model, show=False)["blocks"]
        blocks = sum("transformer_blocks" in n and n.count(".") == 1 for n, _ in model.named_modules())
        assert {row["block"] for row in rows if row["merged"] < row["tokens"]} == {
            row["block"] for row in rows
        }
        assert len({row["block"] for row in rows}) == blocks, "every block merges"
    assert torch.equal(run(tomadiff.remove(model), inputs(batch=2)), expected)


@pytest.mark.parametrize("name", [*PEERS, "none"])
def test_ratio_zero_and_none_are_exactly_the_original(family, name):
    model, inputs = family
    expected = run(model, inputs())
    tomadiff.apply(model, config=small(name, ratio=0))
    assert torch.equal(run(model, inputs()), expected)


@pytest.mark.parametrize("name", PEERS)
def test_elements_of_a_batch_are_merged_on_their_own(main_family, name):
    model, inputs = main_family
    tomadiff.apply(model, config=small(name, proportional=True))
    call = inputs(batch=3)
    together = run(model, call)
    for i in range(3):
        shared = ("img_ids", "txt_ids")
        alone = {key: value if key in shared else value[i : i + 1] for key, value in call.items()}
        torch.testing.assert_close(run(model, alone), together[i : i + 1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("size", [(9, 7), (5, 12)])
def test_odd_sizes(main_family, name, size):
    model, inputs = main_family
    tomadiff.apply(model, config=small(name))
    assert run(model, inputs(size=size)).isfinite().all()


@pytest.mark.parametrize("name", ["tome", "tofu"])
def test_a_seed_decides_and_nothing_else(main_family, name):
    model, inputs = main_family
    results = []
    for seed in (1, 1, 2):
        before = torch.get_rng_state()
        tomadiff.apply(model, config=small(name, seed=seed))
        results.append(run(model, inputs()))
        assert torch.equal(torch.get_rng_state(), before)
        torch.randn(1)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", ["tome", "tofu", "free"])
def test_once_mode(main_family, name):
    model, inputs = main_family
    tomadiff.apply(model, config=small(name, mode="once", proportional=True))
    assert run(model, inputs()).isfinite().all()


@pytest.mark.parametrize("name", PEERS)
def test_one_graph(main_family, name):
    model, inputs = main_family
    tomadiff.apply(model, config=small(name, proportional=True))
    call = inputs()
    want = run(model, call)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(compiled, call), want, atol=1e-4, rtol=1e-4)


def downsampled(x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """x: (B, H * W, ...) -> (B, H * W / 4, ...) by nearest neighbours, row by row."""
    return x.unflatten(1, size)[:, ::2, ::2].flatten(1, 2)


def heads(attention, x: torch.Tensor, names: tuple[str, str, str], norms: tuple[str, str]):
    """Queries, keys and values: (B, S, heads, D), normed."""
    q, k, v = (getattr(attention, name)(x).unflatten(-1, (attention.heads, -1)) for name in names)
    for norm, which in zip(norms, "qk", strict=True):
        module = getattr(attention, norm)
        if module is not None:
            q, k = (module(q), k) if which == "q" else (q, module(k))
    return q, k, v


def attend(q, k, v, bias=None):
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    mask = None if bias is None else bias.expand(q.shape[0], 1, q.shape[2], -1)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


IMAGE = (("to_q", "to_k", "to_v"), ("norm_q", "norm_k"))
TEXT = (("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k"))


def record(model, attention, call, config):
    """What an attention gets and gives in a merged call; its hooks of ours lie in between."""
    seen = {}
    original = attention.forward

    def forward(*args, **kwargs):
        seen["in"] = kwargs
        seen["out"] = hooked(*args, **kwargs)
        return seen["out"]

    tomadiff.apply(model, config=config)
    hooked, attention.forward = attention.forward, forward
    run(model, call)
    attention.forward = original
    return seen["in"], seen["out"]


@pytest.mark.parametrize("proportional", [False, True])
@pytest.mark.parametrize("kind", ["sd3.5 medium", "sd3.0"])
@torch.no_grad()
def test_todo_in_sd3_is_attention_with_downsampled_keys_written_out(kind, proportional):
    make, inputs = FAMILIES[kind]
    model, size = make(), (8, 12)
    attention = model.transformer_blocks[0].attn
    given, (image, text) = record(
        model, attention, inputs(size, batch=2), small("todo", proportional=proportional)
    )
    q, k, v = heads(attention, given["hidden_states"], *IMAGE)
    tq, tk, tv = heads(attention, given["encoder_hidden_states"], *TEXT)
    k, v = downsampled(k, size), downsampled(v, size)
    bias = torch.cat((torch.full((k.shape[1],), 4.0).log(), torch.zeros(tk.shape[1])))
    joined = [torch.cat(parts, dim=1) for parts in ((q, tq), (k, tk), (v, tv))]
    out = attend(*joined, bias if proportional else None)
    torch.testing.assert_close(image, attention.to_out[0](out[:, : q.shape[1]]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(text, attention.to_add_out(out[:, q.shape[1] :]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("proportional", [False, True])
@torch.no_grad()
def test_todo_in_flux_keeps_the_positions_of_queries_and_keys(proportional):
    _, inputs = FAMILIES["flux"]
    model, size = make_flux(), (8, 12)
    call = inputs(size, batch=2)
    cos, sin = model.pos_embed(torch.cat((call["txt_ids"], call["img_ids"])))
    t = call["txt_ids"].shape[0]
    kept = downsampled(torch.arange(96)[None, :, None], size).flatten()
    everyone, keys = torch.arange(t + 96), torch.cat((torch.arange(t), t + kept))
    bias = torch.cat((torch.zeros(t), torch.full((24,), 4.0).log())) if proportional else None
    config = small("todo", proportional=proportional)

    def turned(x, places):
        return rotate(x, cos[places][None, :, None], sin[places][None, :, None])

    dual = model.transformer_blocks[1].attn
    given, (image, text) = record(model, dual, call, config)
    q, k, v = heads(dual, given["hidden_states"], *IMAGE)
    tq, tk, tv = heads(dual, given["encoder_hidden_states"], *TEXT)
    joined = [torch.cat(parts, dim=1) for parts in ((tq, q), (tk, k[:, kept]), (tv, v[:, kept]))]
    out = attend(turned(joined[0], everyone), turned(joined[1], keys), joined[2], bias)
    torch.testing.assert_close(image, dual.to_out[0](out[:, t:]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(text, dual.to_add_out(out[:, :t]), atol=1e-5, rtol=1e-4)

    single = model.single_transformer_blocks[1].attn
    given, got = record(model, single, call, config)
    q, k, v = heads(single, given["hidden_states"], *IMAGE)
    out = attend(turned(q, everyone), turned(k[:, keys], keys), v[:, keys], bias)
    torch.testing.assert_close(got, out, atol=1e-5, rtol=1e-4)


def test_todo_refuses_fused_projections(main_family):
    model, inputs = main_family
    tomadiff.apply(model, config=small("todo"))
    model.fuse_qkv_projections()
    with pytest.raises(ValueError, match="unfuse_qkv_projections"):
        run(model, inputs())
    model.unfuse_qkv_projections()
    assert run(model, inputs()).isfinite().all()


def test_tofu_prunes_the_dual_and_merges_the_single_blocks_of_a_balanced_flux():
    model = tomadiff.apply(make_flux(dual=2, single=2), config=small("tofu", share="kind"))
    variants = {(group.kind, group.variant) for group in session_of(model).groups.values()}
    assert variants == {("dual", "prune"), ("single", "merge")}


@pytest.mark.parametrize("name", ["tome", "todo"])
def test_lora_before_or_after_apply(main_family, name):
    """A LoRA takes the place of the projections that give fewer keys."""
    model, inputs = main_family
    tomadiff.apply(model, config=small(name))
    bare = run(model, inputs())
    torch.manual_seed(2)
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"]))
    after = run(model, inputs())
    assert not torch.allclose(after, bare, atol=1e-4)
    tomadiff.apply(model, config=small(name))
    assert torch.equal(run(model, inputs()), after)
