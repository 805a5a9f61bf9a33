"""The public verbs: put merging into a pipeline or model, take it out, show what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from diffusers import DiffusionPipeline
from torch import nn

from tomadiff.config import MergeConfig, preset
from tomadiff.patching.adapters import ADAPTERS, adapter_for
from tomadiff.patching.adapters.base import Adapter
from tomadiff.patching.install import hook, lay_groups, unhook
from tomadiff.patching.session import Session

Target = TypeVar("Target")

_SESSION = "_tomadiff_session"


def apply(target: Target, ratio: float | None = None, config: MergeConfig | None = None) -> Target:
    """Merge tokens in a pipeline or a model from now on.

    Give a `ratio` (0.5 if nothing is given) to use the defaults of the model's family, or a whole `config`.
    Applying again replaces what was applied before. Weights stay untouched; `remove` gives the original
    model back.

    target: a diffusers pipeline, or the UNet, transformer or ControlNet inside one. In a pipeline with a
        ControlNet only the main network merges; apply to `pipe.controlnet` as well to merge there too.

    >>> import torch, tomadiff
    >>> from diffusers import UNet2DConditionModel
    >>> unet = UNet2DConditionModel(
    ...     block_out_channels=(32, 64),
    ...     down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    ...     up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ...     cross_attention_dim=32,
    ...     norm_num_groups=8,
    ... )
    >>> unet = tomadiff.apply(unet, ratio=0.5)
    >>> out = unet(torch.randn(1, 4, 32, 32), 500, torch.randn(1, 7, 32)).sample
    >>> rows = tomadiff.summary(unet, show=False)["blocks"]
    >>> rows[0]["tokens"], rows[0]["merged"]
    (256, 128)
    """
    if ratio is not None and config is not None:
        raise ValueError("give a ratio or a config, not both; the config has a ratio of its own")
    model, adapter = find(target)
    if config is None:
        config = preset(adapter.family, ratio=0.5 if ratio is None else ratio)
    session = Session(model, config, adapter, *lay_groups(model, adapter, config))
    remove(model)
    hook(model, session)
    # Hooks of the module itself run before `forward`, so outside of the graph of a compiled model.
    session.handles = (
        model.register_forward_pre_hook(session.enter, with_kwargs=True),
        model.register_forward_hook(session.exit, with_kwargs=True, always_call=True),
    )
    setattr(model, _SESSION, session)
    return target


def remove(target: Target) -> Target:
    """Give the original model back; does nothing if merging was not applied.

    >>> pipe = tomadiff.remove(tomadiff.apply(pipe, 0.5))
    >>> tomadiff.summary(pipe)["applied"]
    merging is not applied
    False
    """
    model, _ = find(target)
    session = session_of(model)
    if session is None:
        return target
    for handle in session.handles:
        handle.remove()
    unhook(session)
    delattr(model, _SESSION)
    return target


@contextmanager
def merged(target: Target, ratio: float | None = None, config: MergeConfig | None = None) -> Iterator[Target]:
    """Merge inside a `with` block only; afterwards whatever was applied before is applied again.

    >>> with tomadiff.merged(pipe, 0.75):
    ...     image = pipe(**prompt, height=128, width=128, num_inference_steps=1).images[0]
    >>> image.size
    (128, 128)
    """
    before = session_of(find(target)[0])
    apply(target, ratio, config)
    try:
        yield target
    finally:
        if before is None:
            remove(target)
        else:
            apply(target, config=before.config)


def supported_models() -> list[str]:
    """The model classes that `apply` knows, alone or inside a pipeline.

    >>> "UNet2DConditionModel" in supported_models()
    True
    """
    return [model.__name__ for adapter in ADAPTERS for model in adapter.models]


def session_of(target: Any) -> Session | None:
    """What merging keeps on a model, or None if it is not applied."""
    return getattr(find(target)[0], _SESSION, None)


def find(target: Any) -> tuple[nn.Module, Adapter]:
    """The model to patch in whatever was given, with its adapter."""
    candidates = [target]
    if isinstance(target, DiffusionPipeline):
        candidates = [getattr(target, name, None) for name in ("unet", "transformer")]
    for model in candidates:
        model = getattr(model, "_orig_mod", model)  # `torch.compile(model)`
        adapter = adapter_for(model)
        if adapter is not None:
            return model, adapter
    found = [type(model).__name__ for model in candidates if model is not None and model is not target]
    raise TypeError(
        f"cannot merge tokens in a {type(target).__name__}"
        + (f" with a {' and a '.join(found)}" if found else "")
        + f". Give one of these models, or a pipeline that has one: {', '.join(supported_models())}"
    )
