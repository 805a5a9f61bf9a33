"""The embedded models themselves: they load as anyone's would, and draw what they are asked for."""

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, StableDiffusionXLPipeline
from safetensors import safe_open

import tomadiff
from tomadiff.demo import CALL, available, check, load, models
from tomadiff.demo.captions import caption, held_out_sample, subjects
from tomadiff.demo.train import vocabulary

KINDS = {"emoji-flux": FluxPipeline, "emoji-xl": StableDiffusionXLPipeline}


@pytest.fixture(scope="module", params=available())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pipe(name: str) -> DiffusionPipeline:
    return load(name)


def test_both_are_here():
    assert set(available()) == set(CALL)


def test_weights_are_small_and_in_float16(name: str):
    folder = models.WEIGHTS / name
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 40e6
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as weights:
            assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.float16}  # noqa: SIM118


def test_no_path_of_the_machine_it_was_trained_on_is_left(name: str):
    for path in (models.WEIGHTS / name).rglob("*.json"):
        assert "_name_or_path" not in path.read_text()


def test_it_is_an_ordinary_pipeline_in_float32(name: str, pipe: DiffusionPipeline):
    assert isinstance(pipe, KINDS[name])
    modules = [module for module in pipe.components.values() if isinstance(module, torch.nn.Module)]
    assert {value.dtype for module in modules for value in module.parameters()} == {torch.float32}
    plain = DiffusionPipeline.from_pretrained(models.WEIGHTS / name)
    assert type(plain) is type(pipe)


def test_plain_tokenizer_knows_every_caption(name: str, pipe: DiffusionPipeline):
    texts = [caption(subjects()[point], background) for point, background in held_out_sample(50)]
    settings = {"padding": "max_length", "max_length": vocabulary.MAX_TOKENS, "return_tensors": "pt"}
    plain = pipe.tokenizer if name == "emoji-flux" else pipe.tokenizer_2
    assert plain(texts, **settings).input_ids.equal(vocabulary.encode(texts))


def test_other_tokenizer_spells_out_the_parts_of_the_picture(name: str, pipe: DiffusionPipeline):
    texts = ["tiger on a red background", "corn"]
    settings = {"padding": "max_length", "max_length": vocabulary.MAX_TOKENS, "return_tensors": "pt"}
    scene_first = name == "emoji-xl"
    spelling = pipe.tokenizer if scene_first else pipe.tokenizer_2
    tokens = spelling(texts, **settings).input_ids
    assert tokens.equal(vocabulary.with_parts(vocabulary.encode(texts), scene_first))
    first = vocabulary.SCENE * scene_first
    assert len(set(tokens[0, first : first + vocabulary.PARTS].tolist())) == vocabulary.PARTS


def test_at_256_pixels_there_are_1024_tokens_to_merge(name: str, pipe: DiffusionPipeline):
    with tomadiff.merged(pipe, 0.5):
        pipe("tiger on a red background", **CALL[name] | {"num_inference_steps": 1})
        rows = tomadiff.summary(pipe, show=False)["blocks"]
    assert max(row["tokens"] for row in rows) == 1024
    assert min(row["merged"] for row in rows if row["tokens"] == 1024) <= 512


def test_it_draws_what_it_is_asked_for(name: str, pipe: DiffusionPipeline):
    """A small form of `python -m tomadiff.demo.check`."""
    asked, names = held_out_sample(8), subjects()
    prompts = [caption(names[point], background) for point, background in asked]
    options = CALL[name] | {"num_inference_steps": 12}
    pictures = torch.cat(list(models.draw(pipe, prompts, range(8), batch=4, **options)))
    assert {background.kind for _, background in asked} == {"plain", "gradient", "two-tone"}
    score = check.score(check.look(pictures, asked), asked)
    assert min(score.subject, score.background) >= 7 / 8


def test_a_picture_depends_on_its_own_seed_alone(name: str, pipe: DiffusionPipeline):
    prompts = ["tiger on a red background", "peach on a blue background"]
    options = CALL[name] | {"num_inference_steps": 2}
    together = torch.cat(list(models.draw(pipe, prompts, [3, 4], batch=2, **options)))
    alone = torch.cat(list(models.draw(pipe, prompts, [3, 4], batch=1, **options)))
    assert torch.allclose(together, alone, atol=1e-3)


def test_unknown_and_missing_models_say_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(ValueError, match="emoji-flux"):
        load("emoji-fluxx")
    monkeypatch.setattr(models, "WEIGHTS", tmp_path)
    assert available() == ()
    with pytest.raises(FileNotFoundError, match="there are no weights of emoji-"):
        load("emoji-flux")
