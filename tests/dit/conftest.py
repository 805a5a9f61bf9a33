"""One thread for each test process, and the families that tests run over."""

import pytest
import torch
from small_dits import FAMILIES

torch.set_num_threads(1)


@pytest.fixture(params=FAMILIES)
def family(request):
    """A model and what makes its inputs."""
    make, inputs = FAMILIES[request.param]
    return make(), inputs


@pytest.fixture(params=["flux", "sd3.5 medium"])
def main_family(request):
    make, inputs = FAMILIES[request.param]
    return make(), inputs
