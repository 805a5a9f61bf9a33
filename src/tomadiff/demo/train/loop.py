"""A training loop that can be stopped at any moment and continues as if it had not been.

Everything random in step n comes from a generator seeded with (seed, n), so the state after n steps depends
neither on interruptions nor on how often samples were drawn.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

stop_requested = threading.Event()

Model = TypeVar("Model", bound=nn.Module)


def stop_on_signal() -> None:
    """From now on SIGTERM and SIGINT end the loop after the step in progress, with a checkpoint."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop_requested.set())


@dataclass(frozen=True)
class Recipe(Generic[Model]):
    """How one model is trained. `loss_at(module, step, generator)` draws a batch and returns a scalar."""

    loss_at: Callable[[Model, int, torch.Generator], torch.Tensor]
    lr_at: Callable[[int], float]
    report: Callable[[Model, int], dict[str, float]] | None = None
    report_every: int = 500
    log_every: int = 20
    save_seconds: float = 240.0
    ema_decay: float = 0.999
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0


# Where the blocks of Flux and the UNet, T5 and CLIP are.
BLOCKS = ("transformer_blocks.", "encoder.block.", "encoder.layers.")


class ConvolutionMuon(torch.optim.Muon):
    """Muon for the weights of convolutions, (out, in, h, w) in the memory format channels_last.

    Muon takes matrices only: it is given views of the weights with a row for each output channel.
    """

    def __init__(self, weights: list[nn.Parameter], scale: float, weight_decay: float) -> None:
        self._weights = weights
        self._flat = [nn.Parameter(_rows(weight.detach())) for weight in weights]
        if any(
            flat.data_ptr() != weight.data_ptr() for flat, weight in zip(self._flat, weights, strict=True)
        ):
            raise ValueError("weights of convolutions have to be in the memory format channels_last")
        super().__init__(**_muon(self._flat, scale, weight_decay))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for flat, weight in zip(self._flat, self._weights, strict=True):
            flat.grad = None if weight.grad is None else _rows(weight.grad)
        super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for weight in self._weights:
            weight.grad = None


def _rows(weight: torch.Tensor) -> torch.Tensor:
    """(out, in, h, w) -> (out, h * w * in), a view in the memory format channels_last"""
    return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)


def _muon(parameters: list[nn.Parameter], scale: float, weight_decay: float) -> dict[str, Any]:
    # "match_rms_adamw" makes updates as large as AdamW's; they are safe to be larger.
    return {
        "params": [{"params": parameters, "scale": scale}],
        "lr": 0.0,
        "weight_decay": weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
    }


def optimizers(module: nn.Module, weight_decay: float = 0.01) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside transformer blocks and the convolutions inside a UNet, AdamW for
    everything else."""
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    convolutions: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        is_matrix = parameter.ndim == 2 and ".norm" not in name and "attention_bias" not in name
        if is_matrix and any(block in name for block in BLOCKS):
            inner.append(parameter)
        elif parameter.ndim == 4 and "unet." in name and "_block" in name:
            convolutions.append(parameter)
        else:
            outer.append(parameter)
    every: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [{"params": outer, "scale": 1.0}],
            lr=0.0,
            betas=(0.9, 0.99),
            weight_decay=weight_decay,
            fused=True,
        )
    ]
    if inner:
        every.append(torch.optim.Muon(**_muon(inner, 3.0, weight_decay)))
    if convolutions:
        every.append(ConvolutionMuon(convolutions, 3.0, weight_decay))
    return every


def take_step(steppers: list[torch.optim.Optimizer], rate: float) -> None:
    """Move the weights of `optimizers` along their gradients, and forget those."""
    for stepper in steppers:
        for group in stepper.param_groups:
            group["lr"] = group["scale"] * rate
        stepper.step()
        stepper.zero_grad(set_to_none=True)


@dataclass
class Training(Generic[Model]):
    """A module, its moving average, its optimiser and the number of steps taken, kept in `folder`."""

    module: Model
    recipe: Recipe[Model]
    folder: Path
    step: int = 0
    ema: Model = field(init=False)
    optimizers: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        self.ema = copy.deepcopy(self.module)
        self.ema.requires_grad_(False).eval()
        self.optimizers = optimizers(self.module, self.recipe.weight_decay)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
            self.module.load_state_dict(state["module"])
            self.ema.load_state_dict(state["ema"])
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.step = state["step"]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint so that there is a whole one at any time."""
        state = {
            "step": self.step,
            "module": self.module.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def run(self, until: int) -> None:
        """Train up to step `until`; raises SystemExit after saving when a stop was requested."""
        if self.step >= until:
            return
        self.module.train()
        losses: list[float] = []
        saved, since = time.monotonic(), (time.monotonic(), time.process_time())
        while self.step < until:
            losses.append(self._take_step())
            if self.step % self.recipe.log_every == 0 or self.step == until:
                now = (time.monotonic(), time.process_time())
                self._log(
                    loss=sum(losses) / len(losses),
                    lr=self.recipe.lr_at(self.step - 1),
                    wall_seconds=round((now[0] - since[0]) / len(losses), 4),
                    cpu_seconds=round((now[1] - since[1]) / len(losses), 4),
                )
                losses.clear()
                since = now
            stopping = stop_requested.is_set()
            # A pause from outside only makes this condition true early, which costs one extra checkpoint.
            if stopping or self.step == until or time.monotonic() - saved > self.recipe.save_seconds:
                self.save()
                saved = time.monotonic()
            if stopping:
                raise SystemExit(f"stopped at step {self.step}; run the same command again to continue")
            if self.recipe.report and (self.step % self.recipe.report_every == 0 or self.step == until):
                if values := self.recipe.report(self.ema, self.step):
                    self._log(**values)
                since = (time.monotonic(), time.process_time())

    def _take_step(self) -> float:
        recipe = self.recipe
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_000_007 + self.step)
        loss = recipe.loss_at(self.module, self.step, generator)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.module.parameters(), recipe.clip)
        take_step(self.optimizers, recipe.lr_at(self.step))
        self.step += 1
        # The average follows closely at first, or it would carry the random start along for long.
        decay = min(recipe.ema_decay, self.step / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.parameters()), list(self.module.parameters()), 1 - decay)
        return loss.item()

    def _log(self, **values: float) -> None:
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps({"step": self.step, **values}) + "\n")


def ramp(step: int, total: int, peak: float, end: float, warmup: int) -> float:
    """Learning rate: up over `warmup` steps, then straight down from `peak` to `end` at step `total`.

    >>> [round(ramp(step, 100, 1.0, 0.0, 10), 2) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak + (end - peak) * min(1.0, (step - warmup) / (total - warmup))
