"""Which sites of a model merge with which plan, and the hooks that make them."""

from __future__ import annotations

import math
from collections import Counter
from fnmatch import fnmatchcase
from functools import partial
from itertools import zip_longest

from diffusers.hooks import HookRegistry
from torch import nn

from tomadiff.config import MergeConfig
from tomadiff.methods import METHODS
from tomadiff.patching.adapters.base import Adapter, Block, HookMaker, Site
from tomadiff.patching.hooks import MergeOnce, PlanAtEntry, attach, detach
from tomadiff.patching.session import Group, Hooked, Place, Session


def lay_groups(
    model: nn.Module, adapter: Adapter, config: MergeConfig
) -> tuple[dict[str, Group], list[Place]]:
    """The groups of sites that share a plan, and every site with its group."""
    blocks = adapter.blocks()
    ratios = _ratios(blocks, config)
    method = METHODS[config.method](config)
    groups: dict[str, Group] = {}
    places: list[Place] = []
    for index, block in enumerate(blocks):
        variant = method.variant(index / len(blocks))
        for site in _sites(block, config):
            ratio = 0.0 if config.method == "none" else ratios.get(site.name)
            name = None
            if max(config.ratios) if ratio is None else ratio:
                name = _group_name(block, ratio, config.share, variant)
                groups[name] = Group(block.kind, ratio, variant)
            places.append(Place(block, site, name))
    asked = (*config.ratios, *config.overrides.values())
    wants_nothing = config.method == "none" or not any(asked)
    if not groups and not wants_nothing:
        raise ValueError(
            f"this configuration would merge nothing: {type(model).__name__} has {len(blocks)} transformer "
            "blocks, and modules, skip_first and overrides leave none of them to merge"
        )
    if groups and config.mode == "stack" and not any(block.stack for block in blocks):
        raise ValueError(
            f"mode='stack' is for blocks with nothing between them, and {type(model).__name__} is not known "
            "to have any: use mode='once'"
        )
    if groups and config.ff_min_tokens and not all(block.stack for block in blocks):
        raise ValueError(
            "ff_min_tokens is for UNets, which have coarse grids besides fine ones, and "
            f"{type(model).__name__} is not known to have any: set it to 0"
        )
    return groups, places


def hook(model: nn.Module, session: Session) -> None:
    """Attach the hooks of all places of a session."""
    planning: dict[str, list[Place]] = {}
    hooked: dict[nn.Module, None] = {}
    for place, following in zip_longest(session.places, session.places[1:]):
        if place.group is not None:
            planning.setdefault(place.block.name, []).append(place)
            for module, make in (*place.site.hooks, *_attention_alone(place, session.config)):
                made = make(session, place.group)
                if session.config.mode == "stack" and isinstance(made, MergeOnce):
                    made.goes_on = following is not None and _stand_together(place, following)
                attach(module, made)
                hooked[module] = None
    for places in planning.values():
        groups = dict.fromkeys(place.group for place in places if place.group is not None)
        attach(places[0].block.module, PlanAtEntry(session, tuple(groups)))
        hooked[places[0].block.module] = None
    for passage in session.adapter.passages():
        if any(name.startswith(passage.prefix) for name in planning):
            for module, make in passage.hooks:
                attach(module, make(session, passage.kind))
                hooked[module] = None
    parents = {
        child: (parent._modules, name)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child in hooked
    }
    for module in hooked:
        siblings, name = parents[module]
        hooks = HookRegistry.check_if_exists_or_initialize(module)._hook_order
        session.hooked.append(Hooked(module, siblings, name, hooks, (len(siblings), len(hooks))))
    session.renew = partial(_hook_again, model, session)


def unhook(session: Session) -> None:
    """Detach all hooks of a session, also from modules that others have taken the place of since."""
    for hooked in session.hooked:
        detach(hooked.module)
    session.hooked.clear()


def _stand_together(first: Place, second: Place) -> bool:
    """Whether the tokens of one block go straight to the other, which merges them with the same plan."""
    return first.group == second.group and first.block.stack == second.block.stack


def _hook_again(model: nn.Module, session: Session) -> None:
    unhook(session)
    _, session.places = lay_groups(model, session.adapter, session.config)
    hook(model, session)


def _group_name(block: Block, ratio: float | None, share: str, variant: str) -> str:
    parts = [block.kind]
    within = {"kind": "", "stack": block.stack, "block": block.name}[share]
    if within:
        parts.append(within)
    if ratio is not None:
        parts.append(f"at {ratio}")
    if variant:
        parts.append(variant)
    return " ".join(parts)


def _sites(block: Block, config: MergeConfig) -> tuple[Site, ...]:
    if config.mode != "each":
        return (block.once,)
    if METHODS[config.method].keys_only and block.keys is not None:
        return (block.keys,)
    return tuple(site for site in block.sites if set(site.part.split("+")) <= set(config.modules))


def _attention_alone(place: Place, config: MergeConfig) -> tuple[tuple[nn.Module, HookMaker], ...]:
    """The hooks inside a block for the grids on which only its attention merges, not the block as a whole."""
    if config.mode == "each" or not config.ff_min_tokens:
        return ()
    return tuple(hook for site in place.block.sites if site.part != "ff" for hook in site.hooks)


def _ratios(blocks: list[Block], config: MergeConfig) -> dict[str, float]:
    """The ratios of sites that do not follow the configuration's: overridden ones, and first blocks left
    alone."""
    ratios: dict[str, float] = {}
    of_kind = Counter(block.kind for block in blocks)
    seen: Counter[str] = Counter()
    names = {site.name: block for block in blocks for site in _sites(block, config)}
    for block in blocks:
        seen[block.kind] += 1
        first = config.skip_first
        if seen[block.kind] <= (first if first >= 1 else math.ceil(first * of_kind[block.kind])):
            ratios |= {site.name: 0.0 for site in _sites(block, config)}
    for pattern, ratio in config.overrides.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            example = next(iter(names), "none")
            whole = "" if config.mode == "each" else "; modules inside blocks have names in mode='each' only"
            raise ValueError(f"overrides: {pattern!r} matches no module; names look like {example!r}{whole}")
        ratios |= dict.fromkeys(matching, ratio)
    return ratios
