"""Quantised linear layers: int8 weights from torch itself, and torchao where it is installed."""

import pytest
import torch
from small_dits import CONFIG, EVERYONE, make_flux, make_sd3, run
from torch import nn
from torch.ao.quantization import quantize_dynamic

import tomadiff


def quantise(model):
    """In place: other modules take the place of the linear ones in the blocks."""
    blocks = [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", [])]
    for block in blocks:
        quantize_dynamic(block, {nn.Linear}, dtype=torch.qint8, inplace=True)


def with_torchao(model):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("way", [quantise, with_torchao])
@pytest.mark.parametrize("quantised_first", [True, False])
@pytest.mark.parametrize("mode", ["each", "once"])
def test_quantised_before_or_after_apply(main_family, way, quantised_first, mode):
    model, inputs = main_family
    make = make_flux if hasattr(model, "single_transformer_blocks") else make_sd3
    plain = make()
    way(plain)
    expected = run(plain, inputs(batch=2))
    config = EVERYONE.replace(mode=mode)
    if quantised_first:
        way(model)
        tomadiff.apply(model, config=config)
    else:
        tomadiff.apply(model, config=config)
        run(model, inputs(batch=2))
        way(model)
    # Activations are quantised by the range of all tokens, which rounding alone may shift.
    torch.testing.assert_close(run(model, inputs(batch=2)), expected, atol=2e-2, rtol=2e-2)
    tomadiff.apply(model, config=CONFIG.replace(mode=mode))
    assert torch.isfinite(run(model, inputs(batch=2))).all()
    tomadiff.remove(model)
    assert torch.equal(run(model, inputs(batch=2)), expected)
