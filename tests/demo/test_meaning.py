import pytest
import torch
import torch.nn.functional as F
from small_models import encoded, glyphs, tiny
from torch import nn

from tomadiff.demo.captions import Background, pairs, subjects
from tomadiff.demo.train import meaning, vocabulary


def test_principal_components_keep_what_matters_and_have_no_unit():
    rows = torch.randn(50, 3) @ torch.randn(3, 10) * 100
    mean, basis = meaning.principal(rows, 3)
    components = (rows - mean) @ basis
    assert components.std(0).max() < 1.1
    back = components @ torch.linalg.pinv(basis) + mean
    assert torch.allclose(back, rows, atol=0.1)


def test_lessons_tell_each_part_of_the_picture_and_leave_held_out_pairs_alone():
    told = meaning.lessons(glyphs())
    assert len(told.tokens) == len(pairs(held_out=False))
    tokens, seen, whole = told.draw(torch.tensor([0, 1, 2]))
    assert (tokens.shape, seen.shape, whole.shape) == ((3, 80), (3, 64, 128), (3, 128))
    # The same subject on other backgrounds: what sets it apart is the same, what is seen is not.
    assert whole[0, : meaning.COMPONENTS].equal(whole[1, : meaning.COMPONENTS])
    assert not seen[0].allclose(seen[1])


def test_details_tell_each_part_of_an_encoded_picture():
    shown = meaning.details(encoded())
    tokens, detail = shown.draw(5, torch.Generator().manual_seed(0))
    assert (tokens.shape, detail.shape) == ((5, 80), (5, 64, meaning.DETAIL_COMPONENTS))
    assert detail.std(dim=(0, 1)).max() < 2


def test_parts_are_cut_row_by_row():
    picture = torch.zeros(1, 3, 64, 64)
    picture[:, :, 8:16, 16:24] = 1
    assert meaning.parts(picture).mean(-1).nonzero().tolist() == [[0, 10]]


def test_words_of_parts_begin_with_what_the_part_looks_like_and_which_it_is():
    shown, words = meaning.details(encoded()), nn.Embedding(vocabulary.size(parts=True), 192)
    nn.init.zeros_(words.weight)
    meaning.spell(words, shown, glyphs())
    table = words.weight[vocabulary.size() : -len(vocabulary.placed_colours())]
    told = table.view(len(subjects()) + 1, vocabulary.PARTS, -1)
    assert (told[..., -vocabulary.PARTS :].argmax(-1) == torch.arange(vocabulary.PARTS)).all()
    tokens, detail = shown.draw(50, torch.Generator().manual_seed(0))
    full = tokens[:, 1] != vocabulary.END
    mine = words(vocabulary.with_parts(tokens[full])[:, : vocabulary.PARTS])[..., : meaning.SPELLED]
    seen = detail[full][..., : meaning.SPELLED]
    # Backgrounds differ, and are not told yet.
    assert F.mse_loss(mine, seen) < 0.7 * F.mse_loss(mine.flip(0), seen)
    assert words.weight[: vocabulary.size()].count_nonzero() == 0


@pytest.mark.parametrize("name", ["emoji-flux", "emoji-xl"])
def test_words_that_tell_something_are_read_well_from_the_start(name: str, monkeypatch: pytest.MonkeyPatch):
    told, shown = meaning.lessons(glyphs()), meaning.details(encoded())

    def first_losses() -> dict[str, float]:
        model = tiny(name)
        meaning.spell(model.table, shown, glyphs())
        return meaning.teach(model, model.text_states, model.tellers, told, shown, 1)

    well = first_losses()
    monkeypatch.setattr(meaning, "_read_well", lambda *_: None)
    unknowing = first_losses()
    assert well["look"] < 0.5 * unknowing["look"]
    assert well["detail"] < 0.5 * unknowing["detail"]


def test_least_squares_finds_the_layer():
    wanted, layer = nn.Linear(5, 3), nn.Linear(5, 4)
    before = layer.weight[3].clone()
    inputs = torch.randn(7, 20, 5)
    with torch.no_grad():
        meaning.least_squares(layer, slice(0, 3), inputs, wanted(inputs))
        torch.testing.assert_close(layer(inputs)[..., :3], wanted(inputs), atol=1e-3, rtol=1e-3)
        assert layer.weight[3].equal(before)
        through, layer = nn.Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False)
        meaning.least_squares(layer, slice(None), inputs, through(inputs))
        torch.testing.assert_close(layer.weight, through.weight, atol=1e-3, rtol=1e-3)


def test_a_scene_tells_colours_and_kind():
    plain, gradient = Background("plain", "red"), Background("gradient", "red", "blue")
    assert meaning.scene(plain)[:3].equal(meaning.scene(plain)[3:6])
    assert meaning.scene(gradient)[6:].tolist() == [1, 0]
    assert meaning.scene(Background("two-tone", "red", "blue"))[6:].tolist() == [0, 1]


def test_text_encoders_and_readers_that_know_nothing_learn_what_captions_look_like(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(meaning, "_read_well", lambda *_: None)
    told, shown = meaning.lessons(glyphs()), meaning.details(encoded())
    for model in (tiny("emoji-flux"), tiny("emoji-xl")):
        before = {name: value.clone() for name, value in model.named_parameters()}
        first, last = (
            meaning.teach(model, model.text_states, model.tellers, told, shown, steps) for steps in (1, 40)
        )
        assert last["look"] < 0.7 * first["look"]
        assert last["whole"] < 0.9 * first["whole"]
        assert last["detail"] < 0.9 * first["detail"]
        changed = {name for name, value in model.named_parameters() if not value.equal(before[name])}
        assert changed
        assert all(name.startswith("text_encoder") for name in changed)
