"""`docs/adding-a-model.md`, followed to the letter."""

import re
from pathlib import Path

import pytest
import torch

import tomadiff
from tomadiff.patching.adapters import ADAPTERS

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"


def blocks_of_code():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)


@pytest.fixture(scope="module")
def page():
    """The names that the page's code defines, after all of it ran."""
    torch.manual_seed(0)
    known = list(ADAPTERS)
    names = {}
    for code in blocks_of_code():
        exec(compile(code, str(PAGE), "exec"), names)
    yield names
    ADAPTERS[:] = known


def test_13_the_page_runs_and_the_model_is_supported(page):
    assert "ToyDiT" in tomadiff.supported_models()
    rows = tomadiff.summary(page["model"], show=False)["blocks"]
    assert [row["merged"] for row in rows] == [256, 128, 128, 128, 128, 128]
    assert [row["note"] for row in rows] == ["left alone"] + [""] * 5


def test_the_adapter_is_short():
    adapter = next(code for code in blocks_of_code() if "class ToyAdapter" in code)
    assert len(adapter.splitlines()) < 60


@pytest.mark.parametrize("mode", ["each", "once"])
@pytest.mark.parametrize("merge_region", ["tile", "stripe", "global"])
def test_every_setting_works(page, mode, merge_region):
    model = page["ToyDiT"]()
    inputs = (torch.randn(2, 4, 24, 40), 500, torch.randn(2, 5, 16))
    assert page["largest_change"](model, *inputs, mode=mode, merge_region=merge_region) < 1e-4
    with torch.no_grad():
        plain = model(*inputs)
        tomadiff.apply(model, config=tomadiff.MergeConfig(mode=mode, merge_region=merge_region))
        assert not torch.allclose(model(*inputs), plain, atol=1e-4)
        tomadiff.remove(model)
        assert torch.equal(model(*inputs), plain)


def test_it_compiles_to_one_graph(page):
    torch._dynamo.reset()
    model = tomadiff.apply(page["ToyDiT"](), config=tomadiff.MergeConfig())
    inputs = (torch.randn(2, 4, 24, 40), torch.tensor(500.0), torch.randn(2, 5, 16))
    with torch.no_grad():
        expected = model(*inputs)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), expected, atol=1e-4, rtol=1e-4)


def test_a_wrong_grid_is_an_error_in_words(page):
    class Wrong(page["ToyAdapter"]):
        def read(self, given):
            reading = super().read(given)
            reading.grids["all"] = ((3, 3),)
            return reading

    ADAPTERS.append(Wrong)
    try:
        model = tomadiff.apply(page["ToyDiT"](), config=tomadiff.MergeConfig(min_tokens=0))
        with pytest.raises(RuntimeError, match="expected 9 tokens"):
            model(torch.randn(1, 4, 24, 40), 500, torch.randn(1, 5, 16))
    finally:
        ADAPTERS.remove(Wrong)


def test_an_unregistered_model_is_refused():
    class Unknown(torch.nn.Module):
        pass

    with pytest.raises(TypeError, match="FluxTransformer2DModel"):
        tomadiff.apply(Unknown(), 0.5)
