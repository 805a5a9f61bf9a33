"""The benchmark on a block small enough for a test. What it says is checked, not how fast anything is."""

import json

import pytest
import torch
from typer.testing import CliRunner

from tomadiff.bench import report, targets, versus
from tomadiff.bench.memory import peak_memory
from tomadiff.cli import app


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(targets.TARGETS, "small", lambda name: targets._sdxl_block(name, 16, 128, 10))


@pytest.fixture
def measured():
    target = targets.build("small")
    measurements = versus.entries(target, versus.METHODS, versus.RATIOS)
    versus.run(target, measurements, rounds=2)
    return measurements


def test_every_method_at_every_ratio_it_can_do(measured):
    done = [(m.method, m.ratio) for m in measured]
    assert done.count(("none", 0.0)) == 1
    assert [ratio for method, ratio in done if method == "todo"] == [0.75]
    for method in ("free", "toma", "tome", "tofu"):
        assert [ratio for name, ratio in done if name == method] == [0.25, 0.5, 0.75]
    assert all(len(m.rounds) == 2 for m in measured)


def test_counts_fall_with_the_ratio_and_stay_above_the_ceiling(measured):
    flops = {(m.method, m.ratio): m.flops for m in measured}
    for ratio in versus.RATIOS:
        assert flops["free", ratio] < flops["toma", ratio] < flops["none", 0.0]
    assert flops["toma", 0.75] < flops["toma", 0.5] < flops["toma", 0.25]


def test_toma_is_charged_for_its_plans_over_a_generation():
    target = targets.build("small")
    toma, tome = versus.entries(target, ("toma", "tome"), (0.5,))
    # 50 steps: 5 new plans, 5 more times new weights, shared by 10 blocks.
    one = {"select": 11.0, "weights": 6.0, "reuse": 1.0}
    assert toma.charged(one) == pytest.approx(1 + (5 * 10 + 5 * 5) / 50 / 10)
    assert tome.charged({"select": 3.0}) == 3.0  # plans in every call, for itself
    assert versus._kinds(tome) == ("select",)
    assert versus._kinds(toma) == ("select", "reuse", "weights")


def test_the_parts_of_the_overhead_are_seen(measured):
    toma = next(m for m in measured if m.method == "toma")
    assert min(toma.overhead.plan, toma.overhead.weights, toma.overhead.merge, toma.overhead.unmerge) > 0
    none = measured[0]
    assert none.overhead.merge == 0


def test_rows_compare_with_none_and_the_ceiling(measured):
    rows = report.rows(measured)
    assert rows[0]["speed_up"] == pytest.approx(1)
    free = next(row for row in rows if row["method"] == "free")
    assert free["share_of_ceiling"] == pytest.approx(1)
    assert all(row["peak_memory"] > 0 for row in rows)


def test_an_interruption_keeps_what_was_measured():
    target = targets.build("small")
    measurements = versus.entries(target, ("none", "toma"), (0.5,))

    def stop(what, done, of):
        if what.startswith("round 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        versus.run(target, measurements, 5, stop)
    assert [len(row["rounds"]) for row in report.rows(measurements)] == [1, 1]


def test_the_command_writes_json_and_a_picture(tmp_path):
    files = [str(tmp_path / name) for name in ("out.json", "out.png")]
    result = CliRunner().invoke(
        app,
        [
            "bench",
            "small",
            "--methods",
            "none,free,toma",
            "--rounds",
            "1",
            "--json",
            files[0],
            "--plot",
            files[1],
        ],
    )
    assert result.exit_code == 0, result.output
    assert "toma" in result.output
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["environment"]["torch"] == torch.__version__
    assert len(saved["rows"]) == 7
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "sdxl-block-64"),
        (["unet-block-8"], "unet-block-SIDE-WIDTH"),
        (["small", "--methods", "magic"], "unknown"),
        (["small", "--ratios", "1.5"], "ratio"),
        (["small", "--ratios", "half"], "half"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, message):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_peak_memory_counts_what_is_alive_at_once():
    def two_after_each_other():
        for _ in range(2):
            torch.empty(250_000)

    assert 1e6 <= peak_memory(two_after_each_other, torch.device("cpu")) < 2e6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdxl-block-64", "sdxl-block-32", "flux-dual", "flux-single", "sd3-block"])
def test_the_real_targets_run(name):
    target = targets.build(name)
    measurements = versus.entries(target, ("none", "free", "toma"), (0.5,))
    versus.run(target, measurements, rounds=1)
    assert all(row["speed_up"] > 0 for row in report.rows(measurements))
