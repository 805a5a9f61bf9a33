import re

import pytest

from tomadiff.demo.captions import (
    COLOURS,
    Background,
    backgrounds,
    caption,
    held_out_pairs,
    held_out_sample,
    is_held_out,
    pairs,
    subjects,
)
from tomadiff.demo.train import vocabulary


def test_subjects_are_the_237_named_ones():
    names = subjects()
    assert len(names) == len(set(names.values())) == 237
    assert names[0x1F42F] == "tiger face"


def test_captions_name_subject_and_background():
    assert caption("tiger", Background("plain", "blue")) == "tiger on a blue background"
    assert caption("tiger", Background("plain", "orange")) == "tiger on an orange background"
    gradient = Background("gradient", "red", "yellow")
    assert caption("tiger", gradient) == "tiger on a red to yellow gradient background"
    assert caption("tiger", Background("two-tone", "green", "white")).endswith("a green and white background")


def test_backgrounds_are_all_different():
    texts = [background.text for background in backgrounds()]
    assert len(COLOURS) == 10
    assert len(texts) == len(set(texts)) == 10 + 90 + 90


def test_held_out_pairs_are_disjoint_from_training_and_together_complete():
    held_out, trained = set(held_out_pairs()), set(pairs(held_out=False))
    assert not held_out & trained
    assert len(held_out | trained) == 237 * 190
    assert 0.09 < len(held_out) / (237 * 190) < 0.11


def test_held_out_split_never_changes():
    """Weights were trained on one side of this split: another one would make every held-out result false."""
    answers = [is_held_out(name, Background("plain", "red")) for name in subjects().values()]
    assert [index for index, answer in enumerate(answers) if answer][:6] == [10, 28, 29, 35, 36, 46]


def test_every_half_of_a_held_out_pair_is_trained_on():
    trained = pairs(held_out=False, kind="plain")
    assert {point for point, _ in trained} == set(subjects())
    assert {background.first for _, background in trained} == set(COLOURS)


def test_samples_are_held_out_and_their_two_halves_share_nothing():
    reported, tuned = held_out_sample(200), held_out_sample(200, 1)
    assert len(set(reported)) == len(set(tuned)) == 200
    assert set(reported) | set(tuned) <= set(held_out_pairs())
    assert not set(reported) & set(tuned)
    assert sum(background.kind == "plain" for _, background in reported) == 100
    assert len(held_out_sample(7)) == 7
    with pytest.raises(ValueError, match="there are"):
        held_out_sample(500)


def test_every_caption_is_made_of_known_words_and_fits():
    texts = [caption(name, background) for name in subjects().values() for background in backgrounds()[::13]]
    tokens = vocabulary.encode(texts)
    assert tokens.shape == (len(texts), vocabulary.MAX_TOKENS)
    assert not (tokens == vocabulary.UNKNOWN).any()
    assert (tokens == vocabulary.END).sum(dim=1).eq(1).all()


def test_case_and_full_stops_do_not_matter():
    told, written = vocabulary.encode(["tiger on a red background", "Tiger on a Red background."])
    assert told.equal(written)
    assert (vocabulary.encode(["submarine"]) == vocabulary.UNKNOWN).any()
    assert all(re.fullmatch(r"\w+|-", word) for word in vocabulary.words())


def spelled_out(text: str) -> tuple[str, list[str]]:
    """The subject whose words for parts T5's tokenizer puts before a text, and what follows them."""
    tokenizer = vocabulary.build_with_parts()
    words = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    parts = words[: vocabulary.PARTS]
    stem = parts[0].removesuffix("_00")
    assert parts == [f"{stem}_{part:02d}" for part in range(vocabulary.PARTS)]
    return stem, words[vocabulary.PARTS :]


@pytest.mark.parametrize(
    ("text", "stem"),
    [
        ("tiger on a red background", "tiger"),
        ("A Tiger face on a red background.", "tiger_face"),
        ("the t-rex in the snow", "t_rex"),
        ("fork and knife with plate", "fork_and_knife_with_plate"),
        ("tigers", "part"),
        ("some tiger", "part"),
    ],
)
def test_a_caption_begins_with_words_for_the_parts_of_its_subject(text: str, stem: str):
    assert spelled_out(text)[0] == stem


def test_of_two_colours_it_says_where_each_lies():
    words = "start_ tiger on a red_above to white_below gradient background <end>"
    assert spelled_out("tiger on a red to white gradient background")[1] == words.split()
    words = "start_ tiger on an orange_left and gray_right background <end>"
    assert spelled_out("tiger on an orange and gray background")[1] == words.split()
    assert "red" in spelled_out("tiger on a red background")[1]


@pytest.mark.parametrize(
    ("text", "scene"),
    [
        ("tiger on a red background", "red red"),
        ("A tiger on a red to white gradient background.", "red_above white_below"),
        ("tiger on an orange and gray background", "orange_left gray_right"),
        ("red tiger in the snow", "start_ start_"),
    ],
)
def test_the_background_may_come_before_the_parts(text: str, scene: str):
    tokenizer = vocabulary.build_with_parts(scene_first=True)
    words = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    assert words[: vocabulary.SCENE] == scene.split()
    rest = vocabulary.build_with_parts()
    assert words[vocabulary.SCENE :] == rest.convert_ids_to_tokens(rest(text).input_ids)


@pytest.mark.parametrize("scene_first", [False, True])
def test_spelled_captions_are_known_and_fit_and_those_of_tokens_are_the_same(scene_first: bool):
    texts = [caption(name, background) for name in subjects().values() for background in backgrounds()[::13]]
    tokens = vocabulary.with_parts(vocabulary.encode(texts), scene_first)
    assert not (tokens == vocabulary.UNKNOWN).any()
    assert (tokens == vocabulary.END).sum(dim=1).eq(1).all()
    assert tokens[:, vocabulary.SCENE * scene_first].unique().numel() == len(subjects())
    settings = {"padding": "max_length", "max_length": vocabulary.MAX_TOKENS, "return_tensors": "pt"}
    assert tokens.equal(vocabulary.build_with_parts(scene_first)(texts, **settings).input_ids)
    empty = vocabulary.with_parts(vocabulary.encode([""]), scene_first)[0]
    assert empty[0] == vocabulary.END
    assert (empty[1:] == vocabulary.PAD).all()
