import torch

from tomadiff.demo import models
from tomadiff.evals import redundancy


def test_smooth_tokens_are_more_alike_than_noise():
    noise = torch.randn(1, 256, 64, generator=torch.Generator().manual_seed(0))
    coarse = noise.view(1, 16, 16, 64)[:, ::4, ::4]
    smooth = coarse.repeat_interleave(4, 1).repeat_interleave(4, 2).reshape(1, 256, 64)
    assert abs(redundancy.neighbours(noise)) < 0.05
    assert redundancy.neighbours(smooth) > 0.7
    assert redundancy.covered(smooth) > 0.999 > 0.8 > redundancy.covered(noise)


def test_every_block_of_an_embedded_model_is_reported():
    rows = redundancy.measure("emoji-flux", prompts=1, steps=1)
    transformer = models.load("emoji-flux").transformer
    assert len(rows) == len(transformer.transformer_blocks) + len(transformer.single_transformer_blocks)
    assert {row["tokens"] for row in rows} == {1024}
    assert all(abs(row["noise_neighbours"]) < 0.05 for row in rows)
