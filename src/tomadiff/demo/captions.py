"""What the embedded models can draw: subjects, backgrounds, and which pairs of them are never trained on."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Literal

# Animals, plants and foods. The third range ends at Unicode 14, so that every Python knows all of them.
GLYPH_RANGES = (
    (0x1F400, 0x1F43F),
    (0x1F980, 0x1F9AE),
    (0x1FAB0, 0x1FABA),
    (0x1F32D, 0x1F37F),
    (0x1F950, 0x1F96F),
)

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "gray": (136, 136, 136),
    "black": (16, 16, 16),
    "red": (214, 40, 40),
    "orange": (245, 130, 30),
    "yellow": (250, 215, 50),
    "green": (50, 160, 70),
    "blue": (40, 95, 215),
    "purple": (130, 60, 175),
    "pink": (250, 160, 195),
}

HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Background:
    """One colour, or two of them blended from top to bottom, or side by side from left to right."""

    kind: Literal["plain", "gradient", "two-tone"]
    first: str
    second: str | None = None

    @property
    def text(self) -> str:
        """The words between "on a" and "background".

        >>> Background("gradient", "red", "yellow").text
        'red to yellow gradient'
        """
        if self.kind == "plain":
            return self.first
        if self.kind == "gradient":
            return f"{self.first} to {self.second} gradient"
        return f"{self.first} and {self.second}"


def subjects() -> dict[int, str]:
    """Code point to lower-case Unicode name, of every subject.

    >>> subjects()[0x1F405], len(subjects())
    ('tiger', 237)
    """
    points = (point for low, high in GLYPH_RANGES for point in range(low, high + 1))
    return {point: unicodedata.name(chr(point)).lower() for point in sorted(points)}


def backgrounds(kind: str | None = None) -> list[Background]:
    """All backgrounds in a fixed order (10 plain, 90 gradients, 90 two-tone), or those of one kind."""
    pairs = [(first, second) for first in COLOURS for second in COLOURS if first != second]
    every = [Background("plain", colour) for colour in COLOURS]
    every += [Background("gradient", first, second) for first, second in pairs]
    every += [Background("two-tone", first, second) for first, second in pairs]
    return [background for background in every if kind is None or background.kind == kind]


def caption(name: str, background: Background) -> str:
    """The prompt a picture is trained with.

    >>> caption("tiger", Background("plain", "blue"))
    'tiger on a blue background'
    """
    article = "an" if background.text[0] in "aeiou" else "a"
    return f"{name} on {article} {background.text} background"


@cache
def words() -> tuple[str, ...]:
    """Every word and sign of every caption, sorted."""
    first = next(iter(subjects().values()))
    texts = [*subjects().values(), *(caption(first, background) for background in backgrounds())]
    return tuple(sorted({word for text in texts for word in _split(text)}))


def unknown_words(prompt: str) -> list[str]:
    """Words of a prompt that are in no caption; case, full stops and commas do not matter.

    >>> unknown_words("A tiger on a turquoise background.")
    ['turquoise']
    """
    return [word for word in _split(re.sub("[.,!?]", " ", prompt.lower())) if word not in words()]


def _split(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]+", text)


def is_held_out(name: str, background: Background) -> bool:
    """Whether this pair is kept from training. Depends on the words alone, so it never changes."""
    digest = hashlib.sha256(f"{name}|{background.text}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def pairs(*, held_out: bool, kind: str | None = None) -> list[tuple[int, Background]]:
    """All (code point, background) pairs of one side of the split, in a fixed order."""
    choices = backgrounds(kind)
    return [
        (point, background)
        for point, name in subjects().items()
        for background in choices
        if is_held_out(name, background) == held_out
    ]


def held_out_pairs(kind: str | None = None) -> list[tuple[int, Background]]:
    """The (code point, background) pairs no model has ever seen, though it has seen each half of them."""
    return pairs(held_out=True, kind=kind)


def held_out_sample(count: int, offset: Literal[0, 1] = 0) -> list[tuple[int, Background]]:
    """`count` different held-out pairs spread over all subjects, every other one on a plain background.

    The two offsets share no pair: one to report, one to choose settings with.
    """
    plain = held_out_pairs("plain")[offset::2]
    others = (held_out_pairs("gradient") + held_out_pairs("two-tone"))[offset::2]
    half = (count + 1) // 2
    if half > len(plain):
        raise ValueError(f"there are {2 * len(plain)} such pairs; got a count of {count}")
    spread = [
        pair
        for index in range(half)
        for pair in (plain[index * len(plain) // half], others[index * len(others) // half])
    ]
    return spread[:count]
