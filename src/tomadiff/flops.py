"""Counted floating point operations, so that a saving can be told without a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def count_flops(run: Callable[[], Any]) -> int:
    """The operations of all matrix products, convolutions and attentions in `run`. Works on the meta device.

    >>> a = torch.empty(64, 32, device="meta")
    >>> count_flops(lambda: a @ a.T)
    262144
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())
