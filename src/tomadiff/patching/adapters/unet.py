"""The UNets of Stable Diffusion 1, 2 and XL and their ControlNets: `BasicTransformerBlock`s at several
resolutions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from diffusers import ControlNetModel, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from tomadiff.core.regions import Grid
from tomadiff.patching.adapters.base import (
    Adapter,
    Block,
    HookMaker,
    Passage,
    Reading,
    Site,
    form_of,
    read_timestep,
)
from tomadiff.patching.clock import Call
from tomadiff.patching.hooks import (
    MergeAround,
    MergeFeedForward,
    MergeOnce,
    MergeSelfAttention,
    WeighKeys,
)
from tomadiff.patching.joint import MergeCached, UnmergeCached
from tomadiff.patching.order import Arrange, Restore

# `ip_adapter_masks` are resized to the tokens of the picture, row by row.
CROSS_ATTENTION = partial(MergeAround, bound_to_order=("ip_adapter_masks",))


class UNetAdapter(Adapter):
    models = (UNet2DConditionModel, ControlNetModel)

    def __init__(self, model: UNet2DConditionModel | ControlNetModel) -> None:
        self.family = "sdxl" if model.config.addition_embed_type == "text_time" else "sd"
        self._levels = len(model.down_blocks)
        # A stride-2 convolution with padding 1 rounds an odd size up, one with padding 0 down.
        self._round_up = model.config.downsample_padding
        self._transformers = {
            name: module
            for part in ("down_blocks", "mid_block", "up_blocks")
            for name, module in model.named_modules()
            if name.startswith(part) and isinstance(module, Transformer2DModel)
        }

    def blocks(self) -> list[Block]:
        return [
            unet_block(f"{name}.transformer_blocks.{index}", module, self._kind(name), name)
            for name, transformer in self._transformers.items()
            for index, module in enumerate(transformer.transformer_blocks)
            if isinstance(module, BasicTransformerBlock)
        ]

    def passages(self) -> list[Passage]:
        return [
            Passage(name, self._kind(name), ((blocks[0], Arrange), (blocks[-1], Restore)))
            for name, transformer in self._transformers.items()
            if (blocks := transformer.transformer_blocks)
        ]

    def read(self, given: Mapping[str, Any]) -> Reading:
        sample, timestep = given["sample"], read_timestep(given["timestep"])
        grids: dict[str, tuple[Grid, ...]] = {}
        height, width = sample.shape[-2:]
        for level in range(self._levels):
            grids[f"level {level}"] = ((height, width),)
            height, width = (height + self._round_up) // 2, (width + self._round_up) // 2
        return Reading(
            call=Call(timestep, form_of(sample), given["encoder_hidden_states"]),
            progress=1 - timestep / 1000,
            batch=sample.shape[0],
            grids=grids,
            device=sample.device,
            apart=self._apart(given),
        )

    def _apart(self, given: Mapping[str, Any]) -> str:
        """Masks belong to tokens one by one; chunks of the feed-forward divide the tokens there are."""
        if given.get("attention_mask") is not None:
            return "attention mask"
        if (given.get("cross_attention_kwargs") or {}).get("ip_adapter_masks") is not None:
            return "IP-Adapter masks"
        blocks = (b for transformer in self._transformers.values() for b in transformer.transformer_blocks)
        return "forward chunking" if any(getattr(b, "_chunk_size", None) for b in blocks) else ""

    def _kind(self, name: str) -> str:
        """The resolution of a transformer, from where it stands in the U: 0 is that of the latents."""
        part, _, rest = name.partition(".")
        index = int(rest.split(".")[0]) if part != "mid_block" else 0
        level = {"down_blocks": index, "mid_block": self._levels - 1, "up_blocks": self._levels - 1 - index}[
            part
        ]
        return f"level {level}"


def unet_block(name: str, block: BasicTransformerBlock, kind: str, stack: str = "") -> Block:
    # Some upscalers attend to the text twice instead of to the picture.
    part, hook = ("cross", CROSS_ATTENTION) if block.only_cross_attention else ("self", MergeSelfAttention)
    sites = [Site(part, f"{name}.attn1", ((block.attn1, hook),))]
    if block.attn2 is not None:
        sites.append(Site("cross", f"{name}.attn2", ((block.attn2, CROSS_ATTENTION),)))
    sites.append(Site("ff", f"{name}.ff", ((block.ff, MergeFeedForward),)))
    inside: list[tuple[nn.Module, HookMaker]] = []
    if not block.only_cross_attention:
        inside.append((block.attn1, WeighKeys))
    for attention in (block.attn1, block.attn2):
        if attention is not None:
            inside += [(attention, UnmergeCached), (attention, partial(MergeCached, whole=True))]
    once = Site("block", name, ((block, MergeOnce), *inside))
    return Block(name, block, kind, tuple(sites), once, stack=stack)
