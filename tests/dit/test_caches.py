"""Together with diffusers' own caches: in both orders, off again in both orders, and both kinds of saving."""

import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    FluxImg2ImgPipeline,
    FluxPipeline,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import HookRegistry
from small_dits import CONFIG, EVERYONE, flux_inputs, make_flux, make_flux_pipeline, picture, prompt, run
from torch.utils.flop_counter import FlopCounterMode

import tomadiff

STEPS = 6
CACHES = {
    "first block": lambda: FirstBlockCacheConfig(threshold=0.6),
    "taylorseer": lambda: TaylorSeerCacheConfig(
        cache_interval=3, disable_cache_before_step=2, taylor_factors_dtype=torch.float32
    ),
    "taylorseer lite": lambda: TaylorSeerCacheConfig(
        cache_interval=3,
        disable_cache_before_step=2,
        taylor_factors_dtype=torch.float32,
        use_lite_mode=True,
    ),
    "mag": lambda: MagCacheConfig(
        mag_ratios=[1.0] * STEPS, num_inference_steps=STEPS, threshold=0.5, retention_ratio=0.2
    ),
    "pyramid": lambda: PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 2000),
        current_timestep_callback=lambda: 500,
    ),
}


@pytest.fixture(params=CACHES)
def cache(request):
    return CACHES[request.param]()


def generation(model, batch=1):
    """The outputs of all steps of one generation, and its FLOPs."""
    call = flux_inputs(batch=batch)
    outs = []
    with FlopCounterMode(display=False) as counter:
        for step in range(STEPS):
            with model.cache_context("cond"):
                outs.append(run(model, call | {"timestep": torch.full((batch,), 1 - step / STEPS)}))
    model._reset_stateful_cache()
    return torch.stack(outs), counter.get_total_flops()


def use(model, cache, config, cache_first):
    if cache_first:
        model.enable_cache(cache)
    tomadiff.apply(model, config=config)
    if not cache_first:
        model.enable_cache(cache)
    return model


def hooks_left(model):
    registries = [m._diffusers_hook for m in model.modules() if hasattr(m, "_diffusers_hook")]
    return [name for registry in registries for name in registry.hooks]


@pytest.mark.parametrize("cache_first", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mode", ["each", "once"])
def test_a_cache_sees_what_it_would_see_without_merging(cache, cache_first, batch, mode):
    """With every token its own destination the cached run equals the cached run of the plain model: what
    caches keep is at full resolution and in one order."""
    plain = make_flux()
    plain.enable_cache(cache)
    expected, _ = generation(plain, batch)
    model = use(make_flux(), cache, EVERYONE.replace(mode=mode), cache_first)
    outs, _ = generation(model, batch)
    torch.testing.assert_close(outs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cache_first", [True, False])
@pytest.mark.parametrize("remove_first", [True, False])
@pytest.mark.parametrize("mode", ["each", "once"])
def test_off_again_in_any_order_is_bit_identical(cache, cache_first, remove_first, mode):
    model = make_flux()
    expected, whole = generation(model)
    use(model, cache, CONFIG.replace(mode=mode), cache_first)
    outs, _ = generation(model)
    assert torch.isfinite(outs).all()
    if remove_first:
        tomadiff.remove(model)
        _, cached = generation(model)
        assert cached < whole
        model.disable_cache()
    else:
        model.disable_cache()
        _, merged = generation(model)
        assert merged < whole
        tomadiff.remove(model)
    assert hooks_left(model) == []
    again, flops = generation(model)
    assert torch.equal(again, expected)
    assert flops == whole


@pytest.mark.parametrize("cache_first", [True, False])
def test_both_save(cache, cache_first):
    model = make_flux(3, 3)
    _, whole = generation(model)
    model.enable_cache(cache)
    _, cached = generation(model)
    model.disable_cache()
    tomadiff.apply(model, config=CONFIG)
    _, merged = generation(model)
    tomadiff.remove(model)
    _, both = generation(use(model, cache, CONFIG, cache_first))
    assert both < min(cached, merged)
    assert max(cached, merged) < whole


def test_both_orders_are_the_same_model(cache):
    one, _ = generation(use(make_flux(), cache, CONFIG, True))
    other, _ = generation(use(make_flux(), cache, CONFIG, False))
    assert torch.equal(one, other)


def test_applied_again_with_a_cache_on(cache):
    model = use(make_flux(), cache, CONFIG, True)
    expected, _ = generation(model)
    tomadiff.apply(model, config=CONFIG.replace(ratio=0.25))
    generation(model)
    tomadiff.apply(model, config=CONFIG)
    again, _ = generation(model)
    assert torch.equal(again, expected)


def test_a_step_window_does_not_disturb_a_cache():
    """The order of tokens stays while merging rests, so that residuals of one step fit the next."""
    cache = CACHES["mag"]()
    plain = make_flux()
    plain.enable_cache(cache)
    expected, _ = generation(plain)
    outs, _ = generation(use(make_flux(), cache, EVERYONE.replace(start=0.4, end=0.8), True))
    torch.testing.assert_close(outs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pipeline", [FluxPipeline, FluxImg2ImgPipeline])
def test_11_merging_needs_no_cache_context(pipeline):
    """Whether a pipeline opens a context for caches or not is nothing to merging; a cache that can do without
    works along with it."""
    pipe = make_flux_pipeline(pipeline)
    call = {"height": 64, "width": 64, **prompt()}
    if pipeline is FluxImg2ImgPipeline:
        call |= {"image": torch.rand(1, 3, 64, 64), "strength": 1.0}
    plain = picture(pipe, **call)
    tomadiff.apply(pipe, config=CONFIG)
    merged = picture(pipe, **call)
    assert not torch.allclose(merged, plain, atol=1e-4)
    pipe.transformer.enable_cache(
        MagCacheConfig(mag_ratios=[1.0] * 3, num_inference_steps=3, threshold=0.5, retention_ratio=0.0)
    )
    assert torch.isfinite(picture(pipe, **call)).all()
    pipe.transformer.disable_cache()
    assert torch.equal(picture(pipe, **call), merged)
    assert torch.equal(picture(tomadiff.remove(pipe), **call), plain)


def test_registry_is_left_as_a_chain():
    """Hooks put inside of others come out again without taking those along."""
    model = make_flux()
    use(model, CACHES["first block"](), CONFIG, True)
    registry = HookRegistry.check_if_exists_or_initialize(model.transformer_blocks[0])
    assert [name.startswith("tomadiff_") for name in registry._hook_order] == [True, False]
    tomadiff.remove(model)
    assert len(registry._hook_order) == len(registry._fn_refs) == 1
