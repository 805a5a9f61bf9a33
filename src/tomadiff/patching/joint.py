"""Hooks of transformers whose attention joins text and image tokens. Image tokens merge, text tokens never
do."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import nn

from tomadiff.core.regions import Layout
from tomadiff.methods import Plan
from tomadiff.patching.heads import EXTRA, Tokens, narrow
from tomadiff.patching.hooks import GroupHook, MergeOnce, check_not_fused, is_cached, take_hidden_states
from tomadiff.patching.session import Session

# The backends that add a float mask to the logits. The others refuse a mask or fall off their fast path.
MASK_BACKENDS = (
    AttentionBackendName.NATIVE,
    AttentionBackendName._NATIVE_MATH,
    AttentionBackendName._NATIVE_EFFICIENT,
    AttentionBackendName._NATIVE_CUDNN,
)


class JointAttention(GroupHook):
    """An attention over text tokens and merged image tokens: merged tokens have the rotary positions of
    their destinations, and their keys the log of their cluster sizes. With a method that merges for keys and
    values only, queries stay as they are.

    merge: merge image tokens here and unmerge the result; otherwise they come merged and stay so
    masked: the attention's processor hands a mask on to the backend
    """

    def __init__(self, session: Session, group: str, merge: bool, masked: bool) -> None:
        super().__init__(session, group)
        self.merge = merge
        self.masked = masked
        self._text = -1  # how many text tokens stand before the image tokens; -1: nothing is merged
        self._wide = False

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self._head_dim = getattr(module, "head_dim", None)
        self._unmerge = self.merge or is_cached(module)
        return module

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        return self._set_width(module, 0)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, args, kwargs = take_hidden_states(args, kwargs)
        if self.merge:
            plan = self.session.current_plan(self.group, x)
        else:
            plan = self.session.clock.current.plans.get(self.group)
        if plan is None or runs_unmerged(module):
            self._text, self._wide = -1, False
            self._set_width(module, 0)
            return (x, *args), kwargs
        sizes, image = plan.sizes, plan.sizes.shape[1]
        fewer = None
        if self.session.method.keys_only:
            check_not_fused(module)
            layout = self.session.clock.current.layouts[self.group]
            fewer, image = partial(merge_image, plan=plan, layout=layout), layout.tokens
        elif self.merge:
            x = plan.merge(x)
        text = kwargs.get("encoder_hidden_states")
        self._text = x.shape[1] - image
        length = self._text if text is None else text.shape[1]
        tables = kwargs.pop("image_rotary_emb", None)
        rotary = None if tables is None else self._gather(tables, plan, length)
        bias = sizes.log() if self.session.config.proportional else None
        self._wide = bias is not None and not (self.masked and takes_mask(module))
        if bias is not None:
            zeros = bias.new_zeros(bias.shape[0], length)
            joined = torch.cat((zeros, bias), dim=1)
            if not self._wide:
                kwargs["attention_mask"] = joined[:, None, None]
        scratch = self.session.scratch
        queries = None
        if fewer is not None and tables is not None:
            first = 0 if text is None else length
            queries = (tables[0][None, first:], tables[1][None, first:])
        if text is None:
            whole = None if rotary is None else _both(rotary)
            scratch["image"] = Tokens(whole, joined if self._wide else None, fewer, queries)
        else:
            apart = (None, None) if rotary is None else rotary
            scratch["text"] = Tokens(apart[0], zeros if self._wide else None)
            scratch["image"] = Tokens(apart[1], bias if self._wide else None, fewer, queries)
        self._set_width(module, EXTRA if self._wide else 0)
        return (x, *args), kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        self.session.scratch.pop("text", None)
        self.session.scratch.pop("image", None)
        self._set_width(module, 0)
        if self._text < 0:
            return output
        first, *others = output if isinstance(output, tuple) else (output,)
        if self._wide and getattr(module, "pre_only", False):
            first = narrow(first, module.heads)
        if self._unmerge and not self.session.method.keys_only:
            first = unmerge_image(first, self.session.clock.current.plans[self.group], self._text)
        return (first, *others) if isinstance(output, tuple) else first

    def _set_width(self, module: nn.Module, extra: int) -> nn.Module:
        """Flux's attention cuts heads by this number; others go by the width of what they get."""
        if self._head_dim is not None:
            module.head_dim = self._head_dim + extra
        return module

    def _gather(
        self, tables: tuple[torch.Tensor, torch.Tensor], plan: Plan, text: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin: (T + N, D), image tokens in layout order -> those of the text: (1, T, D), and of the
        destinations: (B, D', D)"""
        positions = plan.positions
        places = positions.flatten()
        layout = self.session.clock.current.layouts[self.group]
        if layout.inverse is not None:
            places = layout.inverse.index_select(0, places)
        cos, sin = (table.index_select(0, text + places).unflatten(0, positions.shape) for table in tables)
        return (tables[0][None, :text], tables[1][None, :text]), (cos, sin)


class MergeImagePart(GroupHook):
    """After the norm of a single-stream block, which sees text and image tokens in a row."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        x, *others = output
        current = self.session.clock.current
        plan = current.plans.get(self.group)
        if plan is None:
            return output
        return (merge_image(x, plan, current.layouts[self.group]), *others)


class UnmergeImagePart(GroupHook):
    """After the last projection of a single-stream block."""

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        plan = self.session.clock.current.plans.get(self.group)
        if plan is None:
            return output
        return unmerge_image(output, plan, output.shape[1] - plan.sizes.shape[1])


class UnmergeCached(GroupHook):
    """Inside a cache on an attention whose tokens, all of the image, come merged; see `MergeCached`."""

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self._cached = is_cached(module)
        return module

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        if "block" not in self.session.scratch or not self._cached:
            return output
        return self.session.clock.current.plans[self.group].unmerge(output)


class MergeCached(GroupHook):
    """Around a cache on an attention that lies between merge and unmerge.

    What a cache keeps from step to step must not depend on the step's plan. So the attention's result is
    unmerged before the cache sees it, and merged again here, after the cache.

    whole: only where the block as a whole is merged, and not each of its modules
    """

    outermost = True

    def __init__(self, session: Session, group: str, whole: bool = False) -> None:
        super().__init__(session, group)
        self.whole = whole

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self._cached = is_cached(module)
        return module

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        current = self.session.clock.current
        plan = current.plans.get(self.group)
        if plan is None or not self._cached or (self.whole and "block" not in self.session.scratch):
            return output
        first, *others = output if isinstance(output, tuple) else (output,)
        first = merge_image(first, plan, current.layouts[self.group])
        return (first, *others) if isinstance(output, tuple) else first


class MergeJointOnce(MergeOnce):
    """Merge image tokens at a block's entry; the block returns (text, image)."""

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if runs_unmerged(module.attn):
            return args, kwargs
        return super().pre_forward(module, *args, **kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        text, image = output
        return text, super().post_forward(module, image)


def merge_image(x: torch.Tensor, plan: Plan, layout: Layout) -> torch.Tensor:
    """x: (B, T + N, C) -> (B, T + D, C)"""
    text = x.shape[1] - layout.tokens
    return torch.cat((x[:, :text], plan.merge(x[:, text:])), dim=1)


def unmerge_image(x: torch.Tensor, plan: Plan, text: int) -> torch.Tensor:
    """x: (B, T + D, C) with `text` = T -> (B, T + N, C)"""
    if text == 0:
        return plan.unmerge(x)
    return torch.cat((x[:, :text], plan.unmerge(x[:, text:])), dim=1)


def takes_mask(attn: Any) -> bool:
    """Whether the backend of this attention adds a float mask to the logits."""
    backend = attn.processor._attention_backend
    if backend is None:
        backend = _AttentionBackendRegistry.get_active_backend()[0]
    if "sage" in str(getattr(backend, "value", backend)):
        raise ValueError(
            "SageAttention takes neither a mask nor heads of another width, so merged keys cannot carry "
            "their cluster size: set proportional=False in the MergeConfig, or use another attention backend"
        )
    return backend in MASK_BACKENDS


def runs_unmerged(attn: Any) -> bool:
    """Whether an attention needs its image tokens as they are: an IP-Adapter's looks at queries before they
    are rotated, perturbed guidance cuts the batch in two inside."""
    processor = attn.processor
    return hasattr(processor, "to_k_ip") or type(processor).__name__.startswith("PAG")


def _both(
    rotary: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    (text_cos, text_sin), (cos, sin) = rotary
    batch = cos.shape[0]
    return (
        torch.cat((text_cos.expand(batch, -1, -1), cos), dim=1),
        torch.cat((text_sin.expand(batch, -1, -1), sin), dim=1),
    )
