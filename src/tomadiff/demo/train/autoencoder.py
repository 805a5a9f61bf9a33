"""Train and measure the autoencoder that both models share.

python -m tomadiff.demo.train.autoencoder --out runs             # train, then measure
python -m tomadiff.demo.train.autoencoder --out runs --measure   # measure only
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image

from ..captions import backgrounds
from ..pictures import composite, grid, random_background, random_crop, render, shrink
from .data import Glyphs, load_glyphs
from .loop import Recipe, Training, ramp, stop_on_signal

STEPS = 2600
# (pixels, how many), in turn. Group norms average over the crop, so some crops show most of a picture.
CROPS = ((64, 16), (128, 4), (64, 16), (128, 4))
# Of each resolution a share, most of it for the one that pictures are drawn at in the end.
SHRINK_CHOICES = {64: torch.tensor([1, 1, 1, 2, 2, 4]), 128: torch.tensor([1, 1, 1, 2])}
KL_WEIGHT = 1e-4


def build(channels: tuple[int, int, int] = (16, 32, 64), groups: int = 8) -> AutoencoderKL:
    """Factor 4, 8 latent channels. No attention: it would tie the autoencoder to the crop size."""
    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=groups,
        mid_block_add_attention=False,
        sample_size=256,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def draw_crops(pictures: torch.Tensor, size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Crops at mixed scales on random backgrounds.

    pictures: (N, 4, 256, 256) uint8 with multiplied alpha -> (count, 3, size, size) in [-1, 1]
    """
    choices = SHRINK_CHOICES[size]
    chosen = torch.randint(0, len(pictures), (count,), generator=generator)
    factors = choices[torch.randint(0, len(choices), (count,), generator=generator)]
    crops = [
        random_crop(pictures[row], size, factor, generator)
        for row, factor in zip(chosen.tolist(), factors.tolist(), strict=True)
    ]
    behind = torch.stack([random_background(size, generator) for _ in crops])
    return composite(torch.stack(crops), behind)


def reconstruction_loss(drawn: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """L1, squared error, and L1 of the differences between neighbours, which keeps edges sharp."""
    error = drawn - wanted
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    return error.abs().mean() + error.square().mean() + 0.5 * edges


def recipe(glyphs: Glyphs, folder: Path) -> Recipe[AutoencoderKL]:
    """How the autoencoder is trained."""
    seen, unseen = glyphs.autoencoder_rows()
    trained, probe = glyphs.pictures[seen], glyphs.pictures[unseen[::8]]

    def loss_at(module: AutoencoderKL, step: int, generator: torch.Generator) -> torch.Tensor:
        size, count = CROPS[step % len(CROPS)]
        crops = draw_crops(trained, size, count, generator).to(memory_format=torch.channels_last)
        posterior = module.encode(crops).latent_dist
        drawn = module.decode(posterior.sample(generator)).sample
        divergence = posterior.mean.square() + posterior.var - 1 - posterior.logvar
        loss: torch.Tensor = reconstruction_loss(drawn, crops) + KL_WEIGHT * 0.5 * divergence.mean()
        return loss

    def report(module: AutoencoderKL, step: int) -> dict[str, float]:
        values = {f"psnr_{size}": measure(module, probe, size, folder / "sample.png") for size in (64, 256)}
        print(f"autoencoder step {step}: {values}", flush=True)
        return values

    return Recipe(loss_at, lambda step: ramp(step, STEPS, 2e-3, 2e-5, 100), report)


@torch.no_grad()
def measure(vae: AutoencoderKL, glyphs: torch.Tensor, size: int, sheet: Path | None = None) -> float:
    """Mean PSNR in dB over glyphs (N, 4, 256, 256); `sheet` gets originals above their reconstructions."""
    every = backgrounds()
    values: list[float] = []
    shown: list[torch.Tensor] = []
    for index, glyph in enumerate(glyphs):
        behind = render(every[index * 7 % len(every)], size)
        picture = composite(shrink(glyph[None], size), behind[None])
        drawn = vae.decode(vae.encode(picture).latent_dist.mode()).sample.clamp(-1, 1)
        values.append(-10 * torch.log10(F.mse_loss(drawn, picture) / 4).item())
        if len(shown) < 8:
            shown.append(torch.cat([picture, drawn], dim=2))
    if sheet is not None:
        Image.fromarray(grid(torch.cat(shown), len(shown)).numpy()).save(sheet)
    return round(sum(values) / len(values), 3)


@torch.no_grad()
def normalise(vae: AutoencoderKL, pictures: torch.Tensor) -> None:
    """Give every latent channel mean 0 and deviation 1 over `pictures` (N, 3, H, W), by way of the weights.

    The pipelines disagree on which of scaling_factor, shift_factor and latents_mean they honour; with the
    statistics in the weights those are 1, 0 and unset, and every pipeline is right.
    """
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in torch.split(pictures, 8)])
    mean = latents.mean(dim=(0, 2, 3))
    deviation = latents.std(dim=(0, 2, 3))
    inward, outward = vae.quant_conv, vae.post_quant_conv
    count = len(mean)
    outward.bias += outward.weight[:, :, 0, 0] @ mean
    outward.weight *= deviation.view(1, -1, 1, 1)
    inward.weight[:count] /= deviation.view(-1, 1, 1, 1)
    inward.bias[:count] = (inward.bias[:count] - mean) / deviation
    inward.bias[count:] -= 2 * deviation.log()


def trained_folder(out: Path) -> Path:
    return out / "autoencoder" / "final"


def load(out: Path) -> AutoencoderKL:
    """The finished autoencoder, latents normalised."""
    return AutoencoderKL.from_pretrained(trained_folder(out)).eval().requires_grad_(False)


def train(out: Path) -> None:
    """Train to the end, then save the average of the weights in diffusers' format."""
    if trained_folder(out).exists():
        return
    torch.manual_seed(0)
    glyphs = load_glyphs(out)
    module = build()
    module.to(memory_format=torch.channels_last)
    training = Training(module, recipe(glyphs, out / "autoencoder"), out / "autoencoder")
    training.run(STEPS)
    seen, _ = glyphs.autoencoder_rows()
    generator = torch.Generator().manual_seed(1)
    normalise(training.ema, draw_crops(glyphs.pictures[seen], 128, 256, generator))
    partial = out / "autoencoder" / "partial"
    training.ema.save_pretrained(partial)
    partial.rename(trained_folder(out))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--measure", action="store_true", help="do not train")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    if not options.measure:
        stop_on_signal()
        train(options.out)
    glyphs = load_glyphs(options.out)
    _, unseen = glyphs.autoencoder_rows()
    vae = load(options.out)
    for size in (64, 128, 256):
        value = measure(
            vae, glyphs.pictures[unseen], size, options.out / "autoencoder" / f"unseen-{size}.png"
        )
        print(f"{size} px: {value:.2f} dB over {len(unseen)} glyphs never seen")
    unlike = glyphs.unlike_any_seen()
    value = measure(vae, glyphs.pictures[unlike], size)
    print(
        f"{size} px: {value:.2f} dB over {len(unlike)} of them that are not one it saw with another skin tone"
    )


if __name__ == "__main__":
    main()
