"""Ways to merge side by side on an embedded model: how far each moves the pictures, at equal cost.

python -m tomadiff.evals.compare --model emoji-flux --json quality.json --sheet quality.png
python -m tomadiff.evals.compare --model emoji-flux --what settings --prompts 16 --seeds 1 --steps 12

Pictures and counted operations are kept in `--work`; a comparison that was interrupted continues there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

import tomadiff
from tomadiff.config import MergeConfig
from tomadiff.demo import check, models
from tomadiff.demo.captions import Background, caption, held_out_sample, subjects
from tomadiff.demo.sheets import sheet
from tomadiff.evals import metrics
from tomadiff.evals.entries import Entry, changed, reported
from tomadiff.flops import count_flops

FAMILIES = {"emoji-flux": "flux", "emoji-xl": "sdxl"}


@dataclass(frozen=True)
class Row:
    """Means over all pictures; `error` is the squared distance to the unmerged pictures."""

    name: str
    ratio: float
    flops_saved: float
    error: float
    psnr: float
    ssim: float
    subject: float
    background: float
    config: dict[str, Any] | None = None


class Comparison:
    """The same prompts and seeds for every entry; finished pictures are kept in `folder`."""

    def __init__(
        self,
        model: str,
        prompts: int,
        seeds: int,
        offset: Literal[0, 1],
        steps: int,
        folder: Path,
        batch: int = 4,
    ) -> None:
        names, pairs = subjects(), held_out_sample(prompts, offset)
        self.asked: list[tuple[int, Background]] = [pair for pair in pairs for _ in range(seeds)]
        self.prompts = [caption(names[point], background) for point, background in self.asked]
        self.seeds = list(range(len(self.prompts)))
        self.options = models.CALL[model] | {"num_inference_steps": steps}
        self.pipe: DiffusionPipeline = models.load(model)
        self.model, self.folder, self.batch = model, folder, batch
        folder.mkdir(parents=True, exist_ok=True)
        # Pictures of other weights must not be taken for those of these.
        weights = sorted((models.WEIGHTS / model).rglob("*.safetensors"))
        self.weights = hashlib.sha256(b"".join(path.read_bytes() for path in weights)).hexdigest()

    def pictures(self, key: str, config: MergeConfig | None) -> torch.Tensor:
        """All pictures, drawn unless they are kept from before. -> (N, 3, H, W) in [0, 1]"""
        path = self.folder / f"{key}.safetensors"
        stamp = json.dumps(
            [self.weights, self.prompts, self.seeds, self.options, config.to_json() if config else None]
        )
        marker = path.with_suffix(".json")
        if not (path.exists() and marker.exists() and marker.read_text() == stamp):
            with tomadiff.merged(self.pipe, config=config or MergeConfig(method="none")):
                drawn = torch.cat(
                    list(models.draw(self.pipe, self.prompts, self.seeds, self.batch, **self.options))
                )
            partial = path.with_suffix(".partial")
            save_file({"pictures": (drawn.clamp(0, 1) * 255).round().to(torch.uint8)}, partial)
            os.replace(partial, path)
            marker.write_text(stamp)
        return load_file(path)["pictures"].float() / 255

    def cost(self, config: MergeConfig) -> int:
        """Counted operations of one whole picture, counted once and kept."""
        path = self.folder / "costs.json"
        key = json.dumps([self.weights, self.options, config.to_json()])

        def kept() -> dict[str, int]:
            return json.loads(path.read_text()) if path.exists() else {}

        if key not in kept():
            options = self.options | {"output_type": "latent"}
            with tomadiff.merged(self.pipe, config=config):
                counted = count_flops(lambda: self.pipe(self.prompts[0], **options))
            partial = path.with_suffix(".partial")
            # Read again: another process may have counted something else meanwhile.
            partial.write_text(json.dumps(kept() | {key: counted}, indent=0))
            os.replace(partial, path)
        return kept()[key]

    def at_cost(self, entry: Entry, wanted: int) -> MergeConfig:
        """The entry at the ratio whose cost is `wanted`, within a thousandth of the unmerged model's.

        Where no ratio has that cost, because tokens merge one by one: at the next that costs less.
        """
        whole = self.cost(MergeConfig(method="none"))
        dear, cheap = (0.0, whole), (entry.most, self.cost(entry.make(entry.most)))
        for turn in range(10):
            # The cost falls almost straight with the ratio, but in steps: every other time, the middle.
            share = 0.5 if turn % 2 else (dear[1] - wanted) / max(dear[1] - cheap[1], 1)
            ratio = round(dear[0] + (cheap[0] - dear[0]) * min(max(share, 0.0), 1.0), 4)
            cost = self.cost(entry.make(ratio))
            if abs(cost - wanted) <= whole / 1000:
                return entry.make(ratio)
            if cost > wanted:
                dear = (ratio, cost)
            else:
                cheap = (ratio, cost)
        return entry.make(cheap[0])

    def run(self, entries: list[Entry]) -> list[Row]:
        """Draw, compare and print entry after entry."""
        unmerged = self.pictures("unmerged", None)
        whole = self.cost(MergeConfig(method="none"))
        rows = [self.row("unmerged", 0.0, unmerged, unmerged, 0.0, None)]
        costs: dict[str, int] = {}
        for entry in entries:
            config = entry.make(entry.ratio)
            if entry.costs_as is not None:
                config = self.at_cost(entry, costs[entry.costs_as])
            costs[entry.key] = self.cost(config)
            drawn = self.pictures(entry.key, config)
            rows.append(
                self.row(entry.name, entry.ratio, drawn, unmerged, 1 - costs[entry.key] / whole, config)
            )
            print(describe(rows[-1]), flush=True)
        return rows

    def row(
        self,
        name: str,
        ratio: float,
        drawn: torch.Tensor,
        unmerged: torch.Tensor,
        saved: float,
        config: MergeConfig | None,
    ) -> Row:
        shown = check.score(check.look(drawn, self.asked), self.asked)
        return Row(
            name,
            ratio,
            round(saved, 4),
            round(metrics.squared_error(drawn, unmerged).mean().item(), 6),
            round(metrics.psnr(drawn, unmerged).mean().item(), 2),
            round(metrics.ssim(drawn, unmerged).mean().item(), 4),
            round(shown.subject, 4),
            round(shown.background, 4),
            None if config is None else json.loads(config.to_json()),
        )

    def sheet(self, entries: list[Entry], count: int = 8) -> Any:
        """The first pictures of each entry, one row for each."""
        chosen = torch.linspace(0, len(self.prompts) - 1, count).long()
        drawn, labels = [], []
        for key in ("unmerged", *(entry.key for entry in entries)):
            drawn.append((load_file(self.folder / f"{key}.safetensors")["pictures"][chosen]).float() / 255)
            labels += [
                key,
                *(self.prompts[index].removesuffix(" background") for index in chosen[1:].tolist()),
            ]
        return sheet(torch.cat(drawn), labels, count, f"{self.model}: the same prompts and seeds", tile=160)


def describe(row: Row) -> str:
    """One line of text."""
    return (
        f"{row.name:24} {row.ratio:5.2f}  saved {row.flops_saved:6.1%}  error {row.error:.5f}  "
        f"{row.psnr:5.2f} dB  SSIM {row.ssim:.3f}  "
        f"subject {row.subject:4.0%}  background {row.background:4.0%}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(models.CALL), required=True)
    parser.add_argument(
        "--what",
        choices=("methods", "settings"),
        default="methods",
        help="the methods, to report; or our defaults with one setting changed at a time, on other prompts",
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        help="of ToMe, whose cost all others are given; default: 0.25 0.5 0.75, for settings 0.5 alone",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these, and those that set the cost")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--work", type=Path, default=Path("runs/quality"), help="where pictures are kept")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--sheet", type=Path, help="draw some pictures of every entry into this file")
    options = parser.parse_args()
    family = FAMILIES[options.model]
    settings = options.what == "settings"
    listed = changed if settings else reported
    entries = listed(family, tuple(options.ratios)) if options.ratios else listed(family)
    if options.only:
        names = [entry.name for entry in entries]
        if strange := sorted(set(options.only) - set(names)):
            parser.error(f"no entries {strange}; there are {list(dict.fromkeys(names))}")
        entries = [entry for entry in entries if entry.costs_as is None or entry.name in options.only]
    comparison = Comparison(
        options.model,
        options.prompts,
        options.seeds,
        1 if settings else 0,
        options.steps,
        options.work / options.what / options.model,
    )
    rows = comparison.run(entries)
    if options.json:
        setting = {"model": options.model, "prompts": options.prompts, "seeds": options.seeds}
        report = setting | {"steps": options.steps, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.sheet:
        comparison.sheet(entries).save(options.sheet)


if __name__ == "__main__":
    main()
