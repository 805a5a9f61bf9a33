"""What a benchmark says: as a table, as JSON, as a picture."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers
import torch
from rich import box
from rich.table import Table
from torch import nn

import tomadiff
from tomadiff.bench.targets import Target
from tomadiff.bench.versus import TOMESD, Measurement, median_interval


def rows(measurements: list[Measurement]) -> list[dict[str, Any]]:
    """One row for each method and ratio that was timed, compared with no merging and with the ceiling."""
    done = [m for m in measurements if m.rounds]
    none = next((m for m in done if m.method == "none"), None)
    free = {m.ratio: m for m in done if m.method == "free"}
    toma = {m.ratio: m for m in done if m.method == "toma"}
    result = []
    for m in done:
        speed_up = None if none is None else m.speed_up(none)
        ceiling = free.get(m.ratio)
        ours = None if m.method in ("none", "free", "toma") else toma.get(m.ratio)
        result.append(
            {
                "target": m.target,
                "method": m.method,
                "ratio": m.ratio,
                "seconds": m.seconds,
                "fresh_seconds": m.fresh,
                "speed_up": speed_up,
                "spread": None if none is None else m.spread(none),
                "share_of_ceiling": None if ceiling is None else m.speed_up(ceiling),
                "share_spread": None if ceiling is None else m.spread(ceiling),
                "toma_ahead": None if ours is None else _ahead(ours, m),
                "overhead": asdict(m.overhead),
                "flops": m.flops,
                "peak_memory": m.memory,
                "rounds": m.rounds,
                "config": None if m.method == TOMESD else json.loads(m.config.to_json()),
            }
        )
    return result


def _ahead(ours: Measurement, peer: Measurement) -> dict[str, Any]:
    """How much faster than a peer we were, in rounds where both were timed one after the other."""
    ratios = ours.ratios(peer)
    return {
        "times": ours.speed_up(peer),
        "interval": median_interval(ratios),
        "rounds_won": sum(ratio > 1 for ratio in ratios),
        "rounds": len(ratios),
    }


def processor(about: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the CPU; Linux keeps it where `platform` does not look."""
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def environment(target: Target, compiled: bool = False) -> dict[str, Any]:
    """What the numbers depend on."""
    device = target.device
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else processor(),
        "threads": None if gpu else torch.get_num_threads(),
        "cores": os.cpu_count(),
        "dtype": str(target.dtype),
        "attention": _attention(target.model),
        "compiled": compiled,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "tomadiff": tomadiff.__version__,
    }


def tables(measured: list[dict[str, Any]]) -> list[Table]:
    """The comparison, what merging itself costs, and ToMA beside each peer if there are any; each fits a
    terminal of 80 columns."""
    title = f"{measured[0]['target']}, {len(measured[0]['rounds'])} rounds in turns"
    compared = _table(
        title, "method", "ratio", "seconds", "speed-up", "±", "of ceiling", "±", "GFLOP", "peak MB"
    )
    costs = _table(
        "what merging costs in one call, in milliseconds",
        *("method", "ratio", "new plan", "new weights", "merge", "unmerge", "call with a new plan"),
    )
    beside = _table(
        "how much faster ToMA is, round by round",
        *("than", "ratio", "times", "95 % from", "to", "rounds won", "of"),
    )
    for row in measured:
        named = (row["method"], f"{row['ratio']:.2f}" if row["ratio"] else "")
        compared.add_row(
            *named,
            f"{row['seconds']:.3f}",
            _shown(row["speed_up"], "{:.2f}x"),
            _shown(row["spread"], "{:.2f}"),
            _shown(row["share_of_ceiling"], "{:.3f}"),
            _shown(row["share_spread"], "{:.3f}"),
            f"{row['flops'] / 1e9:,.0f}",
            f"{row['peak_memory'] / 1e6:,.0f}",
        )
        if row["method"] not in ("none", "free"):
            seconds = (*row["overhead"].values(), row["fresh_seconds"])
            costs.add_row(*named, *(f"{1000 * part:,.1f}" for part in seconds))
        if ahead := row["toma_ahead"]:
            low, high = ahead["interval"] or (None, None)
            beside.add_row(
                *named,
                *(_shown(value, "{:.3f}") for value in (ahead["times"], low, high)),
                *(str(ahead[count]) for count in ("rounds_won", "rounds")),
            )
    return [compared, costs, *([beside] if beside.row_count else [])]


def _table(title: str, *columns: str) -> Table:
    """Narrow: headings wrap at spaces and nowhere else."""
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    return table


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _attention(model: nn.Module) -> str:
    """The attention backend diffusers was told to use, or its default."""
    for module in model.modules():
        backend = getattr(getattr(module, "processor", None), "_attention_backend", None)
        if backend is not None:
            return str(getattr(backend, "value", backend))
    return "native (torch scaled_dot_product_attention)"


def save_json(path: Path, measured: list[dict[str, Any]], target: Target, compiled: bool = False) -> None:
    setting = {"environment": environment(target, compiled), "rows": measured}
    path.write_text(json.dumps(setting, indent=1) + "\n")


def save_plot(path: Path, measured: list[dict[str, Any]]) -> None:
    """Speed-up against ratio, the ceiling as a line."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("a plot needs matplotlib: pip install 'tomadiff[bench]'") from error
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in measured if row["method"] != "none"):
        points = [(row["ratio"], row["speed_up"]) for row in measured if row["method"] == method]
        style = (
            {"color": "black", "linestyle": "--", "label": "ceiling (free)"}
            if method == "free"
            else {"marker": "o"}
        )
        axes.plot(*zip(*points, strict=True), **{"label": method} | style)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="ratio", ylabel="speed-up over no merging", title=measured[0]["target"])
    axes.set_xticks(sorted({row["ratio"] for row in measured if row["ratio"]}))
    axes.legend()
    figure.savefig(path, dpi=150)
