"""Small text encoders of the kinds the pipelines expect."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from . import vocabulary
from .vocabulary import END, MAX_TOKENS, PAD, START

CLIP_WIDTH = 128
Clip = TypeVar("Clip", CLIPTextModel, CLIPTextModelWithProjection)


def clip_config(layers: int, width: int, spelled: bool) -> CLIPTextConfig:
    """A CLIP text model; `spelled`: it knows the words for parts of subjects."""
    return CLIPTextConfig(
        vocab_size=vocabulary.size(spelled),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )


def clip(layers: int, width: int = CLIP_WIDTH, spelled: bool = False) -> CLIPTextModel:
    """Last states and the pooled state of the end token."""
    return widen(CLIPTextModel(clip_config(layers, width, spelled)))


def clip_with_projection(layers: int, width: int = CLIP_WIDTH) -> CLIPTextModelWithProjection:
    """The same with a linear layer behind the pooled state."""
    return widen(CLIPTextModelWithProjection(clip_config(layers, width, False)))


def widen(model: Clip) -> Clip:
    """Larger embeddings of words and places: CLIP's start too faint to be told apart early in training."""
    for table in model.modules():
        if isinstance(table, nn.Embedding):
            nn.init.normal_(table.weight, std=0.5)
    return model


def t5(width: int, layers: int) -> T5EncoderModel:
    """An encoder without dropout, as the models are too small to overfit."""
    config = T5Config(
        vocab_size=vocabulary.size(parts=True),
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=4,
        # As in the T5 of Flux; what a part looks like depends on subject and place, a product of the two.
        feed_forward_proj="gated-gelu",
        # A bucket for every distance.
        relative_attention_num_buckets=4 * MAX_TOKENS,
        relative_attention_max_distance=2 * MAX_TOKENS,
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    model = T5EncoderModel(config)
    nn.init.normal_(model.shared.weight, std=0.3)
    # T5 knows the order of words by these values alone; they start too faint for it to be learned early.
    for name, values in model.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.normal_(values)
    return model
