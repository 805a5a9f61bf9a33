"""The benchmark on a block small enough for a test. What it says is checked, not how fast anything is."""

import json
import platform
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from rich.console import Console
from typer.testing import CliRunner

import tomadiff
from tomadiff.bench import report, shapes, targets, versus
from tomadiff.bench.memory import peak_memory
from tomadiff.bench.stopwatch import timed
from tomadiff.cli import app
from tomadiff.config import preset


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
    # 50 steps: 9 new plans, 16 more times new weights, shared by 10 blocks.
    one = {"select": 11.0, "weights": 6.0, "reuse": 1.0}
    assert toma.charged(one) == pytest.approx(1 + (9 * 10 + 16 * 5) / 50 / 10)
    assert tome.charged({"select": 3.0}) == 3.0  # plans in every call, for itself
    assert tome.kinds == ("select",)
    assert toma.kinds == ("select", "reuse", "weights")


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
    assert free["share_spread"] == 0
    assert all(row["peak_memory"] > 0 for row in rows)


def test_a_share_of_the_ceiling_is_taken_round_by_round():
    none, free, toma = versus.entries(targets.build("small"), ("none", "free", "toma"), (0.5,))
    for drift in (1.0, 5.0, 2.0):
        none.rounds.append({"select": 9.0})
        free.rounds.append({"select": 3.0 * drift})
        toma.rounds.append({"select": 4.0 * drift, "weights": 4.0 * drift, "reuse": 4.0 * drift})
    row = report.rows([none, free, toma])[-1]
    assert row["share_of_ceiling"] == pytest.approx(3 / 4)
    assert row["share_spread"] == pytest.approx(0)


def test_the_table_tells_of_a_call_that_makes_a_new_plan():
    none, toma, peer = versus.entries(targets.build("small"), ("none", "toma", "tofu-merge"), (0.5,))
    none.rounds.append({"select": 2.0})
    toma.rounds.append({"select": 1.2345, "weights": 1.1, "reuse": 1.0})
    peer.rounds.append({"select": 1.3})
    console = Console(width=80)
    with console.capture() as shown:
        console.print(*report.tables(report.rows([none, toma, peer])))
    assert "1,234.5" in shown.get()
    assert "speed-up" in shown.get()
    assert "tofu-merge" in shown.get()
    assert "…" not in shown.get()


def test_toma_is_compared_with_a_peer_round_by_round():
    toma, peer = versus.entries(targets.build("small"), ("toma", "tome"), (0.5,))
    for turn in range(12):
        drift = 1.0 + turn
        toma.rounds.append(dict.fromkeys(("select", "weights", "reuse"), drift))
        # Behind in two rounds of twelve, ahead by a half in all others.
        peer.rounds.append({"select": drift * (0.9 if turn in (3, 7) else 1.5)})
    ours, theirs = report.rows([toma, peer])
    assert ours["toma_ahead"] is None
    assert theirs["toma_ahead"] == {
        "times": pytest.approx(1.5),
        "interval": pytest.approx((1.5, 1.5)),
        "rounds_won": 10,
        "rounds": 12,
    }


def test_few_rounds_tell_no_interval():
    toma, peer = versus.entries(targets.build("small"), ("toma", "tome"), (0.5,))
    toma.rounds.append(dict.fromkeys(("select", "weights", "reuse"), 1.0))
    peer.rounds.append({"select": 2.0})
    rows = report.rows([toma, peer])
    assert rows[-1]["toma_ahead"]["interval"] is None
    console = Console(width=80)
    with console.capture() as shown:
        console.print(*report.tables(rows))
    assert "how much faster ToMA is" in shown.get()
    assert "2.000" in shown.get()


@pytest.fixture
def whole() -> targets.Target:
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=16,
    )
    arguments = {"sample": torch.randn(1, 4, 16, 16), "encoder_hidden_states": torch.randn(1, 7, 16)}
    return targets.Target("unet", "sd", unet, arguments, 1, lambda step: 999 - step)


def test_the_whole_unet_has_a_size(monkeypatch):
    small = shapes.SDXL | {
        "block_out_channels": (16, 16, 16),
        "attention_head_dim": (1, 2, 2),
        "transformer_layers_per_block": (1, 1, 1),
        "norm_num_groups": 8,
    }
    monkeypatch.setattr(targets, "SDXL", small)
    target = targets.build("sdxl", size=256)
    assert target.arguments["sample"].shape == (1, 4, 32, 32)
    (toma,) = measurements = versus.entries(target, ("toma",), (0.5,))
    versus.run(target, measurements, rounds=1)
    assert toma.flops > 0
    with pytest.raises(ValueError, match="a size of its own"):
        targets.build("small", size=256)


def test_the_package_tomesd_is_timed_on_whole_unets(whole):
    none, package = measurements = versus.entries(whole, ("none", versus.TOMESD), (0.5,))
    versus.run(whole, measurements, rounds=1)
    assert package.flops < none.flops
    assert len(package.rounds) == 1
    after = versus.entries(whole, ("none",), (0.5,))
    versus.run(whole, after, rounds=1)
    assert after[0].flops == none.flops, "the package was not removed"


def test_the_package_tomesd_is_refused_where_it_cannot_be_timed(whole, monkeypatch):
    with pytest.raises(ValueError, match="whole UNets only"):
        versus.entries(targets.build("small"), (versus.TOMESD,), (0.5,))
    with pytest.raises(ValueError, match="without --compile"):
        versus.entries(whole, (versus.TOMESD,), (0.5,), compiled=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tomesd"):
        versus.entries(whole, (versus.TOMESD,), (0.5,))


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
    assert saved["environment"]["device"] == report.processor()
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
        (["small", "--set", "mode"], "name=value"),
        (["small", "--set", "mode=twice"], "unknown mode"),
        (["small", "--set", "moode=once"], "moode"),
        (["small", "--rounds", "1", "--set", 'overrides={"nothing": 0.5}'], "nothing"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, message):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_settings_change_toma_alone(tmp_path):
    changed = ["--set", "mode=each", "--set", "tau=0.01", "--set", 'modules=["self", "ff"]']
    arguments = ["bench", "small", "--methods", "none,toma,tome", "--ratios", "0.5", "--rounds", "1"]
    result = CliRunner().invoke(app, [*arguments, *changed, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    none, toma, tome = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (toma["config"]["mode"], toma["config"]["tau"]) == ("each", 0.01)
    assert toma["config"]["modules"] == ["self", "ff"]
    assert tome["config"]["mode"] == none["config"]["mode"] == "each"


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


def test_a_pipeline_by_path_is_timed_over_whole_pictures(tmp_path):
    shapes.small_sdxl_pipeline().save_pretrained(tmp_path)
    target = targets.build(str(tmp_path), steps=2, size=256)
    # The pipeline of shapes has no text encoders: it is called with embeddings.
    target.arguments = shapes.small_sdxl_prompt() | {"height": 256, "width": 256, "num_inference_steps": 2}
    measurements = versus.entries(target, ("none", "free", "toma", "tome"), (0.5,))
    versus.run(target, measurements, rounds=1)
    flops = {m.method: m.flops for m in measurements}
    assert flops["free"] < flops["toma"] < flops["none"]
    assert all(m.kinds == ("select",) for m in measurements)
    assert next(m for m in measurements if m.method == "toma").config == preset("sdxl", ratio=0.5)


def test_compiled_targets_stay_patched_and_are_timed(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    target = targets.build("small")
    measurements = versus.entries(target, ("none", "toma"), (0.5,))
    versus.compile_each(measurements, lambda: targets.build("small"))
    versus.run(target, measurements, rounds=2)
    toma = measurements[1]
    assert toma.compiled is not None
    assert tomadiff.summary(toma.compiled.model, show=False)["applied"]
    # The warm-up and both rounds start over: the first call of each makes a new plan.
    assert [sorted(one) for one in toma.rounds] == [["reuse", "select", "weights"]] * 2
    assert tomadiff.summary(toma.compiled.model, show=False)["blocks"][0]["selected"] == 3


compile_in_place = torch.nn.Module.compile


def compile_eagerly(self, **options):
    """Traced as for inductor, but without waiting for a C++ compiler."""
    compile_in_place(self, backend="eager", **options)


class FakeEvent:
    """Stands for a CUDA event on a machine without CUDA; a millisecond passes at every look at it."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        calls.append("record")

    def elapsed_time(self, end):
        return 250.0


calls: list[str] = []


def test_cuda_is_timed_by_events_after_waiting_for_the_device(monkeypatch):
    """With a fake device: there is no GPU where these tests run."""
    calls.clear()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    result, seconds = timed(lambda: calls.append("run") or 7, torch.device("cuda"))
    assert (result, seconds) == (7, 0.25)
    assert calls == ["wait", "record", "run", "record", "wait"]


def test_cuda_memory_is_the_peak_above_what_was_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 170)
    assert peak_memory(lambda: None, torch.device("cuda")) == 70


def test_the_cpu_is_named_where_its_name_is_known(tmp_path: Path):
    about = tmp_path / "cpuinfo"
    about.write_text("processor : 0\nmodel name\t: Some CPU @ 3 GHz\nprocessor : 1\nmodel name\t: Some CPU\n")
    assert report.processor(about) == "Some CPU @ 3 GHz"
    assert report.processor(tmp_path / "missing") == (platform.processor() or platform.machine())


def test_a_target_moves_with_its_arguments():
    target = targets.build("small").to(torch.device("meta"), torch.bfloat16)
    assert {x.device.type for x in target.arguments.values()} == {"meta"}
    assert target.call(0).dtype == torch.bfloat16
    assert report.environment(target)["dtype"] == "torch.bfloat16"
    assert report.environment(target)["attention"].startswith("native")
