"""The word-level tokenizer that both models share."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..captions import words

MAX_TOKENS = 16
# CLIP's text model treats an end token of id 2 specially, for the sake of old checkpoints; so ours is not 2.
PAD, UNKNOWN, START, END = range(4)


def build() -> PreTrainedTokenizerFast:
    """Words to ids, framed by a start and an end token.

    Case, full stops and commas are ignored; a word of no caption becomes the unknown token.
    """
    special = ["<pad>", "<unknown>", "<start>", "<end>"]
    vocabulary = {word: index for index, word in enumerate([*special, *words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex("[.,!?]"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", START), ("<end>", END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_TOKENS,
        pad_token="<pad>",
        unk_token="<unknown>",
        bos_token="<start>",
        eos_token="<end>",
    )


def encode(texts: list[str]) -> torch.Tensor:
    """-> (len(texts), MAX_TOKENS) int64"""
    settings = {"padding": "max_length", "max_length": MAX_TOKENS, "truncation": True, "return_tensors": "pt"}
    tokens: torch.Tensor = build()(texts, **settings).input_ids
    return tokens
