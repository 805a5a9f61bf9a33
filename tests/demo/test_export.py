import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, StableDiffusionXLPipeline
from safetensors import safe_open
from small_models import tiny

from tomadiff.demo import CALL
from tomadiff.demo.train import autoencoder, export


@pytest.mark.parametrize(
    ("name", "kind"), [("emoji-flux", FluxPipeline), ("emoji-xl", StableDiffusionXLPipeline)]
)
def test_exported_folder_is_a_plain_pipeline(name: str, kind: type[DiffusionPipeline], tmp_path: Path):
    size = export.export(tiny(name), autoencoder.build((8, 8, 8), groups=4), tmp_path)
    assert 0.1 < size < 40
    for path in tmp_path.rglob("*.safetensors"):
        with safe_open(path, "pt") as weights:
            assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.float16}  # noqa: SIM118
    assert "tomadiff" not in json.dumps(json.loads((tmp_path / "model_index.json").read_text()))

    pipeline = DiffusionPipeline.from_pretrained(tmp_path)
    assert isinstance(pipeline, kind)
    modules = [module for module in pipeline.components.values() if isinstance(module, torch.nn.Module)]
    assert {value.dtype for module in modules for value in module.parameters()} == {torch.float32}

    options = CALL[name] | {"height": 64, "width": 64, "num_inference_steps": 2}
    assert pipeline("tiger on a red background", **options).images[0].size == (64, 64)


def test_flux_runs_with_the_padding_of_its_defaults(tmp_path: Path):
    export.export(tiny("emoji-flux"), autoencoder.build((8, 8, 8), groups=4), tmp_path)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path)
    options = {"height": 64, "width": 64, "num_inference_steps": 1}
    assert pipeline("tiger on a red background", **options).images[0].size == (64, 64)


@pytest.mark.parametrize("name", ["emoji-flux", "emoji-xl"])
def test_own_sampler_and_pipeline_draw_the_same(name: str):
    """Sheets drawn during training show what the pipeline will draw; at 256 both see the same positions."""
    model, vae = tiny(name).eval(), autoencoder.build((8, 8, 8), groups=4).eval()
    prompt = "tiger on a red background"
    own = model.sample([prompt], 64, 2, torch.Generator().manual_seed(0))
    noise = torch.randn(
        own.shape if name == "emoji-xl" else (1, 1024, 32), generator=torch.Generator().manual_seed(0)
    )
    pipeline = model.pipeline(vae)
    pipeline.set_progress_bar_config(disable=True)
    settings = CALL[name] | {"num_inference_steps": 2, "output_type": "latent"}
    drawn = pipeline(prompt, latents=noise, **settings).images
    if name == "emoji-flux":
        drawn = FluxPipeline._unpack_latents(drawn, 256, 256, 4)
    assert torch.allclose(drawn, own, atol=1e-3)
