import torch

from tomadiff.evals import metrics


def test_identical_pictures_get_the_best_values():
    pictures = torch.rand(2, 3, 32, 32)
    assert metrics.squared_error(pictures, pictures).tolist() == [0, 0]
    assert metrics.psnr(pictures, pictures).tolist() == [metrics.BEST_PSNR] * 2
    assert torch.allclose(metrics.ssim(pictures, pictures), torch.ones(2))


def test_values_belong_to_single_pictures():
    wanted = torch.rand(2, 3, 32, 32) * 0.5
    pictures = wanted.clone()
    pictures[1] += 0.1
    assert metrics.psnr(pictures, wanted)[0] == metrics.BEST_PSNR
    assert torch.isclose(metrics.psnr(pictures, wanted)[1], torch.tensor(20.0), atol=1e-3)
    assert metrics.ssim(pictures, wanted)[0] > metrics.ssim(pictures, wanted)[1]
