from typer.testing import CliRunner

from tomadiff.cli import app


def test_demo_prints_tokens_flops_and_time_side_by_side():
    result = CliRunner().invoke(app, ["demo", "--steps", "1", "--rounds", "1", "--size", "128"])
    assert result.exit_code == 0, result.output
    for word in ("ratio", "tokens", "GFLOP", "seconds", "0.00", "0.25", "0.50", "0.75", "down_blocks.1"):
        assert word in result.output


def test_demo_refuses_impossible_sizes():
    result = CliRunner().invoke(app, ["demo", "--size", "130"])
    assert result.exit_code == 2
    assert "multiples of 8" in result.output


def test_flops_counts_the_real_sdxl_unet():
    result = CliRunner().invoke(app, ["flops", "--size", "512"])
    assert result.exit_code == 0, result.output
    assert "unmerged" in result.output
    assert "0.75" in result.output
