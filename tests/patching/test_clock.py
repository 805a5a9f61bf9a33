import gc

import pytest
import torch

from tomadiff.patching.clock import Call, Clock, Pass


def call(timestep, conditioning, form=("64x64",)):
    return Call(timestep, form, conditioning)


@pytest.fixture
def text():
    return torch.zeros(1)


def test_falling_timesteps_are_one_generation(text):
    clock = Clock()
    passes = [clock.enter(call(t, text)) for t in (900, 800, 700)]
    assert passes[0] is passes[1] is passes[2]


def test_a_timestep_that_rises_is_a_new_generation(text):
    clock = Clock()
    first = clock.enter(call(500, text))
    assert clock.enter(call(900, text)) is not first


def test_the_same_timestep_again_is_another_pass_with_its_own_plans(text):
    """Tiles of a panorama, or the second half of a second-order step."""
    clock = Clock()
    a1, b1 = clock.enter(call(900, text)), clock.enter(call(900, text))
    a2, b2 = clock.enter(call(800, text)), clock.enter(call(800, text))
    assert a1 is a2
    assert b1 is b2
    assert a1 is not b1


def test_conditional_and_unconditional_calls_keep_apart(text):
    clock, other = Clock(), torch.zeros(1)
    yes, no = clock.enter(call(900, text)), clock.enter(call(900, other))
    assert yes is not no
    assert clock.enter(call(800, text)) is yes
    assert clock.enter(call(800, other)) is no


@pytest.mark.parametrize("form", [("64x32",), ("64x64", "float16")])
def test_another_form_is_never_served_with_an_old_plan(text, form):
    clock = Clock()
    first = clock.enter(call(900, text))
    assert clock.enter(call(800, text, form)) is not first


def test_an_interrupted_generation_leaves_nothing_for_the_next(text):
    """The next one may start at the very timestep where the first one stopped, or below it (image to
    image)."""
    clock = Clock()
    first = clock.enter(call(900, text))
    for start in (900, 300):
        assert clock.enter(call(start, torch.zeros(1))) is not first


def test_a_model_without_conditioning():
    clock = Clock()
    first = clock.enter(call(900, None))
    assert clock.enter(call(800, None)) is first
    assert clock.enter(call(900, None)) is not first


def test_plans_go_when_the_conditioning_goes():
    clock, text = Clock(), torch.zeros(1)
    kept = clock.enter(call(900, text))
    kept.plans["group"] = object()
    assert clock.current is kept
    del text
    gc.collect()
    assert clock.current is not kept
    assert clock._generations == []


def test_finished_generations_are_forgotten_when_a_new_one_begins():
    clock = Clock()
    prompts = [torch.zeros(1) for _ in range(5)]  # all kept alive by the caller
    for text in prompts:
        for t in (900, 500, 100):
            clock.enter(call(t, text))
    assert len(clock._generations) == 1


def test_reset_forgets_all(text):
    clock = Clock()
    first = clock.enter(call(900, text))
    clock.reset()
    assert clock.enter(call(800, text)) is not first


def test_schedule():
    one = Pass()
    due = []
    for _ in range(12):
        one.advance(0.5, select_every=6, weights_every=3)
        due.append(one.due)
    assert due == (["select", "reuse", "reuse", "weights", "reuse", "reuse"]) * 2


def test_a_new_ratio_is_planned_at_once_and_rest_drops_the_plans():
    one = Pass()
    one.advance(0.5, 10, 5)
    one.plans["group"] = object()
    one.advance(0.5, 10, 5)
    assert one.due == "reuse"
    one.advance(0.75, 10, 5)
    assert (one.due, one.plans) == ("select", {})
    one.plans["group"] = object()
    one.advance(None, 10, 5)
    assert one.plans == {}
