"""What examples in docstrings may use without making it: `pipe`, a small pipeline, and its `prompt`."""

import pytest
import torch

import tomadiff
from tomadiff.bench.shapes import small_sdxl_pipeline, small_sdxl_prompt

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _pipe():
    return small_sdxl_pipeline(width=16, layers=(1, 1, 1))


@pytest.fixture(autouse=True)
def _names(doctest_namespace, _pipe):
    doctest_namespace |= {"tomadiff": tomadiff, "pipe": _pipe, "prompt": small_sdxl_prompt()}
    yield
    tomadiff.remove(_pipe)
