"""Every knob of token merging, in one frozen, validated object, and the defaults of each family of models."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tomadiff.core.merging import NORMALISATIONS, UNMERGES
from tomadiff.core.regions import KINDS
from tomadiff.methods import METHODS

MODULES = ("self", "cross", "ff")
MODES = ("each", "once", "stack")
SHARES = ("kind", "stack", "block")


@dataclass(frozen=True)
class MergeConfig:
    """How tokens are merged. `ratio` is all most people need; everything else has a default that works.

    What people change:
        ratio: share of the tokens that is merged away, 0 <= ratio < 1. 0 is the original model; the higher,
            the faster and the further from its picture. May change over the steps:
            `((0.0, 0.25), (0.5, 0.75))` is 0.25 from the start and 0.75 from half-way on (positions as in
            `start`).
        start, end: merge only in this part of the denoising, 0 is pure noise and 1 the finished picture,
            measured on the model's own time axis (timestep / 1000).
        overrides: ratio of single blocks or modules by name, e.g. `{"mid_block.*": 0.0, "*.attn2": 0.25}`.
            Shell patterns on the names that `summary` shows; the last match wins; 0 leaves the module alone.
        skip_first: leave this many first blocks of each kind alone; below 1, this share of them, rounded up.
        modules: which parts of a block merge: "self" (attention among image tokens), "cross" (attention to
            the text), "ff" (feed-forward).

    What researchers tinker with:
        method: how tokens are merged: "toma", its peers "tome", "tofu" and "todo", or to measure with "none"
            (the original model) and "free" (the fastest there can be, with garbage pictures). The regions,
            tau, normalise, unmerge and ridge are toma's alone.
        select_region, select_size: where destinations are chosen: "tile" (size x size tokens), "stripe"
            (size rows) or "global". A size below 1 is a share of the grid's shorter side, two tokens at
            least and four at most. Smaller is faster to plan. Every region keeps at least one token: tiles of
            4 merge at most 15 of 16.
        merge_region, merge_size: where tokens are averaged; not smaller than the selection's regions.
        tau: temperature of the weights. Small is a hard assignment.
        normalise: softmax over the "destinations" or over the "tokens".
        unmerge: "transpose" (copies back), "pinv" (exact inverse, slow to plan), "ridge" (between the two) or
            "fit" (each token is the mixture of merged tokens that comes nearest to it).
        ridge: how much "ridge" and "fit" hold on to the copies.
        proportional: add the log of the cluster sizes to the keys' logits in self-attention, because a
            merged key stands for several tokens.
        mode: "each" merges and unmerges around every module, "once" around the whole block, "stack" around
            all blocks that share a plan and have nothing between them (UNets): the same as "once", for less,
            as long as merging what was unmerged changes nothing.
        select_every, weights_every: choose new destinations, and new weights for them, every so many steps.
        share: which blocks share a plan: all of a "kind" (same resolution and width), those of a "stack" (of
            a kind, one behind the other; a convolution ends a UNet's), or each "block" has its own.
        min_tokens: leave blocks with fewer tokens alone: there is nothing to gain.
        ff_min_tokens: leave the feed-forward of blocks with fewer tokens alone; their attention merges,
            around each module whatever the mode. For UNets, which have coarse grids besides fine ones.
        seed: of the random destinations of tome and tofu, which change from step to step and are the same
            for the whole batch; None takes the top left token of each cell.
        prune: share of the blocks, from the first on, in which tofu drops tokens instead of merging them.

    >>> config = MergeConfig(ratio=0.6, skip_first=1)
    >>> MergeConfig.from_json(config.to_json()) == config
    True
    >>> MergeConfig(ratio=1.0)
    Traceback (most recent call last):
    ...
    ValueError: ratio is the share of tokens merged away, 0 <= ratio < 1; got 1.0
    """

    ratio: float | tuple[tuple[float, float], ...] = 0.5
    start: float = 0.0
    end: float = 1.0
    overrides: Mapping[str, float] = field(default_factory=dict)
    skip_first: float = 0
    modules: tuple[str, ...] = MODULES
    method: str = "toma"
    select_region: str = "tile"
    select_size: float = 8
    merge_region: str = "tile"
    merge_size: float = 8
    tau: float = 0.001
    normalise: str = "destinations"
    unmerge: str = "transpose"
    ridge: float = 0.1
    proportional: bool = True
    mode: str = "each"
    select_every: int = 10
    weights_every: int = 5
    share: str = "stack"
    min_tokens: int = 64
    ff_min_tokens: int = 0
    seed: int | None = None
    prune: float = 0.5

    def __post_init__(self) -> None:
        # JSON and keyword users write lists; equality and hashing want tuples.
        if isinstance(self.ratio, list | tuple):
            object.__setattr__(self, "ratio", tuple(tuple(point) for point in self.ratio))
        object.__setattr__(self, "modules", tuple(self.modules))
        object.__setattr__(self, "overrides", dict(self.overrides))
        self._check_ratios()
        self._check_choices()
        self._check_numbers()
        self._check_regions()
        METHODS[self.method](self)  # refuses what the method cannot do

    def __hash__(self) -> int:
        return hash(self.to_json())

    def ratio_at(self, progress: float) -> float | None:
        """The ratio at a point of the denoising (0 noise, 1 picture); None where nothing merges, overrides
        included.

        >>> config = MergeConfig(ratio=((0, 0.25), (0.5, 0.75)), end=0.9)
        >>> config.ratio_at(0.6), config.ratio_at(0.95)
        (0.75, None)
        """
        if not (self.start <= progress < self.end or progress >= self.end == 1.0):
            return None
        if isinstance(self.ratio, tuple):
            return next((ratio for at, ratio in reversed(self.ratio) if progress >= at), 0.0)
        return self.ratio

    @property
    def ratios(self) -> tuple[float, ...]:
        """Every ratio the configuration can ask for, overrides aside."""
        return tuple(ratio for _, ratio in self.ratio) if isinstance(self.ratio, tuple) else (self.ratio,)

    def replace(self, **changes: Any) -> MergeConfig:
        """A copy with some fields changed.

        >>> MergeConfig().replace(ratio=0.25).ratio
        0.25
        """
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MergeConfig:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"a MergeConfig in JSON is an object, got {type(fields).__name__}")
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"unknown fields {unknown}; MergeConfig has {sorted(known)}")
        return cls(**fields)

    def _check_ratios(self) -> None:
        if isinstance(self.ratio, tuple):
            if not self.ratio or any(len(point) != 2 for point in self.ratio):
                raise ValueError(
                    "a ratio over the steps is a list of (position, ratio), e.g. ((0, 0.25), (0.5, 0.75))"
                )
            positions = [point[0] for point in self.ratio]
            if positions != sorted(set(positions)) or not all(0 <= at <= 1 for at in positions):
                raise ValueError(
                    f"the positions of a ratio over the steps rise from 0 to at most 1, got {positions}"
                )
        for ratio in self.ratios:
            _check_ratio(ratio, "ratio")
        for pattern, ratio in self.overrides.items():
            _check_ratio(ratio, f"overrides[{pattern!r}]")

    def _check_choices(self) -> None:
        for name, choices in (
            ("method", tuple(METHODS)),
            ("select_region", KINDS),
            ("merge_region", KINDS),
            ("normalise", NORMALISATIONS),
            ("unmerge", UNMERGES),
            ("mode", MODES),
            ("share", SHARES),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r}; use one of {', '.join(choices)}")
        unknown = [module for module in self.modules if module not in MODULES]
        if unknown or not self.modules:
            raise ValueError(f"modules names at least one of {', '.join(MODULES)}; got {self.modules}")
        if self.mode != "each" and set(self.modules) != set(MODULES):
            raise ValueError(
                f"mode={self.mode!r} merges whole blocks, not {' and '.join(self.modules)} alone: "
                "use mode='each'"
            )

    def _check_numbers(self) -> None:
        for name, least in (
            ("select_every", 1),
            ("weights_every", 1),
            ("min_tokens", 0),
            ("ff_min_tokens", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is a whole number, at least {least}; got {value!r}")
        if self.select_every % self.weights_every:
            raise ValueError(
                "select_every is a multiple of weights_every, because new destinations need new weights; "
                f"got {self.select_every} and {self.weights_every}"
            )
        if isinstance(self.skip_first, bool) or not (
            0 <= self.skip_first < 1 or (isinstance(self.skip_first, int) and self.skip_first > 0)
        ):
            raise ValueError(
                f"skip_first is a whole number of blocks, or a share of them below 1; got {self.skip_first!r}"
            )
        for name in ("select_size", "merge_size"):
            size = getattr(self, name)
            if isinstance(size, bool) or not (0 < size < 1 or (isinstance(size, int) and size >= 1)):
                raise ValueError(
                    f"{name} is a whole number of tokens, or a share of the grid below 1; got {size!r}"
                )
        if (self.select_size < 1) != (self.merge_size < 1) and self.select_region == self.merge_region:
            raise ValueError(
                "select_size and merge_size are both numbers of tokens or both shares of the grid; "
                f"got {self.select_size} and {self.merge_size}"
            )
        for name in ("tau", "ridge"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is a positive number; got {value!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ValueError(f"seed is a whole number or None; got {self.seed!r}")
        if not 0 <= self.prune <= 1:
            raise ValueError(f"prune is a share of the blocks, 0 <= prune <= 1; got {self.prune!r}")
        if not 0 <= self.start < self.end <= 1:
            raise ValueError(
                f"merging runs from start to end with 0 <= start < end <= 1; got {self.start}, {self.end}"
            )

    def _check_regions(self) -> None:
        select, merge = KINDS.index(self.select_region), KINDS.index(self.merge_region)
        smaller = merge < select or (merge == select and merge < 2 and self.merge_size < self.select_size)
        if smaller:
            raise ValueError(
                "tokens are merged in regions at least as large as those in which destinations are chosen; "
                f"got {self.merge_region} {self.merge_size} for merging and {self.select_region} "
                f"{self.select_size} for selection. Make merge_region or merge_size larger"
            )


def _check_ratio(ratio: float, name: str) -> None:
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 <= ratio < 1:
        raise ValueError(f"{name} is the share of tokens merged away, 0 <= ratio < 1; got {ratio!r}")


# The method as published, to compare with. The released code uses 1 / tau = 1000 on unit vectors.
_PAPER = MergeConfig(tau=0.001, proportional=False, merge_region="global", min_tokens=0, share="kind")
_PAPER_TILE = _PAPER.replace(merge_region="tile")

# The peers as published plan in every block at every step, and weigh all keys alike.
_PEER = MergeConfig(
    proportional=False, share="block", select_every=1, weights_every=1, min_tokens=0, seed=0, method="tome"
)

# A new plan at every step, shared within a kind of block, the first blocks of each kind left alone, as
# published for Flux. Small tiles and the fitted unmerge came nearest to the unmerged pictures of `emoji-flux`
# at equal cost, and so did leaving the last third of the noise alone: what takes fine noise away differs from
# token to token. Whole blocks are as near as single modules and faster: norms, scales and gates see merged
# tokens too.
_DIT = MergeConfig(
    mode="once",
    end=0.67,
    select_every=1,
    weights_every=1,
    skip_first=0.15,
    select_size=4,
    merge_size=4,
    unmerge="fit",
)

# New plans and weights more often than published: they came nearer to the unmerged pictures of `emoji-xl` at
# equal cost. Tiles of 4, and smaller ones on coarse grids: their tokens differ more, and should merge with
# near ones only. Whole stacks of blocks are as near as single modules, and cheaper. There is no text in their
# self-attention to outweigh merged keys, so sizes make no difference.
_UNET = MergeConfig(
    select_every=6, weights_every=2, select_size=0.125, merge_size=0.125, mode="stack", proportional=False
)

PRESETS: dict[str, MergeConfig] = {
    # Defaults of each family of models, used by `apply(model, ratio)`.
    "sd": _UNET,
    # At 1024 x 1024 pixels its blocks have 1,024 tokens and more. Smaller pictures have coarser grids: to
    # merge feed-forwards there cost `emoji-xl` far more of the picture than to merge more elsewhere, for the
    # same work, and to merge attention cost nothing. Grids of 64 tokens save next to nothing.
    "sdxl": _UNET.replace(min_tokens=128, ff_min_tokens=512),
    "flux": _DIT,
    "sd3": _DIT,
    # The published variants on SDXL.
    "paper": _PAPER,
    "paper-tile": _PAPER_TILE,
    "paper-stripe": _PAPER.replace(
        select_region="stripe", merge_region="stripe", select_size=1, merge_size=1
    ),
    "paper-once": _PAPER_TILE.replace(mode="once"),
    # The peers, merging wherever they can.
    "tome": _PEER,
    "tofu": _PEER.replace(method="tofu"),
    "tofu-merge": _PEER.replace(method="tofu", prune=0.0),
    "todo": _PEER.replace(method="todo", ratio=0.75, modules=("self",), share="kind"),
    # What the package `tomesd` does unless told otherwise to the UNets of Stable Diffusion 1 and 2:
    # self-attention at full resolution only. Other UNets have other blocks there.
    "tomesd": _PEER.replace(
        modules=("self",),
        overrides=dict.fromkeys(
            ("down_blocks.[!0].*", "mid_block.*", "up_blocks.[!3].*"),
            0.0,
        ),
    ),
    # The two ends to measure between.
    "none": MergeConfig(method="none"),
    "free": MergeConfig(method="free", proportional=False, min_tokens=0),
}


def preset(name: str, **changes: Any) -> MergeConfig:
    """A named configuration, with changes.

    >>> preset("paper", ratio=0.25).merge_region
    'global'
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name].replace(**changes)
