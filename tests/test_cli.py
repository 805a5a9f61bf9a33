from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from tomadiff.cli import app


def test_demo_prints_a_table_and_draws_a_sheet(tmp_path: Path):
    out = tmp_path / "new" / "sheet.png"
    result = CliRunner().invoke(
        app, ["demo", "--model", "emoji-flux", "--steps", "1", "--rounds", "1", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    for word in ("emoji-flux", "unmerged", "0.25", "0.50", "0.75", "seconds", "PSNR", "SSIM", "loaded in"):
        assert word in result.output
    with Image.open(out) as sheet:
        assert sheet.width > 4 * 256


def test_demo_lists_what_the_models_can_draw():
    result = CliRunner().invoke(app, ["demo", "--list"])
    assert result.exit_code == 0
    assert "tiger face" in result.output
    assert "purple" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "emoji-dit"], "emoji-flux"),
        (["--prompt", "a motorcycle on a blue background"], "motorcycle"),
        (["--out", "sheet"], ".png"),
    ],
)
def test_demo_refuses_what_it_cannot_do(arguments: list[str], message: str):
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_flops_counts_the_real_sdxl_unet():
    def saved(*options: str) -> str:
        result = CliRunner().invoke(app, ["flops", "--size", "512", *options])
        assert result.exit_code == 0, result.output
        assert "unmerged" in result.output
        return next(line for line in result.output.splitlines() if "0.75" in line)

    # Most of the work of a small picture is in the feed-forwards of its coarse grid, which the preset spares.
    assert "1.32x" in saved()
    assert "2.13x" in saved("--set", "ff_min_tokens=0")


@pytest.mark.parametrize("command", [["flops"], ["bench", "sdxl-block-32"]])
@pytest.mark.parametrize(
    ("setting", "message"),
    [("nonsense=1", "nonsense"), ("ratio=0.3", "what the rows differ in"), ("tau", "name=value")],
)
def test_settings_that_make_no_sense_are_refused(command, setting, message):
    result = CliRunner().invoke(app, [*command, "--set", setting])
    assert result.exit_code == 2
    assert message in result.output


def test_flops_refuses_settings_that_leave_nothing_to_merge():
    result = CliRunner().invoke(app, ["flops", "--size", "64", "--set", "skip_first=99"])
    assert result.exit_code == 2
    assert "would merge nothing" in result.output
