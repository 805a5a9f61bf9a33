"""The diffusers hooks that put a plan into a live model: merge before a module, unmerge after it.

A hook keeps no tensors. It asks its session for the plan of its group before and after the module; what it
did in between is one word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_processor import Attention
from torch import nn

from tomadiff.patching.session import Session

PREFIX = "tomadiff_"


class GroupHook(ModelHook):
    """A hook that uses the plan of one group of sites."""

    def __init__(self, session: Session, group: str) -> None:
        super().__init__()
        self.session = session
        self.group = group


class PlanAtEntry(ModelHook):
    """Make the plans that a block needs, where they are due, from the hidden states that enter it."""

    def __init__(self, session: Session, groups: tuple[str, ...]) -> None:
        super().__init__()
        self.session = session
        self.groups = groups

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, _, _ = take_hidden_states(args, kwargs)
        for group in self.groups:
            self.session.plan(group, x)
        return args, kwargs


class MergeAround(GroupHook):
    """Merge the hidden states before a module and unmerge its output.

    bound_to_order: names of arguments that belong to the tokens one by one (masks). A call that has one runs
        unmerged, with its tokens in their original order.
    """

    def __init__(self, session: Session, group: str, bound_to_order: tuple[str, ...] = ()) -> None:
        super().__init__(session, group)
        self.bound_to_order = bound_to_order
        self._did = "nothing"

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, args, kwargs = take_hidden_states(args, kwargs)
        plan = self.session.current_plan(self.group, x)
        if plan is None:
            self._did = "nothing"
        elif any(kwargs.get(name) is not None for name in self.bound_to_order):
            self._did = "reorder"
            x = self.session.clock.current.layouts[self.group].restore(x)
        elif self.session.method.keys_only:
            check_not_fused(module)
            self._did = "nothing"
            kwargs = self.merged_arguments(plan.sizes, kwargs) | {"encoder_hidden_states": plan.merge(x)}
        else:
            self._did = "merge"
            x, kwargs = plan.merge(x), self.merged_arguments(plan.sizes, kwargs)
        return (x, *args), kwargs

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        current = self.session.clock.current
        if self._did == "merge":
            return current.plans[self.group].unmerge(output)
        if self._did == "reorder":
            return current.layouts[self.group].arrange(output)
        return output

    def merged_arguments(self, sizes: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The module's other arguments when its tokens are merged. sizes: (B, D)"""
        return kwargs


class MergeFeedForward(MergeAround):
    """As `MergeAround`, where there are enough tokens for a feed-forward."""

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, args, kwargs = take_hidden_states(args, kwargs)
        if self.session.spares_feed_forward(x):
            self._did = "nothing"
            return (x, *args), kwargs
        return super().pre_forward(module, x, *args, **kwargs)


class MergeSelfAttention(MergeAround):
    """As `MergeAround`, and merged keys carry the log of their cluster size where the configuration says
    so."""

    def __init__(self, session: Session, group: str) -> None:
        super().__init__(session, group, bound_to_order=("attention_mask",))

    def merged_arguments(self, sizes: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not self.session.config.proportional:
            return kwargs
        return {**kwargs, "attention_mask": key_bias(sizes)}


class WeighKeys(GroupHook):
    """Proportional attention alone, inside a block whose tokens come merged."""

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "block" in self.session.scratch and self.session.config.proportional:
            plan = self.session.clock.current.plans[self.group]
            kwargs = {**kwargs, "attention_mask": key_bias(plan.sizes)}
        return args, kwargs


class MergeOnce(GroupHook):
    """Merge at a block's entry; at its exit unmerge the block's update, so that the residual stream stays
    sharp.

    goes_on: the next block takes the merged tokens as they are, and the last one unmerges the update of all
    """

    goes_on = False

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "block" in self.session.scratch:  # merged by a block before this one
            return args, kwargs
        x, args, kwargs = take_hidden_states(args, kwargs)
        plan = self.session.current_plan(self.group, x)
        if plan is None or self.session.spares_feed_forward(x):
            return (x, *args), kwargs
        merged = plan.merge(x)
        self.session.scratch["block"] = (x, merged)
        return (merged, *args), kwargs

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        if "block" not in self.session.scratch or (self.goes_on and self.session.in_one_go):
            return output
        x, merged = self.session.scratch.pop("block")
        update = self.session.clock.current.plans[self.group].unmerge(output - merged)
        # In place, because new memory costs more than the sum; not where autocast made the update coarser.
        return update.add_(x) if update.dtype == x.dtype else x + update


def key_bias(sizes: torch.Tensor) -> torch.Tensor:
    """sizes: (B, D) -> (B, 1, D), what proportional attention adds to the logits of the merged keys."""
    return sizes.log().unsqueeze(1)


def check_not_fused(attn: nn.Module) -> None:
    fused = getattr(attn, "fused_projections", False)
    if isinstance(attn, Attention):  # keeps that flag when it is unfused, and gets its processor back
        fused = "Fused" in type(attn.processor).__name__
    if fused:
        raise ValueError(
            "this method gives keys and values fewer tokens than queries, and fused projections cannot: call "
            "`unfuse_qkv_projections()` first"
        )


def take_hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden states of a call, given by position or by name, and the rest of its arguments."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), args, rest


def attach(module: nn.Module, hook: ModelHook) -> None:
    """Put a hook around those of ours that are there, and inside all others.

    A cache that keeps what a module gave must keep it unmerged, whichever of the two came first. A hook with
    `outermost` goes around everything.
    """
    registry = HookRegistry.check_if_exists_or_initialize(module)
    name = PREFIX + type(hook).__name__
    ours = [known.startswith(PREFIX) for known in registry._hook_order]
    index = ours.index(False) if False in ours else len(ours)
    if getattr(hook, "outermost", False) or index == len(ours):
        registry.register_hook(hook, name)
        module.forward = _as_function(module.forward)
        return
    outer = registry._fn_refs[index]
    inside = "forward" if outer.original_forward is None else "original_forward"
    # Let the registry wrap what the outer hook wraps, then let the outer hook wrap that.
    whole, module.forward = module.forward, getattr(outer, inside)
    registry.register_hook(hook, name)
    setattr(outer, inside, _as_function(module.forward))
    module.forward = whole
    registry._hook_order.insert(index, registry._hook_order.pop())
    registry._fn_refs.insert(index, registry._fn_refs.pop())


def _as_function(forward: Any) -> Callable[..., Any]:
    """The same as a function. `torch.compile` knows a `partial` by its identity and would compile every block
    of a model anew (`compile_repeated_blocks`); it knows a function by its code."""
    call, module = forward.func, forward.args[0]

    def hooked(*args: Any, **kwargs: Any) -> Any:
        return call(module, *args, **kwargs)

    return update_wrapper(hooked, forward)


def is_cached(module: nn.Module) -> bool:
    """Whether another hook may hand out what the module gave at an earlier step."""
    registry: HookRegistry | None = getattr(module, "_diffusers_hook", None)
    return registry is not None and any(hasattr(hook, "new_forward") for hook in registry.hooks.values())


def detach(module: nn.Module) -> None:
    """Remove every hook of ours from a module, leaving all others as they are.

    `HookRegistry.remove_hook` forgets that the next outer hook may have replaced the forward it wraps.
    """
    registry: HookRegistry | None = getattr(module, "_diffusers_hook", None)
    if registry is None:
        return
    for name in [name for name in registry._hook_order if name.startswith(PREFIX)]:
        outer = registry._fn_refs[registry._hook_order.index(name) + 1 :][:1]
        replaced = [ref.forward for ref in outer if ref.original_forward is not None]
        registry.remove_hook(name, recurse=False)
        for ref, forward in zip(outer, replaced, strict=False):
            ref.original_forward, ref.forward = ref.forward, forward
    # What the last removal leaves as an attribute would hide a class's forward that someone patches later.
    if not registry.hooks and getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        del module.forward
