"""How tokens merge: one file per method, one small interface.

A method is built from a `MergeConfig` and knows nothing of any model. It says how a grid of tokens is laid
out, and makes a plan from hidden states in that layout; hooks then call the plan around the model's modules.
"""

from __future__ import annotations

from tomadiff.methods.free import Free, NoMerging
from tomadiff.methods.interface import Method, Plan
from tomadiff.methods.todo import ToDo
from tomadiff.methods.tofu import ToFu
from tomadiff.methods.toma import ToMA
from tomadiff.methods.tome import ToMe

__all__ = ["METHODS", "Method", "Plan"]

METHODS: dict[str, type[Method]] = {
    "toma": ToMA,
    "tome": ToMe,
    "tofu": ToFu,
    "todo": ToDo,
    "none": NoMerging,
    "free": Free,
}
