"""What is timed: blocks and whole models of the real shapes, random weights, inputs smooth as latents are;
and whole pipelines, embedded or by path."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from torch import nn
from torch.utils._pytree import tree_map_only

from tomadiff.bench.shapes import SDXL
from tomadiff.config import MergeConfig, preset
from tomadiff.demo import models
from tomadiff.patching.adapters import register
from tomadiff.patching.adapters.base import Adapter, Block, Passage, Reading, form_of, read_timestep
from tomadiff.patching.adapters.unet import unet_block
from tomadiff.patching.apply import find
from tomadiff.patching.clock import Call
from tomadiff.patching.order import Arrange, Restore


@dataclass
class Target:
    """A model and its arguments; `call(step)` runs one step.

    shared_by: how many blocks of the real model share the plan of this one; 1 for a whole model
    calls_per_plan: how many calls in a row merge with one plan while the overhead is measured
    """

    calls_per_plan: ClassVar[int] = 2

    name: str
    family: str
    model: nn.Module
    arguments: Mapping[str, Any]
    shared_by: int
    timestep: Callable[[int], float | torch.Tensor]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    def call(self, step: int) -> Any:
        timestep = self.timestep(step)
        if isinstance(timestep, torch.Tensor):
            timestep = timestep.to(self.device)
        return self.model(timestep=timestep, **self.arguments)

    def to(self, device: torch.device, dtype: torch.dtype) -> Target:
        """The same target elsewhere."""
        self.model.to(device, dtype)
        self.arguments = tree_map_only(torch.Tensor, lambda x: x.to(device, dtype), dict(self.arguments))
        self.device, self.dtype = device, dtype
        return self

    def kinds(self, config: MergeConfig, shared_by: int) -> tuple[str, ...]:
        """The kinds of call that differ: a method that plans for itself in every call has one."""
        if config.method in ("none", "free") or (config.select_every == 1 and shared_by == 1):
            return ("select",)
        if config.select_every == config.weights_every:
            return ("select", "reuse")
        return ("select", "reuse", "weights")

    def scheduled(self, config: MergeConfig) -> MergeConfig:
        """The configuration to time with: every kind of call comes in the first three steps."""
        return config.replace(select_every=4, weights_every=2)

    def settings(self, method: str, ratio: float) -> MergeConfig:
        """Every block merged: ToMA with the family's settings, the peers as published but everywhere."""
        everything = {"skip_first": 0, "min_tokens": 0, "ff_min_tokens": 0, "start": 0.0, "end": 1.0}
        ours = preset(self.family, ratio=ratio, **everything)
        return _settings(ours, method, ratio)


@dataclass
class WholeModel(Target):
    """A model whose calls are so long that plans do not show in them: every call that is timed makes its
    plans anew, which charges a little more than a generation would."""

    calls_per_plan: ClassVar[int] = 1

    def kinds(self, config: MergeConfig, shared_by: int) -> tuple[str, ...]:
        return ("select",)


@dataclass
class Generation(WholeModel):
    """A whole pipeline: one call draws a picture. Merges what the defaults of its family merge."""

    pipe: DiffusionPipeline = None

    def to(self, device: torch.device, dtype: torch.dtype) -> Generation:
        self.pipe.to(device, dtype)
        self.device, self.dtype = device, dtype
        return self

    def call(self, step: int) -> Any:
        random = torch.Generator(self.device).manual_seed(0)
        return self.pipe(**self.arguments, generator=random, output_type="latent")

    def scheduled(self, config: MergeConfig) -> MergeConfig:
        return config

    def settings(self, method: str, ratio: float) -> MergeConfig:
        return _settings(preset(self.family, ratio=ratio), method, ratio)


def _settings(ours: MergeConfig, method: str, ratio: float) -> MergeConfig:
    """`free` is the ceiling of our own choice of blocks and steps."""
    if method == "toma":
        return ours
    if method == "free":
        return ours.replace(method="free", proportional=False, unmerge="transpose")
    return preset(method, ratio=ratio)


class LoneBlock(nn.Module):
    """One transformer block of a UNet, called like a UNet."""

    def __init__(self, side: int, width: int, heads: int, text_width: int) -> None:
        super().__init__()
        self.grid = (side, side)
        self.block = BasicTransformerBlock(width, heads, width // heads, cross_attention_dim=text_width)

    def forward(
        self, hidden_states: torch.Tensor, timestep: float, encoder_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        result: torch.Tensor = self.block(hidden_states, encoder_hidden_states=encoder_hidden_states)
        return result


@register
class LoneBlockAdapter(Adapter):
    models = (LoneBlock,)
    family = "sdxl"

    def __init__(self, model: LoneBlock) -> None:
        self._model = model

    def blocks(self) -> list[Block]:
        return [unet_block("block", self._model.block, "block", stack="block")]

    def passages(self) -> list[Passage]:
        return [Passage("block", "block", ((self._model.block, Arrange), (self._model.block, Restore)))]

    def read(self, given: Mapping[str, Any]) -> Reading:
        x, timestep = given["hidden_states"], read_timestep(given["timestep"])
        call = Call(timestep, form_of(x), given["encoder_hidden_states"])
        return Reading(call, 1 - timestep / 1000, x.shape[0], {"block": (self._model.grid,)}, x.device)


def smooth(batch: int, channels: int, height: int, width: int) -> torch.Tensor:
    """(B, C, H, W) of random fields whose neighbours are alike."""
    coarse = torch.randn(batch, channels, -(-height // 8) + 1, -(-width // 8) + 1)
    field = nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return field + 0.1 * torch.randn_like(field)


def _tokens(batch: int, side: int, width: int) -> torch.Tensor:
    return smooth(batch, width, side, side).flatten(2).mT.contiguous()


def _randomise(model: nn.Module) -> nn.Module:
    """Small random values for a model on the meta device; the usual ones take minutes for a large one."""
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    for values in (*model.parameters(), *model.buffers()):
        values.normal_(std=0.02)
    return model


def _sdxl_block(name: str, side: int, width: int, shared_by: int) -> Target:
    model = LoneBlock(side, width, max(1, width // 64), 2048).eval().requires_grad_(False)
    arguments = {"hidden_states": _tokens(2, side, width), "encoder_hidden_states": torch.randn(2, 77, 2048)}
    return Target(name, "sdxl", model, arguments, shared_by, lambda step: 999 - step)


def _sdxl(name: str, size: int = 1024) -> Target:
    with torch.device("meta"):
        model = UNet2DConditionModel(**SDXL)
    arguments = {
        "sample": smooth(1, 4, size // 8, size // 8),
        "encoder_hidden_states": torch.randn(1, 77, 2048),
        "added_cond_kwargs": {"text_embeds": torch.randn(1, 1280), "time_ids": torch.ones(1, 6)},
    }
    return WholeModel(name, "sdxl", _randomise(model), arguments, 1, lambda step: 999 - step)


def _flux(name: str, dual: int, single: int, shared_by: int) -> Target:
    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=dual, num_single_layers=single, guidance_embeds=True)
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    arguments = {
        "hidden_states": _tokens(1, 64, 64),
        "encoder_hidden_states": torch.randn(1, 512, 4096),
        "pooled_projections": torch.randn(1, 768),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.stack((torch.zeros(64, 64), rows, columns), dim=-1).view(-1, 3),
        "txt_ids": torch.zeros(512, 3),
    }
    return Target(
        name,
        "flux",
        _randomise(model),
        arguments,
        shared_by,
        _as_tensor(lambda step: 0.999 - step / 1000),
    )


def _sd3(name: str) -> Target:
    with torch.device("meta"):
        # The shape of stable-diffusion-3.5-large.
        model = SD3Transformer2DModel(
            num_layers=2,
            num_attention_heads=38,
            caption_projection_dim=2432,
            pos_embed_max_size=192,
            qk_norm="rms_norm",
        )
    arguments = {
        "hidden_states": smooth(1, 16, 128, 128),
        "encoder_hidden_states": torch.randn(1, 333, 4096),
        "pooled_projections": torch.randn(1, 2048),
    }
    return Target(
        name,
        "sd3",
        _randomise(model),
        arguments,
        19,
        _as_tensor(lambda step: 999 - step),
    )


def _as_tensor(timestep: Callable[[int], float]) -> Callable[[int], torch.Tensor]:
    return lambda step: torch.tensor([timestep(step)])


# In SDXL stacks of 2 blocks see 64 x 64 tokens, of 10 blocks 32 x 32; Flux has 19 dual- and 38 single-stream
# blocks.
TARGETS: dict[str, Callable[[str], Target]] = {
    "sdxl-block-64": lambda name: _sdxl_block(name, 64, 640, 2),
    "sdxl-block-32": lambda name: _sdxl_block(name, 32, 1280, 10),
    "sdxl": _sdxl,
    "flux-dual": lambda name: _flux(name, 1, 0, 19),
    "flux-single": lambda name: _flux(name, 0, 1, 38),
    "sd3-block": _sd3,
}


def _generation(
    name: str, pipe: DiffusionPipeline, arguments: dict[str, Any], steps: int, size: int | None
) -> Generation:
    arguments = arguments | {"num_inference_steps": steps}
    if size is not None:
        arguments |= {"height": size, "width": size}
    pipe.set_progress_bar_config(disable=True)
    model, adapter = find(pipe)
    return Generation(name, adapter.family, model, arguments, 1, float, pipe=pipe)


def build(name: str, steps: int = 25, size: int | None = None) -> Target:
    """A target by name, always with the same weights and inputs.

    `unet-block-8-1280` and the like are blocks of other sizes: 8 x 8 tokens of width 1280. A folder, or a
    name with a slash, is a pipeline that draws whole pictures, of `steps` steps and `size` pixels; `sdxl` has
    a size too.
    """
    if name in models.CALL:
        arguments = models.CALL[name] | {"prompt": "popcorn on a green background"}
        return _generation(name, models.load(name), arguments, steps, size)
    if "/" in name or Path(name).is_dir():
        pipe = DiffusionPipeline.from_pretrained(name)
        return _generation(name, pipe, {"prompt": "a tiger in the snow"}, steps, size)
    other = re.fullmatch(r"unet-block-(\d+)-(\d+)", name)
    if name not in TARGETS and other is None:
        known = ", ".join((*TARGETS, *models.CALL, "unet-block-SIDE-WIDTH", "path/to/a/pipeline"))
        raise ValueError(f"unknown target {name!r}; there are {known}")
    if size is not None and name != "sdxl":
        raise ValueError(f"{name} has a size of its own; sizes are for sdxl and for pipelines")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if size is not None:
            return _sdxl(name, size)
        if other is None:
            return TARGETS[name](name)
        # In a UNet of Stable Diffusion 1 there is a convolution between any two blocks.
        return _sdxl_block(name, int(other[1]), int(other[2]), 1)
