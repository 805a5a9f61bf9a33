"""Peak memory of a run, on a GPU as its allocator saw it, on a CPU as torch asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_memory(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes that `run` has allocated at its peak, beyond what was there before it.

    >>> peak_memory(lambda: [torch.empty(1000), torch.empty(1000)], torch.device("cpu")) >= 8000
    True
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        run()
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
