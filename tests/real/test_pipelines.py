"""Real pipelines, schedulers and everything users switch on beside them.

Numbers in names are those of the complaints in `tests/test_complaints_unet.py`.
"""

import threading

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    StableDiffusionXLImg2ImgPipeline,
)
from peft import LoraConfig

import tomadiff
from tomadiff import MergeConfig
from tomadiff.patching.apply import session_of

MERGE = MergeConfig(min_tokens=0)


def tokens(pipe):
    return [(row["tokens"], row["merged"]) for row in tomadiff.summary(pipe, show=False)["blocks"]]


def test_11_every_pipeline_runs_and_ratio_0_and_removal_are_bit_identical(pipeline, generate, name):
    pipe = pipeline(name)
    original = generate(pipe, name)
    tomadiff.apply(pipe, 0.0)
    assert torch.equal(generate(pipe, name), original)
    tomadiff.apply(pipe, config=MERGE)
    merged = generate(pipe, name)
    assert not torch.equal(merged, original)
    assert torch.equal(generate(pipe, name), merged)  # same seed, same picture
    tomadiff.remove(pipe)
    assert torch.equal(generate(pipe, name), original)


def test_every_attention_level_merges_by_default(pipeline, generate):
    pipe = pipeline("sdxl")
    tomadiff.apply(pipe, 0.5)
    generate(pipe, "sdxl", size=(128, 128))
    assert set(tokens(pipe)) == {(1024, 512), (256, 128)}
    pipe = pipeline("sd")
    tomadiff.apply(pipe, 0.5)
    generate(pipe, "sd", size=(64, 64))
    assert set(tokens(pipe)) == {(1024, 512), (256, 128), (64, 32)}


@pytest.mark.parametrize("size", [(32, 32), (72, 128), (40, 88), (8, 8), (8, 72)])
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_sizes(pipeline, generate, family, size):
    """Square, 1080 x 1920 in small, odd and tiny."""
    pipe = pipeline(family)
    original = generate(pipe, family, size=size)
    tomadiff.apply(pipe, config=MERGE)
    merged = generate(pipe, family, size=size)
    assert merged.shape == original.shape
    assert torch.isfinite(merged).all()
    assert all(0 < after <= before for before, after in tokens(pipe))


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_batches_and_guidance(pipeline, generate, batch, guidance):
    pipe = pipeline("sdxl")
    tomadiff.apply(pipe, config=MERGE)
    merged = generate(pipe, "sdxl", batch=batch, guidance=guidance)
    assert merged.shape[0] == batch
    assert torch.isfinite(merged).all()
    assert torch.equal(generate(pipe, "sdxl", batch=batch, guidance=guidance), merged)


def test_two_sizes_in_a_row(pipeline, generate):
    pipe = pipeline("sdxl")
    tomadiff.apply(pipe, config=MERGE)
    first, second = generate(pipe, "sdxl", size=(32, 48)), generate(pipe, "sdxl", size=(48, 32))
    tomadiff.apply(pipe, config=MERGE)
    assert torch.equal(generate(pipe, "sdxl", size=(48, 32)), second)
    assert torch.equal(generate(pipe, "sdxl", size=(32, 48)), first)


def test_two_pipelines_in_two_threads(pipeline, generate):
    pipes = [pipeline("sdxl"), pipeline("sdxl")]
    for pipe, ratio in zip(pipes, (0.25, 0.75), strict=True):
        tomadiff.apply(pipe, config=MERGE.replace(ratio=ratio))
    alone = [generate(pipe, "sdxl") for pipe in pipes]
    together = {}
    threads = [
        threading.Thread(target=lambda i=i: together.update({i: generate(pipes[i], "sdxl")}))
        for i in range(2)
    ]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
    assert all(torch.equal(together[i], alone[i]) for i in range(2))


def test_two_pipelines_that_share_a_unet_in_two_threads(pipeline, generate):
    pipe = pipeline("sdxl")
    other = StableDiffusionXLImg2ImgPipeline.from_pipe(pipe)
    other.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    other.set_progress_bar_config(disable=True)
    tomadiff.apply(pipe, config=MERGE)
    together, errors = {}, []

    def run(p, name):
        try:
            together[name] = generate(p, name, steps=6)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=job) for job in ((pipe, "sdxl"), (other, "sdxl-img2img"))]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
    assert errors == []
    assert all(torch.isfinite(image).all() for image in together.values())


def test_a_call_that_raises_midway_and_then_a_good_one(pipeline, generate):
    pipe = pipeline("sdxl")
    tomadiff.apply(pipe, config=MERGE)
    good = generate(pipe, "sdxl")

    def stop(pipe, step, timestep, tensors):
        if step == 1:
            raise KeyboardInterrupt
        return tensors

    with pytest.raises(KeyboardInterrupt):
        generate(pipe, "sdxl", seed=9, callback_on_step_end=stop)
    assert torch.equal(generate(pipe, "sdxl"), good)


def test_19_lora_before_and_after(pipeline, generate):
    def lora(pipe):
        torch.manual_seed(3)
        pipe.unet.add_adapter(
            LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False),
            adapter_name="style",
        )

    before, after, plain = pipeline("sdxl"), pipeline("sdxl"), pipeline("sdxl")
    lora(before)
    tomadiff.apply(before, config=MERGE)
    tomadiff.apply(after, config=MERGE)
    lora(after)
    tomadiff.apply(plain, config=MERGE)
    image = generate(before, "sdxl")
    assert torch.equal(generate(after, "sdxl"), image)
    assert not torch.equal(generate(plain, "sdxl"), image)
    after.unet.delete_adapters("style")
    assert torch.allclose(generate(after, "sdxl"), generate(plain, "sdxl"), atol=1e-5)


@pytest.mark.parametrize(
    "switch",
    [
        lambda pipe: pipe.enable_attention_slicing(1),
        lambda pipe: pipe.vae.enable_tiling(),
        lambda pipe: pipe.vae.enable_slicing(),
        lambda pipe: pipe.enable_freeu(0.9, 0.8, 1.1, 1.2),
        lambda pipe: pipe.unet.set_default_attn_processor(),
        lambda pipe: pipe.unet.fuse_qkv_projections(),
    ],
    ids=["slicing", "vae tiling", "vae slicing", "freeu", "attention processor", "fused projections"],
)
def test_other_switches_before_and_after(pipeline, generate, switch):
    before, after, plain = pipeline("sdxl"), pipeline("sdxl"), pipeline("sdxl")
    switch(before)
    tomadiff.apply(before, config=MERGE)
    tomadiff.apply(after, config=MERGE)
    switch(after)
    switch(plain)
    image = generate(before, "sdxl")
    assert torch.allclose(generate(after, "sdxl"), image, atol=1e-5)
    original = generate(plain, "sdxl")
    assert not torch.allclose(original, image, atol=1e-5)
    tomadiff.remove(before)
    assert torch.equal(generate(before, "sdxl"), original)


def test_model_cpu_offload(pipeline, generate):
    """The real offload hooks of accelerate; the accelerator they move to is this machine's CPU."""
    from accelerate import cpu_offload_with_hook

    pipe, plain = pipeline("sdxl"), pipeline("sdxl")
    tomadiff.apply(plain, config=MERGE)
    _, hook = cpu_offload_with_hook(pipe.unet, "cpu")
    tomadiff.apply(pipe, config=MERGE)
    image = generate(pipe, "sdxl")
    assert torch.equal(image, generate(plain, "sdxl"))
    hook.offload()
    assert torch.equal(generate(pipe, "sdxl"), image)
    tomadiff.remove(pipe)
    tomadiff.remove(plain)
    assert torch.equal(generate(pipe, "sdxl"), generate(plain, "sdxl"))


@pytest.mark.parametrize(
    "scheduler", [HeunDiscreteScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler]
)
def test_19_ancestral_and_other_samplers(pipeline, generate, scheduler):
    pipe = pipeline("sdxl")
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    tomadiff.apply(pipe, config=MERGE)
    image = generate(pipe, "sdxl", steps=5)
    assert torch.isfinite(image).all()
    assert torch.equal(generate(pipe, "sdxl", steps=5), image)


def test_09_controlnet_works_and_merges_too_if_asked(pipeline, generate):
    pipe = pipeline("sdxl-controlnet")
    original = generate(pipe, "sdxl-controlnet")
    tomadiff.apply(pipe, config=MERGE)
    main = generate(pipe, "sdxl-controlnet")
    assert session_of(pipe.controlnet) is None
    tomadiff.apply(pipe.controlnet, config=MERGE)
    both = generate(pipe, "sdxl-controlnet")
    assert all(after < before for before, after in tokens(pipe.controlnet))
    assert not torch.equal(both, main)
    tomadiff.remove(pipe)
    tomadiff.remove(pipe.controlnet)
    assert torch.equal(generate(pipe, "sdxl-controlnet"), original)


def test_random_numbers_are_left_alone(pipeline, generate):
    pipe = pipeline("sdxl")
    generate(pipe, "sdxl")
    before = torch.random.get_rng_state()
    tomadiff.apply(pipe, config=MERGE)
    generate(pipe, "sdxl")
    tomadiff.remove(pipe)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_reuse_over_a_whole_generation(pipeline, generate):
    """50 steps of the real pipeline on the schedule of the paper."""
    pipe = pipeline("sdxl")
    tomadiff.apply(pipe, config=tomadiff.preset("paper-tile"))
    generate(pipe, "sdxl", size=(32, 32), steps=50)
    for row in tomadiff.summary(pipe, show=False)["blocks"]:
        assert (row["selected"], row["weighed"], row["reused"]) == (5, 10, 40)


def test_saved_and_loaded_from_a_folder(pipeline, generate, tmp_path):
    pipe = pipeline("sdxl")
    original = generate(pipe, "sdxl")
    tomadiff.apply(pipe, config=MERGE)
    merged = generate(pipe, "sdxl")
    pipe.unet.save_pretrained(tmp_path)
    loaded = type(pipe.unet).from_pretrained(tmp_path).eval()
    assert session_of(loaded) is None
    pipe.unet = loaded
    assert torch.equal(generate(pipe, "sdxl"), original)
    tomadiff.apply(pipe, config=MERGE)
    assert torch.equal(generate(pipe, "sdxl"), merged)
