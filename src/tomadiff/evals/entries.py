"""What is compared: named ways to merge, at a ratio of their own or at the cost of another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tomadiff.config import PRESETS, MergeConfig, preset

RATIOS = (0.25, 0.5, 0.75)
# The settings that say where and when a family's defaults merge.
PLACES = ("skip_first", "start", "end", "min_tokens", "ff_min_tokens")


@dataclass(frozen=True)
class Entry:
    """One way to merge. `costs_as`: change the ratio, up to `most`, until the counted operations are those of
    this one."""

    name: str
    ratio: float
    make: Callable[[float], MergeConfig] = field(compare=False)
    costs_as: str | None = None
    most: float = 0.98

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.name} {self.ratio:g}".replace(" ", "-").replace("/", "-")


def named(name: str, **changes: Any) -> Callable[[float], MergeConfig]:
    """The preset of this name at any ratio, with changes."""
    return lambda ratio: preset(name, ratio=ratio, **changes)


def reported(family: str, ratios: tuple[float, ...] = RATIOS) -> list[Entry]:
    """Our defaults, the method as published and the peers, at the costs of these ratios.

    ToMe merges every module of every block, so its cost at a ratio is what everything else at that ratio is
    given. Defaults leave blocks or steps alone, and cannot always save as much, so our method merges
    everywhere as well. ToDo saves in attention only, and at few ratios: our method is put beside it at
    ToDo's own cost. And so it is beside ToMe that leaves alone what our defaults do, at the most that ToMe
    can save there.
    """
    entries = []
    for ratio in ratios:
        entries += [
            Entry("ToMe", ratio, named("tome")),
            Entry("ToMA", ratio, named(family), f"ToMe-{ratio:g}"),
            Entry("paper ToMA", ratio, named("paper-tile"), f"ToMe-{ratio:g}"),
            Entry("ToFu", ratio, named("tofu"), f"ToMe-{ratio:g}", most=0.75),
        ]
        everywhere = named(family, skip_first=0, end=1.0, min_tokens=0, ff_min_tokens=0)
        entries.append(Entry("ToMA everywhere", ratio, everywhere, f"ToMe-{ratio:g}"))
    todo = PRESETS["todo"].ratio
    assert isinstance(todo, float)
    if todo not in ratios:
        return entries
    places = {name: getattr(PRESETS[family], name) for name in PLACES}
    return [
        *entries,
        Entry("ToDo", todo, named("todo")),
        Entry("ToMA as ToDo", todo, named(family), f"ToDo-{todo:g}"),
        Entry("ToMe there", 0.75, named("tome", **places)),
        Entry("ToMA as ToMe there", 0.75, named(family), "ToMe-there-0.75"),
    ]


# One setting at a time, changed from our defaults; what the defaults were chosen by. A ratio over the steps
# is a function of the ratio that is varied to reach the cost.
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "all keys weigh alike": {"proportional": False},
    "keys weigh as many tokens": {"proportional": True},
    "unmerge by copies": {"unmerge": "transpose"},
    "unmerge by ridge 0.1": {"unmerge": "ridge", "ridge": 0.1},
    "unmerge by pseudo-inverse": {"unmerge": "pinv"},
    "unmerge by fit, ridge 0.01": {"unmerge": "fit", "ridge": 0.01},
    "unmerge by fit, ridge 0.1": {"unmerge": "fit", "ridge": 0.1},
    "unmerge by fit, ridge 1": {"unmerge": "fit", "ridge": 1.0},
    "tau 0.001": {"tau": 0.001},
    "tau 0.01": {"tau": 0.01},
    "tau 0.05": {"tau": 0.05},
    "softmax over tokens": {"normalise": "tokens"},
    "tiles of 4": {"select_size": 4, "merge_size": 4},
    "tiles of 8": {"select_size": 8, "merge_size": 8},
    "tiles of 16": {"select_size": 16, "merge_size": 16},
    "tiles of 4, merged in tiles of 8": {"select_size": 4, "merge_size": 8},
    "tiles of 8, merged globally": {"select_size": 8, "merge_region": "global"},
    "tiles of 8, unmerge by copies": {"select_size": 8, "merge_size": 8, "unmerge": "transpose"},
    "every block merged": {"skip_first": 0},
    "first block of each kind left alone": {"skip_first": 1},
    "first two blocks left alone": {"skip_first": 2},
    "first tenth of the noise left alone": {"start": 0.1},
    "first quarter of the noise left alone": {"start": 0.25},
    "last third of the noise left alone": {"end": 0.67},
    "last half of the noise left alone": {"end": 0.5},
    "merged to the end": {"end": 1.0},
    "half the ratio in the first third": {"ratio": lambda ratio: ((0.0, ratio / 2), (0.33, ratio))},
    "half the ratio in the last third": {"ratio": lambda ratio: ((0.0, ratio), (0.67, ratio / 2))},
    "256 tokens: feed-forward merged too": {"ff_min_tokens": 0},
    "256 tokens: left alone": {"min_tokens": 512},
    "the same, tiles of 8": {"min_tokens": 512, "select_size": 8, "merge_size": 8},
    "the same, tiles of 16": {"min_tokens": 512, "select_size": 16, "merge_size": 16},
    "64 tokens: attention merged too": {"min_tokens": 64},
    "around every module": {"mode": "each"},
    "around whole blocks": {"mode": "once"},
    "no feed-forward": {"mode": "each", "modules": ("self", "cross")},
    "no cross-attention": {"mode": "each", "modules": ("self", "ff")},
    "a plan for all blocks of a kind": {"share": "kind"},
    "a plan for every block": {"share": "block"},
    "new plan at every step": {"select_every": 1, "weights_every": 1},
    "new plan every 2 steps": {"select_every": 2, "weights_every": 2},
    "new plan every 5 steps": {"select_every": 5, "weights_every": 5},
    "new plan every 10, weights every 5": {"select_every": 10, "weights_every": 5},
}


def changed(family: str, ratios: tuple[float, ...] = (0.5,)) -> list[Entry]:
    """Our defaults with one setting changed at a time, all at the cost of ToMe in every block."""

    def made(changes: dict[str, Any]) -> Callable[[float], MergeConfig]:
        over_steps = changes.get("ratio", lambda ratio: ratio)
        return lambda ratio: preset(family, **changes | {"ratio": over_steps(ratio)})

    entries = []
    for ratio in ratios:
        first = Entry("ToMe", ratio, named("tome"))
        settings = (Entry(name, ratio, made(changes), first.key) for name, changes in CHANGES.items())
        entries += [first, *settings]
    return entries
