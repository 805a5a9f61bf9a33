import json
from pathlib import Path

import pytest
import torch
from small_models import tiny, tiny_xl
from torch import nn

from tomadiff.demo.captions import held_out_pairs
from tomadiff.demo.train import autoencoder, denoiser, latents, loop, run, vocabulary
from tomadiff.demo.train.flux import pack, positions, some_window, unpack
from tomadiff.demo.train.stages import PLAN, STAGES, Stage, learning_rate, locate
from tomadiff.demo.train.xl import PICTURE, features

TINY_STAGES = {
    "emoji-flux": (Stage(2, 2, 1e-3, 1e-4, 1, window=4), Stage(2, 2, 1e-4, 1e-5, 1)),
    "emoji-xl": (Stage(2, 2, 1e-3, 1e-4, 1), Stage(2, 3, 1e-4, 1e-5, 1)),
}


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthetic latents, and small ones, in place of encoded pictures."""

    def load(out: Path) -> latents.Pool:
        noise = torch.randn(8, 8, 16, 16, generator=torch.Generator().manual_seed(1))
        return latents.Pool(noise.half(), vocabulary.encode(["tiger on a red background"]).expand(8, -1), 4)

    monkeypatch.setattr(latents, "load", load)


def train(name: str, folder: Path, stops: tuple[int, ...]) -> loop.Training:
    recipe = denoiser.recipe(folder, name, TINY_STAGES[name])
    recipe = loop.Recipe(recipe.loss_at, recipe.lr_at, log_every=1)
    for until in stops:
        training = loop.Training(tiny(name), recipe, folder / name)
        training.run(until)
    return training


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([value.flatten() for value in module.parameters()])


@pytest.mark.parametrize("name", ["emoji-flux", "emoji-xl"])
def test_resumed_training_equals_an_uninterrupted_one(name: str, pools: None, tmp_path: Path):
    whole = train(name, tmp_path / "whole", (4,))
    parts = train(name, tmp_path / "parts", (1, 3, 4))
    assert parts.step == whole.step == 4
    assert flat(parts.module).equal(flat(whole.module))
    assert flat(parts.ema).equal(flat(whole.ema))
    assert not flat(whole.module).equal(flat(tiny(name)))
    lines = [json.loads(line) for line in (tmp_path / "parts" / name / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_stop_request_saves_a_checkpoint_and_exits(pools: None, tmp_path: Path):
    loop.stop_requested.set()
    try:
        with pytest.raises(SystemExit, match="step 1"):
            train("emoji-flux", tmp_path, (4,))
    finally:
        loop.stop_requested.clear()
    assert train("emoji-flux", tmp_path, (4,)).step == 4
    assert not list(tmp_path.rglob("*.partial"))


def test_second_driver_in_the_same_folder_is_refused(tmp_path: Path):
    with run.lock(tmp_path), pytest.raises(SystemExit, match="another process"):
        run.lock(tmp_path)
    run.lock(tmp_path).close()


def test_muon_moves_convolutions_as_it_moves_matrices():
    torch.manual_seed(0)
    wanted = nn.Conv2d(4, 6, 3)
    convolution = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    optimizer = loop.ConvolutionMuon([convolution.weight], 1.0, 0.0)
    before, losses = convolution.weight.detach().clone(), []
    for _ in range(60):
        x = torch.randn(8, 4, 8, 8)
        loss = (convolution(x) - wanted(x)).square().mean()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.05
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert convolution.weight.grad is None
    assert not convolution.weight.equal(before)
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(ValueError, match="channels_last"):
        loop.ConvolutionMuon([nn.Conv2d(4, 6, 3).weight], 1.0, 0.0)


def test_every_parameter_has_one_optimizer():
    model = tiny("emoji-xl")
    held = [len(group["params"]) for each in loop.optimizers(model) for group in each.param_groups]
    assert len(held) == 3
    assert min(held) > 0
    assert sum(held) == len(list(model.parameters()))


def test_stages_follow_each_other():
    stages = TINY_STAGES["emoji-xl"]
    assert [locate(stages, step)[0].batch for step in range(5)] == [2, 2, 3, 3, 3]
    assert learning_rate(stages, 0) == 1e-3
    assert learning_rate(stages, 2) == 1e-4


def test_plan_takes_each_model_to_the_end_of_its_last_stage():
    for name, stages in STAGES.items():
        targets = [until for planned, until in PLAN if planned == name]
        assert targets == sorted(targets)
        assert targets[-1] == sum(stage.steps for stage in stages)


def test_pool_draws_plain_and_other_backgrounds_and_some_empty_captions(pools: None):
    pool = latents.load(Path())
    pictures, tokens = pool.draw(400, torch.Generator().manual_seed(0))
    assert pictures.shape == (400, 8, 16, 16)
    assert pictures.dtype == torch.float32
    empty = (tokens == vocabulary.encode([""])).all(dim=1).sum().item()
    assert 20 < empty < 60


def test_no_encoded_picture_is_held_out():
    chosen, plain = latents.chosen_pairs()
    assert not set(chosen) & set(held_out_pairs())
    assert len(chosen) == len(set(chosen)) == plain + latents.TWO_COLOURED
    assert {background.kind for _, background in chosen[:plain]} == {"plain"}


def test_windows_are_squares_of_neighbours_that_reach_every_edge():
    drawn = [some_window(6, 3, torch.Generator().manual_seed(seed)) for seed in range(60)]
    for window in drawn:
        rows, columns = window.view(3, 3) // 6, window.view(3, 3) % 6
        assert (rows.diff(dim=0) == 1).all()
        assert (columns.diff(dim=1) == 1).all()
    assert torch.cat(drawn).unique().equal(torch.arange(36))
    assert some_window(6, 6, torch.Generator()).equal(torch.arange(36))


def test_a_unet_has_to_see_the_whole_picture():
    tokens = vocabulary.encode(["tiger on a red background"])
    with pytest.raises(ValueError, match="see all of it"):
        tiny_xl().loss(torch.randn(1, 8, 16, 16), tokens, 0, torch.Generator(), window=4)


def test_levels_on_the_way_up_are_asked_for_the_picture_while_they_learn():
    model = tiny_xl()
    latents, tokens = torch.randn(1, 8, 32, 32), vocabulary.encode(["tiger on a blue background"])
    with features(model.unet) as levels:
        model(latents, torch.tensor([999]), tokens)
    model(latents, torch.tensor([999]), tokens)
    assert [tuple(level.shape) for level in levels] == [
        (1, 128, 4, 4),
        (1, 128, 8, 8),
        (1, 128, 16, 16),
        (1, 48, 32, 32),
    ]
    lost = model.loss(latents, tokens, 0, torch.Generator().manual_seed(0))
    for reader in model.pictures:
        nn.init.zeros_(reader.weight)
        nn.init.constant_(reader.bias, 10.0)
    worse = model.loss(latents, tokens, 0, torch.Generator().manual_seed(0))
    assert worse - lost > 0.8 * PICTURE * 10**2


def test_rotary_positions_span_the_same_range_at_every_resolution():
    assert positions(32)[:, 1:].max() == 31
    assert positions(8)[:, 1:].mean() == positions(32)[:, 1:].mean()
    assert positions(32)[33].tolist() == [0, 1, 1]


def test_pack_is_undone_by_unpack():
    whole = torch.randn(2, 8, 16, 16)
    assert pack(whole).shape == (2, 64, 32)
    assert unpack(pack(whole), 16).equal(whole)


def test_normalised_latents_have_unit_statistics_and_decode_to_the_same():
    torch.manual_seed(0)
    vae = autoencoder.build((8, 8, 8), groups=4).eval()
    pictures = torch.rand(4, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        before = vae.decode(vae.encode(pictures).latent_dist.mode()).sample
        spread_before = vae.encode(pictures).latent_dist
        autoencoder.normalise(vae, pictures)
        after = vae.encode(pictures).latent_dist
        assert torch.allclose(vae.decode(after.mode()).sample, before, atol=1e-4)
    assert torch.allclose(after.mean.mean(dim=(0, 2, 3)), torch.zeros(8), atol=1e-4)
    assert torch.allclose(after.mean.std(dim=(0, 2, 3)), torch.ones(8), atol=1e-3)
    ratio = (after.std / spread_before.std).mean(dim=(0, 2, 3))
    assert torch.allclose(ratio, 1 / spread_before.mean.std(dim=(0, 2, 3)), rtol=1e-3)


def test_autoencoder_learns_from_crops():
    torch.manual_seed(0)
    vae = autoencoder.build((8, 8, 8), groups=4)
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (2, 4, 256, 256), dtype=torch.uint8, generator=generator)
    crops = autoencoder.draw_crops(pictures, 64, 2, generator)
    drawn = vae.decode(vae.encode(crops).latent_dist.sample(generator)).sample
    autoencoder.reconstruction_loss(drawn, crops).backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in vae.parameters())
