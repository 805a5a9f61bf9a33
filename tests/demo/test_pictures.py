import torch

from tomadiff.demo.captions import COLOURS, Background
from tomadiff.demo.pictures import composite, grid, random_background, random_crop, render, shrink
from tomadiff.demo.train.data import Glyphs, single_point


def disc(size: int = 256) -> torch.Tensor:
    """A white disc on nothing. -> (4, size, size) uint8"""
    place = torch.linspace(-1, 1, size)
    inside = (place[:, None].square() + place.square()) < 0.5
    return (inside * 255).to(torch.uint8).expand(4, size, size).contiguous()


def test_backgrounds_have_the_colours_they_name():
    plain = render(Background("plain", "blue"), 8)
    assert (plain * 255).round().int()[:, 3, 5].tolist() == list(COLOURS["blue"])
    halves = (render(Background("two-tone", "green", "white"), 8) * 255).round().int()
    assert halves[:, 0, 3].tolist() == list(COLOURS["green"])
    assert halves[:, 0, 4].tolist() == list(COLOURS["white"])


def test_gradient_runs_from_top_to_bottom_and_is_the_same_at_any_size():
    gradient = Background("gradient", "black", "white")
    small, large = render(gradient, 16), render(gradient, 64)
    assert small[0, :, 0].diff().gt(0).all()
    assert small[0, 0].eq(small[0, 0, 0]).all()
    assert torch.allclose(torch.nn.functional.avg_pool2d(large, 4), small, atol=1e-6)


def test_composite_shows_glyph_where_opaque_and_background_elsewhere():
    glyph = shrink(disc()[None], 64)
    picture = composite(glyph, render(Background("plain", "red"), 64)[None])[0]
    assert picture[:, 32, 32].eq(1).all()
    expected = torch.tensor(COLOURS["red"]) / 127.5 - 1
    assert torch.allclose(picture[:, 0, 0], expected, atol=1e-5)


def test_half_transparent_pixels_mix():
    glyph = torch.full((1, 4, 2, 2), 0.5)
    picture = composite(glyph, torch.zeros(1, 3, 2, 2))
    assert picture.eq(0).all()


def test_random_parts_depend_on_the_generator_alone():
    def draw() -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        behind = torch.stack([random_background(64, generator) for _ in range(8)])
        crops = torch.stack(
            [random_crop(disc(), 64, factor, generator) for factor in (1, 2, 4, 1, 2, 4, 1, 1)]
        )
        return composite(crops, behind)

    assert draw().equal(draw())
    assert draw().shape == (8, 3, 64, 64)
    assert draw().min() >= -1.001
    assert draw().max() <= 1.001


def test_grid_puts_pictures_row_by_row():
    pictures = torch.linspace(-1, 1, 6).view(6, 1, 1, 1).expand(6, 3, 2, 2)
    sheet = grid(pictures, 3)
    assert sheet.shape == (4, 6, 3)
    assert sheet[::2, ::2, 0].flatten().diff().gt(0).all()


def test_unseen_glyphs_are_never_trained_on_and_are_no_subjects():
    stems = [f"{point:x}" for point in range(0x1F300, 0x1F600)] + ["1f336-fe0f", "1f415-200d-1f9ba"]
    glyphs = Glyphs(stems, torch.zeros(len(stems), 4, 1, 1))
    seen, unseen = glyphs.autoencoder_rows()
    assert len(seen) + len(unseen) == len(stems)
    assert not set(seen.tolist()) & set(unseen.tolist())
    assert 0 < len(unseen) < len(stems) / 8
    assert all(glyphs.point(row) != 0x1F405 for row in unseen.tolist())
    assert single_point("1f415-200d-1f9ba") is None


def test_glyphs_that_differ_by_skin_tone_only_are_told_apart():
    stems = [f"{hand:x}-1f3f{tone}" for hand in range(0x1F440, 0x1F460) for tone in "bcdef"]
    glyphs = Glyphs([*stems, *(f"{point:x}" for point in range(0x1F600, 0x1F640))], torch.zeros(224, 4, 1, 1))
    _, unseen = glyphs.autoencoder_rows()
    unlike = set(glyphs.unlike_any_seen().tolist())
    faces = {row for row in unseen.tolist() if row >= len(stems)}
    hands = set(unseen.tolist()) - faces
    assert faces
    assert hands
    assert unlike == faces
