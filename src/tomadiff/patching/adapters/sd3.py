"""Stable Diffusion 3 and 3.5: joint blocks over a patch embedding with learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from diffusers import SD3Transformer2DModel
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.controlnets.controlnet_sd3 import SD3ControlNetModel
from torch import nn

from tomadiff.core.regions import Layout
from tomadiff.patching.adapters.base import (
    Adapter,
    Block,
    HookMaker,
    Passage,
    Reading,
    Site,
    form_of,
    map_tensors,
    read_timestep,
)
from tomadiff.patching.clock import Call
from tomadiff.patching.heads import head_hooks
from tomadiff.patching.hooks import MergeAround
from tomadiff.patching.joint import JointAttention, MergeCached, MergeJointOnce
from tomadiff.patching.order import ArrangeAfter, RestoreBefore

# The processors of these blocks take a mask and drop it, so keys get their sizes in extra head dimensions.
MERGED_HERE = partial(JointAttention, merge=True, masked=False)
MERGED_BEFORE = partial(JointAttention, merge=False, masked=False)


class SD3Adapter(Adapter):
    """Tokens are put in layout order after their positions are added, and back before the last norm."""

    models = (SD3Transformer2DModel, SD3ControlNetModel)
    family = "sd3"
    order = "joint"

    def __init__(self, model: SD3Transformer2DModel | SD3ControlNetModel) -> None:
        self._model = model
        self._controlnet = isinstance(model, SD3ControlNetModel)

    def blocks(self) -> list[Block]:
        return [
            _block(f"transformer_blocks.{index}", block)
            for index, block in enumerate(self._model.transformer_blocks)
            if isinstance(block, JointTransformerBlock)
        ]

    def passages(self) -> list[Passage]:
        model = self._model
        if self._controlnet:
            entries = [module for module in (model.pos_embed, model.pos_embed_input) if module is not None]
            return [Passage("", "joint", tuple((module, ArrangeAfter) for module in entries))]
        return [Passage("", "joint", ((model.pos_embed, ArrangeAfter), (model.norm_out, RestoreBefore)))]

    def read(self, given: Mapping[str, Any]) -> Reading:
        x, timestep = given["hidden_states"], read_timestep(given["timestep"])
        patch = self._model.config.patch_size
        return Reading(
            call=Call(timestep, form_of(x), given["encoder_hidden_states"]),
            progress=1 - timestep / 1000,
            batch=x.shape[0],
            grids={"joint": ((x.shape[-2] // patch, x.shape[-1] // patch),)},
            device=x.device,
        )

    def arrange(self, given: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
        name = "block_controlnet_hidden_states"
        return {**given, name: map_tensors(layout.arrange, given[name])} if name in given else dict(given)

    def restore(self, output: Any, layout: Layout) -> Any:
        return map_tensors(layout.restore, output) if self._controlnet else output


def _block(name: str, block: JointTransformerBlock) -> Block:
    attentions = [("attn", block.attn)]
    if block.attn2 is not None:
        attentions.append(("attn2", block.attn2))
    heads = {part: head_hooks(attn, heads_first=True) for part, attn in attentions}
    sites = [Site("self", f"{name}.{part}", ((attn, MERGED_HERE), *heads[part])) for part, attn in attentions]
    sites.append(Site("ff", f"{name}.ff", ((block.ff, MergeAround),)))
    inside: list[tuple[nn.Module, HookMaker]] = []
    for part, attn in attentions:
        inside += [(attn, MERGED_BEFORE), (attn, MergeCached), *heads[part]]
    once = Site("block", name, ((block, MergeJointOnce), *inside))
    return Block(name, block, "joint", tuple(sites), once)
