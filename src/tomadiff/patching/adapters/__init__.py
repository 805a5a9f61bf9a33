"""Where the image tokens of each architecture are. One short file per architecture."""

from __future__ import annotations

from torch import nn

from tomadiff.patching.adapters.base import Adapter
from tomadiff.patching.adapters.unet import UNetAdapter

ADAPTERS = (UNetAdapter,)


def adapter_for(model: nn.Module) -> Adapter | None:
    """The adapter of a model, or None if it has none."""
    return next((adapter(model) for adapter in ADAPTERS if isinstance(model, adapter.models)), None)
