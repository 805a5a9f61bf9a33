import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tomadiff.demo import check
from tomadiff.demo.captions import Background, backgrounds, held_out_sample, subjects
from tomadiff.demo.pictures import composite, render


def ideal(pairs: list[tuple[int, Background]], size: int = 256) -> torch.Tensor:
    """What a perfect model would draw, from the small references. -> (N, 3, size, size) in [0, 1]"""
    names = list(subjects())
    colour, alpha = check.references()
    rows = [names.index(point) for point, _ in pairs]
    glyphs = F.interpolate(torch.cat([colour[rows], alpha[rows]], dim=1), size=size)
    behind = torch.stack([render(background, size) for _, background in pairs])
    return (composite(glyphs, behind) + 1) / 2


def test_perfect_pictures_are_recognised_on_any_background():
    pairs = held_out_sample(200)
    result = check.score(check.look(ideal(pairs), pairs), pairs)
    assert (result.count, result.subject, result.background) == (200, 1.0, 1.0)


def test_noise_and_a_shift_of_a_few_pixels_do_not_matter():
    pairs = held_out_sample(60)
    noise = 0.1 * torch.randn(60, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    pictures = (ideal(pairs).roll(3, dims=-1) + noise).clamp(0, 1)
    assert check.score(check.look(pictures, pairs), pairs).subject > 0.95


def test_another_subject_and_another_background_are_told():
    names = list(subjects())
    drawn = [(names[0], Background("plain", "red")), (names[5], Background("gradient", "red", "blue"))]
    asked = [(names[1], Background("plain", "red")), (names[5], Background("gradient", "blue", "red"))]
    seen = check.look(ideal(drawn), asked)
    assert [found.subject for found in seen] == [names[0], names[5]]
    assert [found.background for found in seen] == [background for _, background in drawn]
    result = check.score(seen, asked)
    assert (result.subject, result.background) == (0.5, 0.5)


def test_an_empty_picture_scores_nothing():
    pairs = held_out_sample(50)
    assert check.score(check.look(torch.full((50, 3, 256, 256), 0.5), pairs), pairs).subject < 0.1


def test_distances_are_those_of_the_pictures_themselves():
    pairs = held_out_sample(3)
    values = check.distances(ideal(pairs, 32))
    assert values.shape == (3, len(subjects()), len(backgrounds()))
    wanted = (ideal(pairs, 32)[0] - ideal(pairs, 32)[1]).square().sum()
    point, background = pairs[1]
    found = values[0, list(subjects()).index(point), backgrounds().index(background)]
    assert found.item() == pytest.approx(wanted.item(), rel=1e-3)


def test_command_checks_weights_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = tmp_path / "own"
    own.symlink_to(check.models.WEIGHTS / "emoji-xl")
    out = tmp_path / "check.json"
    options = ["--count", "2", "--steps", "1", "--json", str(out), "--folder"]
    monkeypatch.setattr("sys.argv", ["check", "--model", "emoji-xl", *options, str(own)])
    check.main()
    report = json.loads(out.read_text())
    assert (report["count"], report["steps"]) == (2, 1)
    assert (report["subject"], report["background"]) == (1, 1)  # at the first step the caption alone draws
    monkeypatch.setattr("sys.argv", ["check", "--model", "emoji-xl", *options, str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="no weights of emoji-xl"):
        check.main()
