"""The command line: `tomadiff demo`, `tomadiff flops`, `tomadiff bench`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import Progress, track
    from rich.table import Table
except ImportError:  # pragma: no cover
    sys.exit("the command line needs typer and rich: pip install 'tomadiff[cli]'")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Faster diffusion pipelines by merging tokens."
)


@app.command()
def demo(
    prompt: Annotated[
        str, typer.Option(help="A subject and a background; `tomadiff demo --list` shows all.")
    ] = "popcorn on a green background",
    model: Annotated[list[str] | None, typer.Option(help="Only this model. May be given twice.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps of each picture.")] = 25,
    rounds: Annotated[int, typer.Option(min=1, help="How often each ratio is timed, in turns.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the noise the pictures start from.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the contact sheet goes.")] = Path("demo-output/sheet.png"),
    show_list: Annotated[
        bool, typer.Option("--list", help="List what the models can draw, and stop.")
    ] = False,
) -> None:
    """Draw one prompt with the embedded models, with and without merging, side by side."""
    _hush_libraries()
    from tomadiff.demo import captions, models

    console = Console()
    if show_list:
        console.print(", ".join(captions.subjects().values()))
        console.print(
            "on a ... background:", ", ".join(captions.COLOURS), "; red to blue gradient; red and blue"
        )
        return
    names = model or list(models.available())
    unknown = [name for name in names if name not in models.available()]
    if unknown or not names:
        raise typer.BadParameter(
            f"no weights for {', '.join(unknown) or 'any model'}; there are {', '.join(models.available())}",
            param_hint="--model",
        )
    strange = captions.unknown_words(prompt)
    if strange:
        raise typer.BadParameter(
            f"the models do not know {', '.join(strange)}; `tomadiff demo --list` shows what they can draw",
            param_hint="--prompt",
        )
    if out.is_dir() or out.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise typer.BadParameter(f"{out} is not the name of a picture; end it in .png", param_hint="--out")
    out.parent.mkdir(parents=True, exist_ok=True)
    _draw_side_by_side(console, prompt, names, steps, rounds, seed, out)


def _hush_libraries() -> None:
    """No bars for what loads in a second, nor words about optional parts that our models do not use."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    for library in (of_diffusers, of_transformers):
        library.set_verbosity_error()
        library.disable_progress_bar()


def _draw_side_by_side(
    console: Console, prompt: str, names: list[str], steps: int, rounds: int, seed: int, out: Path
) -> None:
    import torch

    from tomadiff.demo import models, sheets
    from tomadiff.evals import sidebyside

    table = Table(title=f'"{prompt}", 256 x 256, {steps} steps')
    for column in ("model", "ratio", "seconds", "speed-up", "FLOPs saved", "PSNR", "SSIM"):
        table.add_column(column, justify="right")
    pictures, labels = [], []
    for name in names:
        start = time.perf_counter()
        pipe = models.load(name)
        console.print(f"{name}: loaded in {time.perf_counter() - start:.1f} s")
        options = models.CALL[name] | {"num_inference_steps": steps}

        def generate(pipe: Any = pipe, options: dict[str, Any] = options) -> torch.Tensor:
            return next(models.draw(pipe, [prompt], [seed], **options))

        rows = sidebyside.compare(
            pipe,
            generate,
            rounds=rounds,
            progress=lambda turns, of, name=name: iter(  # type: ignore[misc]
                track(turns, name, total=of, console=console, transient=True)
            ),
        )
        table.add_section()
        for row in rows:
            distance = (f"{row.psnr:.1f} dB", f"{row.ssim:.3f}") if row.ratio else ("", "")
            table.add_row(
                name,
                f"{row.ratio:.2f}" if row.ratio else "unmerged",
                f"{row.seconds:.2f}",
                f"{row.speed_up:.2f}x",
                f"{row.flops_saved:.0%}",
                *distance,
            )
            pictures.append(row.picture)
            merged = f"ToMA {row.ratio:g}: {row.seconds:.1f} s, {row.psnr:.1f} dB"
            labels.append(f"{name}\n" + (merged if row.ratio else f"unmerged: {row.seconds:.1f} s"))
    sheets.sheet(torch.cat(pictures), labels, len(pictures) // len(names), prompt).save(out)
    console.print(table)
    console.print("Seconds: median of the rounds. PSNR and SSIM: against the unmerged picture.")
    console.print(f"Pictures: {out}")


@app.command()
def flops(
    size: Annotated[int, typer.Option(min=64, help="Height and width of the picture in pixels.")] = 1024,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Of ToMA, e.g. --set ff_min_tokens=0.")
    ] = None,
) -> None:
    """Count the operations of the real SDXL UNet with and without merging. Needs no weights and no GPU."""
    import tomadiff
    from tomadiff.bench.shapes import sdxl_inputs, sdxl_unet
    from tomadiff.flops import count_flops

    _check_size(size)
    unet, inputs = sdxl_unet(), sdxl_inputs(size, size)
    unmerged = count_flops(lambda: unet(timestep=999, **inputs))
    table = Table(title=f"The SDXL UNet, one call at {size} x {size}, a plan reused")
    for name in ("ratio", "TFLOP", "of unmerged", "unmerged / merged"):
        table.add_column(name, justify="right")
    table.add_row("unmerged", f"{unmerged / 1e12:.2f}", "100%", "1.00x")
    for ratio in (0.25, 0.5, 0.75):
        try:
            tomadiff.apply(unet, config=tomadiff.preset("sdxl", ratio=ratio, **_changes(settings or [])))
        except (ValueError, TypeError) as error:
            raise typer.BadParameter(str(error), param_hint="--set") from error
        unet(timestep=999, **inputs)  # makes the plan
        merged = count_flops(lambda: unet(timestep=998, **inputs))
        table.add_row(
            f"{ratio}", f"{merged / 1e12:.2f}", f"{merged / unmerged:.0%}", f"{unmerged / merged:.2f}x"
        )
    Console().print(table)


@app.command()
def bench(
    target: Annotated[
        str, typer.Argument(help="What to time, e.g. sdxl-block-64 or a folder; a wrong name lists them.")
    ],
    methods: Annotated[
        str, typer.Option(help="Methods to compare; also tofu-merge and, for sdxl, tomesd-package.")
    ] = "none,free,toma,tome,tofu,todo",
    ratios: Annotated[str, typer.Option(help="Ratios to compare them at.")] = "0.25,0.5,0.75",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed, in turns.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Of a whole picture; pipelines only.")] = 25,
    size: Annotated[
        int | None, typer.Option(min=64, help="Of the picture in pixels; sdxl and pipelines only.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda when there is one, else cpu.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Of ToMA, e.g. --set mode=once --set select_size=16.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Time compiled models.")] = False,
    report_to: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed-up against ratio into this picture.")] = None,
) -> None:
    """Time methods against each other with the real shapes. Interrupt it, and it prints what it has."""
    import torch

    from tomadiff.bench import report, versus
    from tomadiff.bench.targets import Target, build

    console = Console()
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if size is not None:
        _check_size(size)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"unknown dtype {dtype!r}", param_hint="--dtype")

    def make() -> Target:
        return build(target, steps, size).to(place, getattr(torch, dtype))

    try:
        wanted = make()
        measurements = versus.entries(
            wanted,
            tuple(methods.split(",")),
            tuple(float(ratio) for ratio in ratios.split(",")),
            compiled,
            _changes(settings or []),
        )
    except (ValueError, TypeError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    with Progress(console=console, transient=True) as progress:
        work = progress.add_task("counting", total=None)
        try:
            if compiled:
                progress.update(work, description="compiling")
                versus.compile_each(measurements, make)
            versus.run(
                wanted,
                measurements,
                rounds,
                lambda what, done, of: progress.update(work, description=what, completed=done, total=of),
            )
        except ValueError as error:  # a setting that this model cannot have
            raise typer.BadParameter(str(error)) from error
        except KeyboardInterrupt:
            console.print("interrupted; what was measured so far:")
    measured = report.rows(measurements)
    if not measured:
        console.print("nothing was timed")
        raise typer.Exit(1)
    console.print(*report.tables(measured))
    if report_to is not None:
        report.save_json(report_to, measured, wanted, compiled)
    if plot is not None:
        report.save_plot(plot, measured)


def _changes(settings: list[str]) -> dict[str, Any]:
    """["tau=0.01", "mode=once"] -> {"tau": 0.01, "mode": "once"}"""
    changes = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"a setting is written name=value, got {setting!r}")
        if name == "ratio":
            raise ValueError("the ratio is what the rows differ in; it cannot be set for all of them")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = value
    return changes


def _check_size(size: int) -> None:
    if size % 8:
        raise typer.BadParameter(
            f"pictures have sizes that are multiples of 8; got {size}", param_hint="--size"
        )


def main() -> None:
    app()


if __name__ == "__main__":
    main()
