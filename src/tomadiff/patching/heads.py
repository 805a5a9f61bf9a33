"""Inside an attention with merged image tokens: queries and keys turned to where the merged tokens are, and,
where the attention takes no mask, the log of the cluster sizes in extra head dimensions.

Proportional attention adds b_j = log(size_j) to the logits of key j. With E extra dimensions, of which one is
used, q' = (q sqrt((D + E) / D), sqrt(D + E), 0, ...) and k' = (k, b, 0, ...) give
q' k' / sqrt(D + E) = q k / sqrt(D) + b, so an attention that scales by its head dimension computes the same
without a mask. Values are padded with zeros because the fast kernels want all three equally wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.hooks import ModelHook
from torch import nn

from tomadiff.core.rotary import rotate
from tomadiff.patching.adapters.base import HookMaker
from tomadiff.patching.session import Session

# One would do, but kernels are built for head dimensions in steps of eight.
EXTRA = 8


class Tokens(NamedTuple):
    """What is to be done to the heads of one run of tokens (the image's, the text's, or both in a row).

    rotary: cos and sin, each (B or 1, S, D); None: the attention does it, or there are no rotary positions
    bias: (B, S) of the keys, to go into extra dimensions; None: heads keep their width
    fewer: makes the tokens that give keys and values, where those are fewer than give queries
    queries: cos and sin of the queries, where the two differ; otherwise `rotary` is for both
    """

    rotary: tuple[torch.Tensor, torch.Tensor] | None
    bias: torch.Tensor | None
    fewer: Callable[[torch.Tensor], torch.Tensor] | None = None
    queries: tuple[torch.Tensor, torch.Tensor] | None = None


def widen(x: torch.Tensor, role: str, bias: torch.Tensor) -> torch.Tensor:
    """x: (..., D) queries, keys or values; bias: broadcastable to (..., 1) -> (..., D + EXTRA)"""
    width = x.shape[-1] + EXTRA
    rest = x.new_zeros(*x.shape[:-1], EXTRA - 1)
    if role == "query":
        x = x * math.sqrt(width / (width - EXTRA))
        last = x.new_full((*x.shape[:-1], 1), math.sqrt(width))
    else:
        last = bias.to(x.dtype).expand(*x.shape[:-1], 1) if role == "key" else x.new_zeros(*x.shape[:-1], 1)
    return torch.cat((x, last, rest), dim=-1)


def narrow(x: torch.Tensor, heads: int) -> torch.Tensor:
    """x: (B, S, heads * (D + EXTRA)) -> (B, S, heads * D)"""
    narrowed: torch.Tensor = x.unflatten(-1, (heads, -1))[..., :-EXTRA].flatten(-2)
    return narrowed


class AtProjection(ModelHook):
    """Around `to_q`, `to_k`, `to_v` or their fusion: fewer tokens for keys and values, wide heads after it.

    roles: of the parts of the output; queries and keys that a norm is still to see count as "value" here
    """

    def __init__(
        self, session: Session, group: str, run: str, roles: tuple[str, ...], heads: int, queries: bool
    ) -> None:
        super().__init__()
        self.session = session
        self.run = run
        self.roles = roles
        self.heads = heads
        self.queries = queries

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens: Tokens | None = self.session.scratch.get(self.run)
        if tokens is not None and tokens.fewer is not None and not self.queries:
            args = (tokens.fewer(args[0]), *args[1:])
        return args, kwargs

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        tokens: Tokens | None = self.session.scratch.get(self.run)
        if tokens is None or tokens.bias is None:
            return output
        bias = tokens.bias[:, :, None, None]
        parts = output.unflatten(-1, (len(self.roles), self.heads, -1)).unbind(2)
        wide = [widen(part, role, bias) for part, role in zip(parts, self.roles, strict=True)]
        return torch.cat([part.flatten(-2) for part in wide], dim=-1)


class AtNorm(ModelHook):
    """Around the norm of queries or keys: rotate after it, and keep extra dimensions out of it.

    heads_first: the norm sees (B, heads, S, D), otherwise (B, S, heads, D)
    """

    def __init__(self, session: Session, group: str, run: str, role: str, heads_first: bool) -> None:
        super().__init__()
        self.session = session
        self.run = run
        self.role = role
        self.heads_first = heads_first

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens: Tokens | None = self.session.scratch.get(self.run)
        if tokens is not None and tokens.bias is not None:
            args = (args[0][..., :-EXTRA], *args[1:])
        return args, kwargs

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        tokens: Tokens | None = self.session.scratch.get(self.run)
        if tokens is None:
            return output
        heads = 1 if self.heads_first else 2
        rotary = tokens.rotary
        if self.role == "query" and tokens.queries is not None:
            rotary = tokens.queries
        if rotary is not None:
            output = rotate(output, *(table.unsqueeze(heads) for table in rotary))
        if tokens.bias is not None:
            output = widen(output, self.role, tokens.bias.unsqueeze(heads).unsqueeze(-1))
        return output


class AtOutput(ModelHook):
    """Before the output projection: heads as wide as it knows them."""

    def __init__(self, session: Session, group: str, run: str, heads: int) -> None:
        super().__init__()
        self.session = session
        self.run = run
        self.heads = heads

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens: Tokens | None = self.session.scratch.get(self.run)
        if tokens is not None and tokens.bias is not None:
            args = (narrow(args[0], self.heads), *args[1:])
        return args, kwargs


# Names of: projections, their fusion, norms; of image tokens (or of all in a row), and of text tokens.
_RUNS = (
    ("image", ("to_q", "to_k", "to_v"), "to_qkv", ("norm_q", "norm_k")),
    ("text", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_added_qkv", ("norm_added_q", "norm_added_k")),
)
_ROLES = ("query", "key", "value")


def head_hooks(attn: Any, heads_first: bool) -> tuple[tuple[nn.Module, HookMaker], ...]:
    """The hooks inside an attention with the module names that diffusers' joint attentions share."""
    hooks: list[tuple[nn.Module, Callable[..., ModelHook]]] = []
    for run, projections, fused, norms in _RUNS:
        normed = [getattr(attn, name, None) for name in norms]
        roles = tuple(
            "value" if norm is not None else role for norm, role in zip(normed, _ROLES, strict=False)
        )
        roles = (*roles, "value")
        at = partial(AtProjection, run=run, heads=attn.heads)
        for role, name in zip(roles, projections, strict=True):
            if getattr(attn, name, None) is not None:
                queries = name == projections[0]
                hooks.append((getattr(attn, name), partial(at, roles=(role,), queries=queries)))
        if getattr(attn, fused, None) is not None:
            # The fused processor of the blocks with heads first leaves the norms out.
            fused_roles = _ROLES if heads_first else roles
            hooks.append((getattr(attn, fused), partial(at, roles=fused_roles, queries=True)))
        for role, norm in zip(_ROLES, normed, strict=False):
            if norm is not None:
                hooks.append((norm, partial(AtNorm, run=run, role=role, heads_first=heads_first)))
    out = getattr(attn, "to_out", None)
    for run, module in (("image", out[0] if out else None), ("text", getattr(attn, "to_add_out", None))):
        if module is not None:
            hooks.append((module, partial(AtOutput, run=run, heads=attn.heads)))
    return tuple(hooks)
