"""The command line: `tomadiff demo`, `tomadiff flops`, `tomadiff bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

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
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps of each picture.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="How often each ratio is timed.")] = 3,
    size: Annotated[int, typer.Option(min=64, help="Height and width of the picture in pixels.")] = 512,
) -> None:
    """Run a small SDXL pipeline with random weights, with and without merging, side by side."""
    import torch

    import tomadiff
    from tomadiff.bench.shapes import small_sdxl_pipeline, small_sdxl_prompt
    from tomadiff.bench.sidebyside import compare

    if size % 8:
        raise typer.BadParameter(
            f"pictures have sizes that are multiples of 8; got {size}", param_hint="--size"
        )
    console = Console()
    pipe, prompt = small_sdxl_pipeline(), small_sdxl_prompt()

    def generate() -> None:
        random = torch.Generator().manual_seed(0)
        pipe(
            **prompt,
            height=size,
            width=size,
            num_inference_steps=steps,
            generator=random,
            output_type="latent",
        )

    rows = compare(
        pipe,
        generate,
        rounds=rounds,
        progress=lambda turns: iter(
            track(turns, "timing in turns", total=rounds, console=console, transient=True)
        ),
    )
    table = Table(title=f"A small SDXL pipeline (random weights), {size} x {size}, {steps} steps")
    for name in ("ratio", "tokens", "GFLOP", "FLOPs saved", "seconds", "speed-up"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.ratio:.2f}",
            f"{row.tokens:,}",
            f"{row.flops / 1e9:,.0f}",
            f"{row.flops_saved:.0%}",
            f"{row.seconds:.2f}",
            f"{row.speed_up:.2f}x",
        )
    console.print(table)
    console.print(
        "Tokens: summed over the blocks. Seconds: median of the rounds. What merged where, at the last ratio:"
    )
    with tomadiff.merged(pipe, rows[-1].ratio):
        generate()
        tomadiff.summary(pipe)


@app.command()
def flops(
    size: Annotated[int, typer.Option(min=64, help="Height and width of the picture in pixels.")] = 1024,
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
        tomadiff.apply(unet, ratio)
        unet(timestep=999, **inputs)  # makes the plan
        merged = count_flops(lambda: unet(timestep=998, **inputs))
        table.add_row(
            f"{ratio}", f"{merged / 1e12:.2f}", f"{merged / unmerged:.0%}", f"{unmerged / merged:.2f}x"
        )
    Console().print(table)


@app.command()
def bench(
    target: Annotated[str, typer.Argument(help="What to time, e.g. sdxl-block-64; a wrong name lists them.")],
    methods: Annotated[str, typer.Option(help="Methods to compare.")] = "none,free,toma,tome,tofu,todo",
    ratios: Annotated[str, typer.Option(help="Ratios to compare them at.")] = "0.25,0.5,0.75",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed, in turns.")] = 9,
    json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed-up against ratio into this picture.")] = None,
) -> None:
    """Time methods against each other with the real shapes. Interrupt it, and it prints what it has."""
    from tomadiff.bench import report, versus
    from tomadiff.bench.targets import build

    console = Console()
    try:
        wanted = build(target)
        measurements = versus.entries(
            wanted, tuple(methods.split(",")), tuple(float(ratio) for ratio in ratios.split(","))
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with Progress(console=console, transient=True) as progress:
        work = progress.add_task("counting", total=None)
        try:
            versus.run(
                wanted,
                measurements,
                rounds,
                lambda what, done, of: progress.update(work, description=what, completed=done, total=of),
            )
        except KeyboardInterrupt:
            console.print("interrupted; what was measured so far:")
    measured = report.rows(measurements)
    if not measured:
        console.print("nothing was timed")
        raise typer.Exit(1)
    console.print(*report.tables(measured))
    if json is not None:
        report.save_json(json, measured, wanted.device)
    if plot is not None:
        report.save_plot(plot, measured)


def _check_size(size: int) -> None:
    if size % 8:
        raise typer.BadParameter(
            f"pictures have sizes that are multiples of 8; got {size}", param_hint="--size"
        )


def main() -> None:
    app()


if __name__ == "__main__":
    main()
