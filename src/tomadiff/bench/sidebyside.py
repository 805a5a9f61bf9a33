"""One pipeline with and without merging, side by side: tokens, FLOPs, seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import tomadiff
from tomadiff.flops import count_flops


@dataclass(frozen=True)
class Row:
    """One ratio. Tokens are counted over all blocks; FLOPs and seconds are of a whole generation."""

    ratio: float
    tokens: int
    flops: int
    seconds: float
    flops_saved: float
    speed_up: float


def compare(
    pipe: Any,
    generate: Callable[[], Any],
    ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75),
    rounds: int = 5,
    progress: Callable[[Iterator[int]], Iterator[int]] = iter,
) -> list[Row]:
    """Run `generate` with each ratio in turn, `rounds` times over; compare medians with the first ratio's.

    The runs are interleaved, because a machine's speed changes from minute to minute.
    """
    seconds: dict[float, list[float]] = {ratio: [] for ratio in ratios}
    flops, tokens = {}, {}
    for ratio in ratios:
        with tomadiff.merged(pipe, ratio):
            flops[ratio] = count_flops(generate)
            tokens[ratio] = sum(row["merged"] for row in tomadiff.summary(pipe, show=False)["blocks"])
    for _ in progress(iter(range(rounds))):
        for ratio in ratios:
            with tomadiff.merged(pipe, ratio), torch.no_grad():
                start = time.perf_counter()
                generate()
                seconds[ratio].append(time.perf_counter() - start)
    first = statistics.median(seconds[ratios[0]])
    return [
        Row(
            ratio,
            tokens[ratio],
            flops[ratio],
            median := statistics.median(seconds[ratio]),
            1 - flops[ratio] / flops[ratios[0]],
            first / median,
        )
        for ratio in ratios
    ]
