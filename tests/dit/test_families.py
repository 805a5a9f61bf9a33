"""What holds for every transformer family, on small random models."""

import copy
import gc
import weakref

import pytest
import torch
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from peft import LoraConfig
from small_dits import CONFIG, EVERYONE, make_flux, make_sd3, run

import tomadiff
from tomadiff.patching.apply import session_of


def rows(model):
    return tomadiff.summary(model, show=False)["blocks"]


def test_ratio_zero_and_removal_are_bit_identical(family):
    model, inputs = family
    expected = run(model, inputs())
    tomadiff.apply(model, 0.0)
    assert torch.equal(run(model, inputs()), expected)
    tomadiff.apply(model, config=CONFIG)
    assert not torch.allclose(run(model, inputs()), expected, atol=1e-3)
    tomadiff.remove(model)
    assert torch.equal(run(model, inputs()), expected)


@pytest.mark.parametrize("mode", ["each", "once"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("merge_region", ["tile", "global"])
def test_every_token_its_own_destination_changes_nothing(family, mode, batch, merge_region):
    """Through the real path: tokens are reordered, merged, rotated where their destinations are, unmerged."""
    model, inputs = family
    expected = run(model, inputs(batch=batch))
    tomadiff.apply(model, config=EVERYONE.replace(mode=mode, merge_region=merge_region))
    torch.testing.assert_close(run(model, inputs(batch=batch)), expected, atol=1e-4, rtol=1e-4)
    assert [count.selected for count in session_of(model).counts.values()] in ([1], [1, 1])


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 13), (16, 9), (9, 16), (20, 20)])
@pytest.mark.parametrize("batch", [1, 3])
def test_any_size_and_batch(family, size, batch):
    model, inputs = family
    expected = run(model, inputs(size, batch))
    tomadiff.apply(model, config=CONFIG)
    out = run(model, inputs(size, batch))
    assert out.shape == expected.shape
    assert torch.isfinite(out).all()
    tokens = size[0] * size[1]
    assert all(row["tokens"] == tokens and row["merged"] <= max(1, 0.7 * tokens) for row in rows(model))


def test_by_default_norms_see_merged_tokens(main_family):
    model, inputs = main_family
    tomadiff.apply(model, 0.5)
    seen = []
    norm = model.transformer_blocks[-1].norm1
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    run(model, inputs((16, 16)))
    assert seen == [128]


@pytest.mark.parametrize("text", [1, 3, 77, 154, 512])
def test_any_text_length(main_family, text):
    model, inputs = main_family
    expected = run(model, inputs(text=text))
    tomadiff.apply(model, config=EVERYONE)
    torch.testing.assert_close(run(model, inputs(text=text)), expected, atol=1e-4, rtol=1e-4)


def test_elements_of_a_batch_do_not_see_each_other(main_family):
    model, inputs = main_family
    tomadiff.apply(model, config=CONFIG)
    together = inputs(batch=3)
    out = run(model, together)
    for index in range(3):
        alone = {
            name: value[index : index + 1] if value.shape[0] == 3 and name != "img_ids" else value
            for name, value in together.items()
        }
        torch.testing.assert_close(run(model, alone), out[index : index + 1], atol=1e-4, rtol=1e-4)


def test_shapes_in_turn_leave_nothing_behind(main_family):
    model, inputs = main_family
    tomadiff.apply(model, config=CONFIG.replace(select_every=10, weights_every=10))
    first = run(model, inputs())
    run(model, inputs((12, 8), batch=2))
    run(model, inputs((5, 5), text=3))
    assert torch.equal(run(model, inputs()), first)


def test_plans_are_made_once_per_kind_and_step(main_family):
    model, inputs = main_family
    tomadiff.apply(model, config=CONFIG.replace(select_every=4, weights_every=2))
    call = inputs()
    whole = float(call["timestep"].max())
    for step in range(4):
        run(model, call | {"timestep": torch.full((1,), whole * (1 - step / 4))})
    for count in session_of(model).counts.values():
        assert (count.selected, count.weighed, count.reused) == (1, 2, 2)


def test_a_step_window_rests_outside_of_it(main_family):
    model, inputs = main_family
    call = inputs()
    early = call | {"timestep": call["timestep"] * 1.9}
    expected = run(model, early)
    tomadiff.apply(model, config=CONFIG.replace(start=0.3))
    torch.testing.assert_close(run(model, early), expected, atol=1e-5, rtol=1e-5)
    assert {row["note"] for row in rows(model)} == {"resting at this step"}
    run(model, call)
    assert {row["note"] for row in rows(model)} == {""}


def test_by_default_the_last_third_of_the_noise_is_left_alone(main_family):
    model, inputs = main_family
    call = inputs((16, 16))
    late = call | {"timestep": call["timestep"] * 0.6}
    expected = run(model, late)
    tomadiff.apply(model, 0.5)
    run(model, call)
    assert min(row["merged"] for row in rows(model)) == 128
    torch.testing.assert_close(run(model, late), expected, atol=1e-5, rtol=1e-5)
    assert {row["note"] for row in rows(model)} == {"left alone", "resting at this step"}


def test_what_merges_follows_the_configuration(main_family):
    model, inputs = main_family
    tomadiff.apply(model, config=CONFIG.replace(skip_first=1))
    run(model, inputs())
    notes = {row["block"]: row["note"] for row in rows(model)}
    assert {name for name, note in notes.items() if note == "left alone"} == {
        name for name in notes if name.endswith(".0")
    }
    tomadiff.apply(model, config=CONFIG.replace(overrides={"*transformer_blocks.1*": 0.25}))
    run(model, inputs())
    merged = {row["block"]: row["merged"] for row in rows(model)}
    assert merged["transformer_blocks.0"] == 48
    assert merged["transformer_blocks.1"] == 72


def test_defaults_follow_the_paper(main_family):
    model, _ = main_family
    config = tomadiff.MergeConfig.from_json(tomadiff.summary(tomadiff_default(model), show=False)["config"])
    assert config.select_every == config.weights_every == 1
    assert config.share != "block"
    assert config.skip_first > 0


def tomadiff_default(model):
    make = make_flux if hasattr(model, "single_transformer_blocks") else make_sd3
    return tomadiff.apply(make(4, 4) if make is make_flux else make(layers=5))


def test_gradients_flow(main_family):
    model, inputs = main_family
    tomadiff.apply(model, config=CONFIG)
    call = inputs()
    call["hidden_states"].requires_grad_()
    model(**call).sample.square().mean().backward()
    assert call["hidden_states"].grad.abs().sum() > 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_gradient_checkpointing_gives_the_same_gradients(main_family):
    model, inputs = main_family
    tomadiff.apply(model, config=CONFIG)
    name, weight = next((n, p) for n, p in model.named_parameters() if n.endswith("attn.to_q.weight"))
    model(**inputs()).sample.square().mean().backward()
    expected = weight.grad.clone()
    model.zero_grad()
    model.enable_gradient_checkpointing()
    model.train()
    model(**inputs()).sample.square().mean().backward()
    torch.testing.assert_close(weight.grad, expected, msg=name)


def lora(model):
    config = LoraConfig(
        r=2,
        init_lora_weights=False,
        target_modules=["to_q", "to_k", "to_v", "to_out.0", "proj_out", "proj_mlp", "net.2"],
    )
    torch.manual_seed(2)
    model.add_adapter(config)


@pytest.mark.parametrize("mode", ["each", "once"])
@pytest.mark.parametrize("lora_first", [True, False])
def test_lora_before_or_after_apply(main_family, lora_first, mode):
    """A LoRA takes the place of modules that carry hooks."""
    model, inputs = main_family
    bare = run(model, inputs())
    plain = copy.deepcopy(model)
    lora(plain)
    expected = run(plain, inputs())
    config = EVERYONE.replace(mode=mode)
    if lora_first:
        lora(model)
        tomadiff.apply(model, config=config)
    else:
        tomadiff.apply(model, config=config)
        run(model, inputs())
        lora(model)
    torch.testing.assert_close(run(model, inputs()), expected, atol=1e-4, rtol=1e-4)
    model.delete_adapters("default")
    torch.testing.assert_close(run(model, inputs()), bare, atol=1e-4, rtol=1e-4)
    tomadiff.remove(model)
    assert torch.equal(run(model, inputs()), bare)


def test_lora_gives_the_same_whichever_came_first(main_family):
    model, inputs = main_family
    other = copy.deepcopy(model)
    lora(other)
    tomadiff.apply(other, config=CONFIG)
    tomadiff.apply(model, config=CONFIG)
    run(model, inputs())
    lora(model)
    torch.testing.assert_close(run(model, inputs()), run(other, inputs()), atol=1e-6, rtol=1e-6)


def test_lora_removed_after_merging_was_removed(main_family):
    model, inputs = main_family
    expected = run(model, inputs())
    tomadiff.apply(model, config=CONFIG)
    lora(model)
    tomadiff.remove(model)
    model.delete_adapters("default")
    assert torch.equal(run(model, inputs()), expected)


@pytest.mark.parametrize("offload_first", [True, False])
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offloading(main_family, offload_first, kind):
    model, inputs = main_family
    more = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    expected = run(tomadiff.apply(model, config=CONFIG), inputs())
    tomadiff.remove(model)

    def offload():
        cpu = torch.device("cpu")
        apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type=kind, **more)

    if offload_first:
        offload()
    tomadiff.apply(model, config=CONFIG)
    if not offload_first:
        offload()
    torch.testing.assert_close(run(model, inputs()), expected)


@pytest.mark.parametrize("casting_first", [True, False])
def test_layerwise_casting(main_family, casting_first):
    """Weights kept in a smaller type and cast for every call of a layer."""
    model, inputs = main_family
    types = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.float32}
    if casting_first:
        apply_layerwise_casting(model, **types)
        expected = run(model, inputs())
        tomadiff.apply(model, config=EVERYONE)
    else:
        tomadiff.apply(model, config=EVERYONE)
        run(model, inputs())
        apply_layerwise_casting(model, **types)
        tomadiff.remove(model)
        expected = run(model, inputs())
        tomadiff.apply(model, config=EVERYONE)
    torch.testing.assert_close(run(model, inputs()), expected, atol=1e-4, rtol=1e-4)
    tomadiff.remove(model)
    assert torch.equal(run(model, inputs()), expected)


def test_training_after_generating_in_inference_mode(main_family):
    model, inputs = main_family
    tomadiff.apply(model, config=CONFIG)
    call = inputs()
    with torch.inference_mode():
        model(**call)
    model(**call | {"timestep": call["timestep"] * 0.9}).sample.square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_nothing_of_a_generation_outlives_it(main_family):
    model, inputs = main_family
    tomadiff.apply(model, config=CONFIG)
    call = inputs()
    run(model, call)
    text = weakref.ref(call["encoder_hidden_states"])
    session = session_of(model)
    assert session.clock.current.plans
    del call
    gc.collect()
    assert text() is None
    assert not session.clock.current.plans
    assert not session.scratch


def test_an_error_inside_the_model_leaves_it_usable(main_family):
    model, inputs = main_family
    expected = run(tomadiff.apply(model, config=CONFIG), inputs())
    broken = inputs()
    broken["pooled_projections"] = broken["pooled_projections"][:, :3]
    with pytest.raises(RuntimeError):
        run(model, broken)
    assert torch.equal(run(model, inputs()), expected)
