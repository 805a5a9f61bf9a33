"""Distances between two sets of pictures, (N, 3, H, W) in [0, 1]. One value for each picture."""

from __future__ import annotations

import sys

import torch

try:
    from torchmetrics.functional.image import structural_similarity_index_measure
except ImportError:  # pragma: no cover
    sys.exit("pictures are compared with torchmetrics: pip install 'tomadiff[demo]'")

# What identical pictures get, instead of infinity: one step of 8 bits in a thousand pixels.
BEST_PSNR = 80.0


def squared_error(pictures: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """-> (N,)

    >>> squared_error(torch.full((1, 3, 16, 16), 0.5), torch.zeros(1, 3, 16, 16)).tolist()
    [0.25]
    """
    return (pictures - wanted).square().mean(dim=(1, 2, 3))


def psnr(pictures: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Peak signal to noise ratio in dB, at most 80. -> (N,)

    >>> psnr(torch.full((1, 3, 16, 16), 0.1), torch.zeros(1, 3, 16, 16)).round().tolist()
    [20.0]
    """
    return -10 * squared_error(pictures, wanted).clamp_min(10 ** (-BEST_PSNR / 10)).log10()


def ssim(pictures: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Structural similarity, 1 for identical pictures. -> (N,)

    >>> ssim(torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)).item() < 0.5
    True
    """
    values = structural_similarity_index_measure(pictures, wanted, data_range=1.0, reduction="none")
    assert isinstance(values, torch.Tensor)
    return values
