import json

import pytest

from tomadiff import MergeConfig, preset
from tomadiff.config import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    config = preset(name, ratio=((0, 0), (0.5, 0.75)), overrides={"*.ff": 0.75})  # which every method can do
    again = MergeConfig.from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)
    json.loads(config.to_json())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": -0.1}, "0 <= ratio < 1"),
        ({"ratio": 1.0}, "0 <= ratio < 1"),
        ({"ratio": float("nan")}, "0 <= ratio < 1"),
        ({"ratio": True}, "0 <= ratio < 1"),
        ({"ratio": ()}, "list of \\(position, ratio\\)"),
        ({"ratio": ((0.0,),)}, "list of \\(position, ratio\\)"),
        ({"ratio": ((0.5, 0.2), (0.1, 0.3))}, "rise from 0"),
        ({"ratio": ((0.0, 1.5),)}, "0 <= ratio < 1"),
        ({"overrides": {"*.ff": 2}}, "overrides\\['\\*.ff'\\]"),
        ({"method": "magic"}, "use one of toma"),
        ({"select_region": "circle"}, "use one of tile, stripe, global"),
        ({"merge_region": "circle"}, "use one of tile"),
        ({"normalise": "rows"}, "use one of destinations, tokens"),
        ({"unmerge": "copy"}, "use one of transpose"),
        ({"mode": "twice"}, "use one of each, once, stack"),
        ({"modules": ()}, "at least one of self, cross, ff"),
        ({"modules": ("mlp",)}, "at least one of self, cross, ff"),
        ({"ff_min_tokens": -1}, "ff_min_tokens is a whole number"),
        ({"select_size": 0}, "whole number of tokens, or a share"),
        ({"select_size": 2.5, "merge_size": 4}, "whole number of tokens, or a share"),
        ({"merge_size": True}, "whole number of tokens, or a share"),
        ({"select_size": 0.125}, "both numbers of tokens or both shares"),
        ({"select_size": 0.25, "merge_size": 0.125}, "at least as large"),
        ({"select_every": 2.5}, "whole number"),
        ({"skip_first": -1}, "below 1"),
        ({"skip_first": 1.5}, "below 1"),
        ({"skip_first": True}, "below 1"),
        ({"select_every": 7, "weights_every": 5}, "multiple of weights_every"),
        ({"tau": 0.0}, "tau is a positive number"),
        ({"ridge": float("inf")}, "ridge is a positive number"),
        ({"start": 0.5, "end": 0.5}, "0 <= start < end <= 1"),
        ({"select_region": "global"}, "at least as large"),
        ({"select_size": 8, "merge_size": 4}, "at least as large"),
    ],
)
def test_wrong_values_say_what_to_do(changes, message):
    with pytest.raises(ValueError, match=message):
        MergeConfig(**changes)


def test_wrong_json():
    with pytest.raises(ValueError, match="is an object"):
        MergeConfig.from_json("[]")
    with pytest.raises(ValueError, match=r"unknown fields \['ration'\]"):
        MergeConfig.from_json('{"ration": 0.5}')
    with pytest.raises(ValueError, match="unknown preset"):
        preset("sd9")


def test_ratio_at():
    config = MergeConfig(ratio=((0.2, 0.25), (0.5, 0.75)), start=0.1)
    assert [config.ratio_at(p) for p in (0.0, 0.15, 0.3, 0.5, 1.0)] == [None, 0.0, 0.25, 0.75, 0.75]
    assert MergeConfig(end=0.5).ratio_at(0.5) is None


def test_frozen():
    with pytest.raises(AttributeError):
        MergeConfig().ratio = 0.3
