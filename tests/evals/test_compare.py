"""The comparison on a real embedded model, with so few steps that it is quick; its pictures are noise."""

import json
from pathlib import Path

import pytest
import torch

from tomadiff.config import MergeConfig, preset
from tomadiff.demo import models
from tomadiff.evals import compare
from tomadiff.evals.compare import Comparison
from tomadiff.evals.entries import CHANGES, Entry, changed, named, reported

ENTRIES = [
    Entry("ToMe", 0.5, named("tome")),
    Entry("ToMA", 0.5, named("flux", skip_first=0), "ToMe-0.5"),
]


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return Comparison("emoji-flux", prompts=2, seeds=1, offset=0, steps=1, folder=tmp_path)


def test_entries_are_compared_at_equal_cost(comparison: Comparison):
    unmerged, tome, toma = comparison.run(ENTRIES)
    assert (unmerged.error, unmerged.ssim, unmerged.flops_saved) == (0, 1, 0)
    # Tiles of 16 tokens merge one token at a time; ToMA saves at least as much as ToMe.
    assert -0.001 <= toma.flops_saved - tome.flops_saved < 1 / 16
    assert tome.error > 0
    assert toma.config is not None
    assert toma.config["method"] == "toma"
    assert 0.4 < toma.config["ratio"] < 0.6
    sheet = comparison.sheet(ENTRIES, count=2)
    assert sheet.width == 8 + 2 * 168


def test_what_cannot_cost_the_same_costs_less(comparison: Comparison, monkeypatch: pytest.MonkeyPatch):
    def in_quarters(config: MergeConfig) -> int:
        return 4000 if config.method == "none" else 1000 * round(4 * (1 - config.ratio_at(0.5)))

    monkeypatch.setattr(comparison, "cost", in_quarters)
    entry = Entry("ToMA", 0.5, named("sdxl"))
    for wanted in (2500, 2990, 1010):
        assert in_quarters(comparison.at_cost(entry, wanted)) == wanted // 1000 * 1000
    assert in_quarters(comparison.at_cost(entry, 3000)) == 3000


def test_a_second_run_draws_and_counts_nothing_anew(comparison: Comparison, monkeypatch: pytest.MonkeyPatch):
    first = comparison.run(ENTRIES)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr(models, "draw", never)
    monkeypatch.setattr(compare, "count_flops", never)
    assert comparison.run(ENTRIES) == first


def test_kept_pictures_of_other_settings_are_not_taken(comparison: Comparison):
    old = comparison.pictures("x", preset("tome", ratio=0.5))
    new = comparison.pictures("x", preset("tome", ratio=0.75))
    assert not torch.equal(old, new)


def test_kept_pictures_of_other_weights_are_not_taken(comparison: Comparison):
    comparison.pictures("x", None)
    comparison.weights = "another training"
    before = (comparison.folder / "x.json").read_text()
    comparison.pictures("x", None)
    assert (comparison.folder / "x.json").read_text() != before


def test_reported_entries_cost_what_an_earlier_one_does():
    for entries in (reported("flux"), changed("sdxl")):
        seen: set[str] = set()
        for entry in entries:
            assert entry.costs_as is None or entry.costs_as in seen
            assert entry.key not in seen
            seen.add(entry.key)
            entry.make(0.3 if entry.name != "ToDo" else entry.ratio)
            if entry.costs_as is not None:
                entry.make(entry.most)
    assert len(changed("flux")) == len(CHANGES) + 1


def test_entries_are_listed_at_the_ratios_asked_for():
    assert {entry.ratio for entry in reported("flux", (0.5,))} == {0.5}
    assert any(entry.name == "ToDo" for entry in reported("flux", (0.75,)))
    assert len(changed("flux", (0.25, 0.5))) == 2 * len(changed("flux"))


def test_defaults_that_leave_blocks_alone_stand_beside_ones_that_do_not():
    for family in ("flux", "sdxl"):
        everywhere = [entry for entry in reported(family) if entry.name == "ToMA everywhere"]
        assert [entry.ratio for entry in everywhere] == [0.25, 0.5, 0.75]
        made = [entry.make(entry.ratio) for entry in everywhere]
        everything = {
            (config.skip_first, config.end, config.min_tokens, config.ff_min_tokens) for config in made
        }
        assert everything == {(0, 1.0, 0, 0)}


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_a_peer_that_leaves_alone_what_the_defaults_do_stands_beside_them(family):
    there = {entry.name: entry.make(0.75) for entry in reported(family) if entry.name.endswith("there")}
    theirs, ours = there["ToMe there"], there["ToMA as ToMe there"]
    assert (theirs.method, ours) == ("tome", preset(family, ratio=0.75))
    for name in ("skip_first", "start", "end", "min_tokens", "ff_min_tokens"):
        assert getattr(theirs, name) == getattr(ours, name)


def test_command_writes_table_and_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compare, "reported", lambda family: ENTRIES)
    files = ["--json", str(tmp_path / "q.json"), "--sheet", str(tmp_path / "q.png")]
    size = ["--prompts", "2", "--seeds", "1", "--steps", "1"]
    monkeypatch.setattr(
        "sys.argv", ["compare", "--model", "emoji-flux", "--work", str(tmp_path), *size, *files]
    )
    compare.main()
    report = json.loads((tmp_path / "q.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["unmerged", "ToMe", "ToMA"]
    assert (tmp_path / "q.png").stat().st_size > 1000


def test_command_runs_only_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    more = [*ENTRIES, Entry("never", 0.5, ENTRIES[0].make, ENTRIES[0].key)]
    monkeypatch.setattr(compare, "reported", lambda family: more)
    call = ["compare", "--model", "emoji-flux", "--work", str(tmp_path), "--prompts", "1", "--seeds", "1"]
    monkeypatch.setattr("sys.argv", [*call, "--steps", "1", "--only", "nothing"])
    with pytest.raises(SystemExit):
        compare.main()
    assert "no entries ['nothing']; there are ['ToMe', 'ToMA', 'never']" in capsys.readouterr().err
    written = tmp_path / "q.json"
    monkeypatch.setattr("sys.argv", [*call, "--steps", "1", "--only", "ToMA", "--json", str(written)])
    compare.main()
    assert [row["name"] for row in json.loads(written.read_text())["rows"]] == ["unmerged", "ToMe", "ToMA"]
