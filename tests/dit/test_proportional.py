"""Keys of merged image tokens carry the log of their cluster size, text keys nothing; by mask or by extra
head dimensions."""

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from small_dits import CONFIG, flux_inputs, make_flux, run

import tomadiff
from tomadiff.patching import joint
from tomadiff.patching.heads import EXTRA, narrow, widen

# Those that compute on a CPU; the others want a GPU or a package, and say so when they are set.
CPU_BACKENDS = ["native", "_native_math", "_native_flash", "flex"]


def test_extra_dimensions_equal_a_mask():
    q, k, v = torch.randn(3, 2, 4, 10, 16).unbind(0)
    bias = torch.rand(2, 10).log()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, None])
    wide = [widen(x, role, bias[:, None, :, None]) for x, role in ((q, "query"), (k, "key"), (v, "value"))]
    assert {x.shape[-1] for x in wide} == {16 + EXTRA}
    out = F.scaled_dot_product_attention(*wide)
    torch.testing.assert_close(out[..., :16], expected, atol=1e-5, rtol=1e-5)
    assert (out[..., 16:] == 0).all()


def test_narrow_undoes_widen():
    x = torch.randn(2, 5, 3, 8)
    wide = widen(x, "value", torch.zeros(1)).flatten(-2)
    assert torch.equal(narrow(wide, 3), x.flatten(-2))


@pytest.mark.parametrize("mode", ["each", "once"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_both_ways_give_the_same_model(monkeypatch, batch, mode, fused):
    model = make_flux()
    if fused:
        model.fuse_qkv_projections()
    tomadiff.apply(model, config=CONFIG.replace(mode=mode))
    by_mask = run(model, flux_inputs(batch=batch))
    monkeypatch.setattr(joint, "MASK_BACKENDS", ())
    by_width = run(model, flux_inputs(batch=batch))
    torch.testing.assert_close(by_width, by_mask, atol=1e-5, rtol=1e-5)
    without = run(
        tomadiff.apply(model, config=CONFIG.replace(mode=mode, proportional=False)), flux_inputs(batch=batch)
    )
    assert (by_mask - without).abs().max() > 1e-3


def test_heads_have_their_width_again_afterwards(monkeypatch):
    model = make_flux()
    expected = run(model, flux_inputs())
    monkeypatch.setattr(joint, "MASK_BACKENDS", ())
    tomadiff.apply(model, config=CONFIG)
    run(model, flux_inputs())
    assert all(block.attn.head_dim == 16 for block in model.transformer_blocks)
    broken = flux_inputs()
    broken["txt_ids"] = broken["txt_ids"][:3]
    with pytest.raises((RuntimeError, IndexError)):
        run(model, broken)
    tomadiff.remove(model)
    assert torch.equal(run(model, flux_inputs()), expected)


def test_only_backends_that_add_a_mask_get_one():
    model = make_flux()
    attn = model.transformer_blocks[0].attn
    assert joint.takes_mask(attn)
    attn.processor._attention_backend = AttentionBackendName.FLASH
    assert not joint.takes_mask(attn)
    attn.processor._attention_backend = AttentionBackendName._NATIVE_FLASH
    assert not joint.takes_mask(attn)


def test_a_backend_that_can_do_neither_is_refused_in_words():
    model = make_flux()
    model.transformer_blocks[0].attn.processor._attention_backend = AttentionBackendName.SAGE
    tomadiff.apply(model, config=CONFIG)
    with pytest.raises(ValueError, match="proportional=False"):
        run(model, flux_inputs())


@pytest.fixture
def _backend_given_back():
    """`set_attention_backend` also changes diffusers' default for the rest of the process."""
    with attention_backend("native"):
        yield


@pytest.mark.usefixtures("_backend_given_back")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("backend_first", [True, False])
def test_an_attention_backend_set_before_or_after(backend, backend_first):
    model = make_flux()
    expected = run(tomadiff.apply(make_flux(), config=CONFIG), flux_inputs(batch=2))
    if backend_first:
        model.set_attention_backend(backend)
        tomadiff.apply(model, config=CONFIG)
    else:
        tomadiff.apply(model, config=CONFIG)
        run(model, flux_inputs(batch=2))
        model.set_attention_backend(backend)
    torch.testing.assert_close(run(model, flux_inputs(batch=2)), expected, atol=1e-5, rtol=1e-5)
    with attention_backend(backend):
        torch.testing.assert_close(run(model, flux_inputs(batch=2)), expected, atol=1e-5, rtol=1e-5)
