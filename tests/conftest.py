"""One thread for each test process: small tensors gain nothing from more, and results stay the same."""

import os

# Some virtual machines announce AMX without granting it; bfloat16 products would then kill the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("tomadiff", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("tomadiff")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
