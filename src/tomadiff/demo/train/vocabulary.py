"""The word-level tokenizer that both models share."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..captions import words

# A caption takes at most 16 tokens. The others have room to tell what the picture looks like, part by part.
PARTS = 64
MAX_TOKENS = 16 + PARTS
# CLIP's text model treats an end token of id 2 specially, for the sake of old checkpoints; so ours is not 2.
PAD, UNKNOWN, START, END = range(4)


def build(parts: bool = False) -> PreTrainedTokenizerFast:
    """Words to ids, framed by a start and an end token; after a token for each part of a picture if asked.

    Case, full stops and commas are ignored; a word of no caption becomes the unknown token.
    """
    special = ["<pad>", "<unknown>", "<start>", "<end>"]
    places = [f"<part {index}>" for index in range(PARTS)] if parts else []
    vocabulary = {word: index for index, word in enumerate([*special, *words(), *places])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex("[.,!?]"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*places, "<start>", "$A", "<end>"],
        special_tokens=[(token, vocabulary[token]) for token in (*places, "<start>", "<end>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_TOKENS,
        pad_token="<pad>",
        unk_token="<unknown>",
        bos_token="<start>",
        eos_token="<end>",
    )


def size(parts: bool = False) -> int:
    """How many ids there are."""
    return 4 + len(words()) + (PARTS if parts else 0)


def with_parts(tokens: torch.Tensor) -> torch.Tensor:
    """What `encode` gives -> what the tokenizer with parts gives, as long. (B, T) -> (B, T)"""
    places = torch.arange(size(), size(parts=True)).expand(len(tokens), -1)
    return torch.cat([places, tokens[:, :-PARTS]], dim=1)


def encode(texts: list[str]) -> torch.Tensor:
    """-> (len(texts), MAX_TOKENS) int64"""
    settings = {"padding": "max_length", "max_length": MAX_TOKENS, "truncation": True, "return_tensors": "pt"}
    tokens: torch.Tensor = build()(texts, **settings).input_ids
    return tokens
