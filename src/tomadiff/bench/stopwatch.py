"""Seconds of one run, on a CPU by the clock, on a GPU by events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def timed(run: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """What `run` returns, and the seconds it took on the device.

    >>> timed(lambda: 2 + 2, torch.device("cpu"))[0]
    4
    """
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        result = run()
        end.record()
        torch.cuda.synchronize(device)
        return result, start.elapsed_time(end) / 1000
    began = time.perf_counter()
    result = run()
    return result, time.perf_counter() - began
