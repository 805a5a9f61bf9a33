"""Where the image tokens of each architecture are. One short file per architecture."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from tomadiff.patching.adapters.base import Adapter
from tomadiff.patching.adapters.flux import FluxAdapter
from tomadiff.patching.adapters.sd3 import SD3Adapter
from tomadiff.patching.adapters.unet import UNetAdapter

ADAPTERS: list[type[Adapter]] = [UNetAdapter, FluxAdapter, SD3Adapter]

AdapterClass = TypeVar("AdapterClass", bound=type[Adapter])


def register(adapter: AdapterClass) -> AdapterClass:
    """Make `tomadiff.apply` know one more architecture; a class decorator.

    The last one registered for a model's class is used.
    """
    if adapter not in ADAPTERS:
        ADAPTERS.append(adapter)
    return adapter


def adapter_for(model: nn.Module) -> Adapter | None:
    """The adapter of a model, or None if it has none."""
    return next((adapter(model) for adapter in reversed(ADAPTERS) if isinstance(model, adapter.models)), None)
