"""Flux.1: dual-stream blocks, then single-stream blocks, over packed latents with rotary positions."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.controlnets.controlnet_flux import FluxControlNetModel
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from torch import nn

from tomadiff.core.regions import Grid, Layout
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
from tomadiff.patching.joint import (
    JointAttention,
    MergeCached,
    MergeImagePart,
    MergeJointOnce,
    UnmergeImagePart,
)
from tomadiff.patching.order import ArrangeAfter

# What comes with one row per image token, besides the rotary ids.
PER_TOKEN = ("hidden_states", "controlnet_block_samples", "controlnet_single_block_samples")


class FluxAdapter(Adapter):
    """Image tokens and their rotary ids are put in layout order before the model sees them: cheap at 64
    channels, outside of any graph, and rotary tables and ControlNet residuals then need no more care."""

    models = (FluxTransformer2DModel, FluxControlNetModel)
    family = "flux"
    order = "dual"

    def __init__(self, model: FluxTransformer2DModel | FluxControlNetModel) -> None:
        self._model = model
        self._controlnet = isinstance(model, FluxControlNetModel)

    def blocks(self) -> list[Block]:
        model = self._model
        dual = [_dual(f"transformer_blocks.{i}", b) for i, b in enumerate(model.transformer_blocks)]
        single = [
            _single(f"single_transformer_blocks.{i}", b)
            for i, b in enumerate(model.single_transformer_blocks)
        ]
        return dual + single

    def passages(self) -> list[Passage]:
        # A ControlNet's condition may still be a picture at the model's entry.
        entry = ((self._model.controlnet_x_embedder, ArrangeAfter),) if self._controlnet else ()
        return [Passage("", "dual", entry)]

    def read(self, given: Mapping[str, Any]) -> Reading:
        x, timestep = given["hidden_states"], read_timestep(given["timestep"])
        masked = (given.get("joint_attention_kwargs") or {}).get("attention_mask") is not None
        grids = grids_of(given["img_ids"])
        return Reading(
            call=Call(timestep, form_of(x), given["encoder_hidden_states"]),
            progress=1 - timestep,
            batch=x.shape[0],
            # A mask is given for tokens in their original order: leave such a call alone.
            grids={} if masked else {"dual": grids, "single": grids},
            device=x.device,
        )

    def arrange(self, given: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
        given = dict(given)
        for name in PER_TOKEN:
            if name in given:
                given[name] = map_tensors(layout.arrange, given[name])
        ids = given["img_ids"]
        if layout.order is not None:
            given["img_ids"] = ids.index_select(-2, layout.order.to(ids.device))
        return given

    def restore(self, output: Any, layout: Layout) -> Any:
        return map_tensors(layout.restore, output)


def _dual(name: str, block: FluxTransformerBlock) -> Block:
    attention = partial(JointAttention, merge=True, masked=True)
    sites = (
        Site("self", f"{name}.attn", ((block.attn, attention), *head_hooks(block.attn, heads_first=False))),
        Site("ff", f"{name}.ff", ((block.ff, MergeAround),)),
    )
    return Block(name, block, "dual", sites, _once(name, block))


def _single(name: str, block: FluxSingleTransformerBlock) -> Block:
    """Attention and MLP run side by side between `norm` and `proj_out`, so they merge together."""
    together = ((block.norm, MergeImagePart), *_merged_before(block), (block.proj_out, UnmergeImagePart))
    sites = (Site("self+ff", f"{name}.attn+mlp", together),)
    keys = Site("self", f"{name}.attn", _attention(block))
    return Block(name, block, "single", sites, _once(name, block), keys)


def _once(name: str, block: FluxTransformerBlock | FluxSingleTransformerBlock) -> Site:
    return Site("block", name, ((block, MergeJointOnce), *_merged_before(block)))


def _merged_before(
    block: FluxTransformerBlock | FluxSingleTransformerBlock,
) -> tuple[tuple[nn.Module, HookMaker], ...]:
    """The hooks of an attention whose image tokens come merged."""
    return (*_attention(block), (block.attn, MergeCached))


def _attention(
    block: FluxTransformerBlock | FluxSingleTransformerBlock,
) -> tuple[tuple[nn.Module, HookMaker], ...]:
    """The hooks of an attention that itself leaves its tokens as many as they are."""
    joint = partial(JointAttention, merge=False, masked=True)
    return ((block.attn, joint), *head_hooks(block.attn, heads_first=False))


_KNOWN: dict[int, tuple[Grid, ...]] = {}


def grids_of(ids: torch.Tensor) -> tuple[Grid, ...]:
    """The grids whose tokens these rotary ids number. Reading values waits for the device, so it is done once
    for a tensor: a pipeline hands in the same one at every step."""
    known = _KNOWN.get(id(ids))
    if known is None:
        known = _KNOWN[id(ids)] = read_grids(ids)
        weakref.finalize(ids, _KNOWN.pop, id(ids), None).atexit = False
    return known


def read_grids(ids: torch.Tensor) -> tuple[Grid, ...]:
    """ids: (N, 3) or (1, N, 3), columns (picture, row, column) in any unit -> height, width of each picture

    Tokens that are not a full grid count as one row.

    >>> first = torch.cartesian_prod(torch.zeros(1), torch.arange(2) * 0.5, torch.arange(3) * 0.5)
    >>> second = torch.cartesian_prod(torch.ones(1), torch.arange(4.0), torch.arange(2.0))
    >>> read_grids(torch.cat((first, second)))
    ((2, 3), (4, 2))
    """
    ids = ids.reshape(-1, ids.shape[-1])
    if ids.is_meta:
        # There are no values there; a square picture is the best guess.
        side = round(len(ids) ** 0.5)
        return ((side, side),) if side * side == len(ids) else ((1, len(ids)),)
    ids = ids.detach().float().cpu()
    cuts = (ids[1:, 0] != ids[:-1, 0]).nonzero().flatten() + 1
    return tuple(_grid(picture[:, 1], picture[:, 2]) for picture in ids.tensor_split(cuts))


def _grid(rows: torch.Tensor, columns: torch.Tensor) -> Grid:
    """rows, columns: (N,) of one picture's tokens -> height and width"""
    breaks = (rows != rows[0]).nonzero().flatten()
    width = int(breaks[0]) if len(breaks) else len(rows)
    if len(rows) % width == 0:
        by_row, by_column = rows.view(-1, width), columns.view(-1, width)
        if (by_row == by_row[:, :1]).all() and (by_column == by_column[:1]).all():
            return len(by_row), width
    return 1, len(rows)
