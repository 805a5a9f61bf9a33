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

from ..captions import words
from .vocabulary import END, MAX_TOKENS, PAD, START

CLIP_WIDTH = 128
Clip = TypeVar("Clip", CLIPTextModel, CLIPTextModelWithProjection)


def vocabulary_size() -> int:
    """Words and the four special tokens."""
    return len(words()) + 4


def clip_config(layers: int) -> CLIPTextConfig:
    """A CLIP text model of width 128."""
    return CLIPTextConfig(
        vocab_size=vocabulary_size(),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )


def clip(layers: int) -> CLIPTextModel:
    """Last states and the pooled state of the end token."""
    return widen(CLIPTextModel(clip_config(layers)))


def clip_with_projection(layers: int) -> CLIPTextModelWithProjection:
    """The same with a linear layer behind the pooled state."""
    return widen(CLIPTextModelWithProjection(clip_config(layers)))


def widen(model: Clip) -> Clip:
    """Larger word embeddings: CLIP's start at 0.02, too faint for cross-attention to tell words apart."""
    nn.init.normal_(model.get_input_embeddings().weight, std=0.5)
    return model


def t5(width: int, layers: int) -> T5EncoderModel:
    """An encoder without dropout, as the models are too small to overfit."""
    config = T5Config(
        vocab_size=vocabulary_size(),
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=width // 64,
        # Every one of the first tokens can tell its place.
        relative_attention_num_buckets=2 * MAX_TOKENS,
        relative_attention_max_distance=MAX_TOKENS,
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    return T5EncoderModel(config)
