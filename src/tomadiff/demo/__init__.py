"""Two small text-to-image models of our own, and what it takes to train them.

`load("emoji-flux")` and `load("emoji-xl")` are diffusers pipelines like any other.
"""

from tomadiff.demo.models import CALL, available, load

__all__ = ["CALL", "available", "load"]
