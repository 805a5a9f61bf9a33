"""The word-level tokenizers of the models.

The plain one knows the words of captions. The others, of T5 in `emoji-flux` and of the first CLIP in
`emoji-xl`, spell a caption out: 64 words for the subject come first, one for each part of its picture, and of
two colours they say where each lies. What 237 subjects look like is more than the layers of small text
encoders can remember; a table of words can. CLIP sees only what came before: its tokenizer names the
background's colours first of all.
"""

from __future__ import annotations

import re
from functools import cache

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..captions import COLOURS, subjects, words

# A caption takes at most 16 tokens. The others have room to tell what the picture looks like, part by part.
PARTS = 64
MAX_TOKENS = 16 + PARTS
# How many words for the background come before those for the parts, where it is named first.
SCENE = 2
# CLIP's text model treats an end token of id 2 specially, for the sake of old checkpoints; so ours is not 2.
PAD, UNKNOWN, START, END = range(4)
SPECIAL = ("<pad>", "<unknown>", "<start>", "<end>")
# What captions begin with between their parts and their words: like "<start>", but not cut at its brackets.
BEGIN = "start_"
# Where in the picture a colour of two lies, by the words before and after it.
WHERE = {
    "above": ("", r"(?= to \w+ gradient)"),
    "below": (r"(?<= to )", "(?= gradient)"),
    "left": ("", r"(?= and \w+ background)"),
    "right": (r"(?<= and )", "(?= background)"),
}
TO_SPACE = (normalizers.Lowercase(), normalizers.Replace(Regex("[.,!?]"), " "))


def build() -> PreTrainedTokenizerFast:
    """Words to ids, framed by a start and an end token.

    Case, full stops and commas are ignored; a word of no caption becomes the unknown token.
    """
    ids = {word: index for index, word in enumerate([*SPECIAL, *words()])}
    return _tokenizer(ids, list(TO_SPACE), ["<start>", "$A", "<end>"])


def build_with_parts(scene_first: bool = False) -> PreTrainedTokenizerFast:
    """The same, spelled out, and without a start token. A caption that does not begin with a subject, an
    article before it or not, has the words for parts of no subject; an empty one has none.

    scene_first: the colours of the background come first of all, as two words: the same one twice if it is
        plain, and the start token where there is none of the backgrounds of captions.
    """
    ids = {word: index for index, word in enumerate([*SPECIAL, *words(), *part_words(), *placed_colours()])}
    ids[BEGIN] = ids.pop("<start>")
    place = [
        normalizers.Replace(Regex(rf"{before}\b{colour}\b{after}"), f"{colour}_{where}")
        for colour in COLOURS
        for where, (before, after) in WHERE.items()
    ]
    # "tiger face" before "tiger"; and a hyphen may have spaces around it, as between words that were split.
    spell = [
        normalizers.Replace(
            Regex(rf"^\s*((an?|the) )?{name.replace('-', ' ?- ?')}\b"),
            " ".join([*spelled(name), BEGIN, name]),
        )
        for name in sorted(subjects().values(), key=len, reverse=True)
    ]
    blank = normalizers.Replace(Regex(r"^(?!\w+_00 )"), " ".join([*spelled(), BEGIN, ""]))
    scene = _name_scene() if scene_first else []
    return _tokenizer(ids, [*TO_SPACE, *place, *spell, blank, *scene], ["$A", "<end>"])


def _name_scene() -> list[normalizers.Normalizer]:
    """Put the colours of the background in front: the later one, then the other before it."""
    plain = [(f"{colour} background", SCENE * f"{colour} ") for colour in COLOURS]
    placed = [
        (f"{colour}_{where}", f"{colour}_{where} ")
        for where in ("below", "right", "above", "left")
        for colour in COLOURS
    ]
    naming = [normalizers.Replace(Regex(rf"^(?=.* {text}\b)"), front) for text, front in [*plain, *placed]]
    none = normalizers.Replace(Regex(r"^(?=\w+_00 )"), SCENE * f"{BEGIN} ")
    return [*naming, none]


def _tokenizer(
    ids: dict[str, int], normal: list[normalizers.Normalizer], template: list[str]
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unknown>"))
    tokenizer.normalizer = normalizers.Sequence(normal)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    frame = [token for token in template if token != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, ids[token]) for token in frame]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_TOKENS,
        pad_token="<pad>",
        unk_token="<unknown>",
        bos_token="<start>" if "<start>" in frame else None,
        eos_token="<end>",
    )


def spelled(name: str = "part") -> list[str]:
    """The words for the parts of a subject's picture, or of none's.

    >>> spelled("hot dog")[:2]
    ['hot_dog_00', 'hot_dog_01']
    """
    stem = re.sub(r"\W+", "_", name)
    return [f"{stem}_{part:02d}" for part in range(PARTS)]


def part_words() -> list[str]:
    """Those of all subjects, after those of none."""
    return [word for name in ("part", *subjects().values()) for word in spelled(name)]


def placed_colours() -> list[str]:
    """Colours that are not all over the picture."""
    return [f"{colour}_{where}" for colour in COLOURS for where in WHERE]


def size(parts: bool = False) -> int:
    """How many ids CLIP's tokenizer has, or T5's."""
    return len(SPECIAL) + len(words()) + (len(part_words()) + len(placed_colours()) if parts else 0)


@cache
def _speller(scene_first: bool) -> PreTrainedTokenizerFast:
    return build_with_parts(scene_first)


def with_parts(tokens: torch.Tensor, scene_first: bool = False) -> torch.Tensor:
    """What `encode` gives -> what the tokenizer with parts gives, as long. (B, T) -> (B, T)"""
    # Brackets would be cut off; any word of no caption is as good for the unknown one.
    every = {index + len(SPECIAL): word for index, word in enumerate(words())} | {UNKNOWN: "unknown"}
    texts = [" ".join(every[index] for index in row if index in every) for row in tokens.tolist()]
    return _pad(_speller(scene_first), texts, tokens.shape[1])


def encode(texts: list[str]) -> torch.Tensor:
    """-> (len(texts), MAX_TOKENS) int64"""
    return _pad(build(), texts, MAX_TOKENS)


def _pad(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> torch.Tensor:
    settings = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
    tokens: torch.Tensor = tokenizer(texts, **settings).input_ids
    return tokens
