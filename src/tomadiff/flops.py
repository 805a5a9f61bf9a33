"""Counted floating point operations, so that a saving can be told without a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """query, key, value: shapes (B, heads, S, D)"""
    return int(sdpa_flop_count(query, key, value))


# torch counts the attention kernels of GPUs, but not the one of CPUs.
_KERNELS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def count_flops(run: Callable[[], Any]) -> int:
    """The operations of all matrix products, convolutions and attentions in `run`. Works on the meta device.

    >>> a = torch.empty(64, 32, device="meta")
    >>> count_flops(lambda: a @ a.T)
    262144
    """
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=_KERNELS) as counter:
        run()
    return int(counter.get_total_flops())
