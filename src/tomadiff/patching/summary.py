"""What merging does to a model, block by block, as a table and as plain data."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from tomadiff.core.regions import Layout
from tomadiff.patching import ceiling
from tomadiff.patching.adapters.base import Block
from tomadiff.patching.apply import session_of
from tomadiff.patching.session import Place, Session

COLUMNS = ("block", "modules", "tokens", "merged", "regions", "selected", "weighed", "reused", "note")


def summary(target: Any, show: bool = True) -> dict[str, Any]:
    """What merges where: tokens before and after, regions, and how often plans were made and used again.

    Token counts are those of the last call of the model. Prints a table unless `show` is False; returns the
    same as plain data, with a row for every block. What is printed ends with the work of that call, and how
    far it is from the least that these merged tokens allow; counting it takes a moment.

    >>> with tomadiff.merged(pipe, 0.5):
    ...     images = pipe(**prompt, height=256, width=256, num_inference_steps=2).images
    ...     rows = tomadiff.summary(pipe, show=False)["blocks"]
    >>> [rows[0][name] for name in ("block", "tokens", "merged", "selected", "reused")]
    ['down_blocks.1.attentions.0.transformer_blocks.0', 256, 128, 1, 1]
    """
    session = session_of(target)
    if session is None:
        result: dict[str, Any] = {"applied": False, "config": None, "blocks": []}
    else:
        together: dict[tuple[str, str | None], list[Place]] = {}
        for place in session.places:
            together.setdefault((place.block.name, place.group), []).append(place)
        rows = [_row(session, places) for places in together.values()]
        result = {"applied": True, "config": session.config.to_json(), "blocks": rows}
    if show:
        print(_table(result["blocks"]) if result["applied"] else "merging is not applied")
        if (flops := ceiling.count(target)) is not None:
            print(flops)
            result["flops"] = vars(flops)
    return result


def _row(session: Session, places: list[Place]) -> dict[str, Any]:
    """The row of one block, or of those of its modules that share a plan."""
    place = places[0]
    layout = session.layouts.get(place.group) if place.group else None
    tokens = sum(height * width for height, width in session.grids.get(place.block.kind, ())) or None
    modules = [p.site.part for p in places]
    if layout is not None and layout.tokens < session.config.ff_min_tokens:
        modules = _without_feed_forward(place.block, modules)
    if not modules:
        modules, layout = ["ff"], None
    row: dict[str, Any] = {
        "block": place.block.name,
        "modules": modules,
        "tokens": tokens,
        "merged": layout.kept if layout else tokens,
        "regions": _regions(layout) if layout else "",
        "selected": 0,
        "weighed": 0,
        "reused": 0,
        "note": _note(session, place, tokens, layout),
    }
    if place.group:
        row |= vars(session.counts[place.group])
    return row


def _without_feed_forward(block: Block, modules: list[str]) -> list[str]:
    """What of these parts of a block, or of the block as a whole, is left to merge."""
    parts = [site.part for site in block.sites] if modules == ["block"] else modules
    return [part for part in parts if part != "ff"]


def _regions(layout: Layout) -> str:
    sizes = sorted({cell.size for group in layout.groups for cell in group.cells})
    text = f"{layout.selection_regions} of {'-'.join(str(size) for size in {sizes[0]: 0, sizes[-1]: 0})}"
    return (
        text
        if layout.selection_regions == layout.merge_regions
        else f"{text}, merged in {layout.merge_regions}"
    )


def _note(session: Session, place: Place, tokens: int | None, layout: Layout | None) -> str:
    if place.group is None:
        return "left alone"
    if tokens is None:
        return "not run yet"
    few = f"left alone: under {session.config.ff_min_tokens} tokens"
    if layout is not None:
        return f"feed-forward {few}" if tokens < session.config.ff_min_tokens else ""
    if session.apart:
        return f"left alone: {session.apart}"
    if tokens < session.config.min_tokens:
        return f"left alone: under {session.config.min_tokens} tokens"
    return few if place.group in session.layouts else "resting at this step"


def _table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text; blocks of one run that have the same to say share a line."""

    def cells(row: dict[str, Any]) -> list[str]:
        shown = {**row, "modules": "+".join(row["modules"])}
        return ["-" if shown[column] is None else str(shown[column]) for column in COLUMNS[1:]]

    def run(row: dict[str, Any]) -> tuple[str, list[str]]:
        return re.sub(r"\d+$", "", row["block"]), cells(row)

    lines = [list(COLUMNS)]
    for (prefix, rest), same in groupby(rows, key=run):
        numbers = [row["block"][len(prefix) :] for row in same]
        lines.append([prefix + "-".join({numbers[0]: 0, numbers[-1]: 0}), *rest])
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
