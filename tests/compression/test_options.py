"""Constructors refuse what cannot work, and say why."""

import math

import pytest
import torch

from lightning_distlab.compression import (
    COMPRESSORS,
    DGC,
    QSGD,
    Cast,
    NoCompression,
    OneBit,
    Param,
    PowerSGD,
    Sparse,
    TernGrad,
    Threshold,
)
from lightning_distlab.compression.exclusion import Exclusion
from lightning_distlab.compression.warmup import SparsityWarmup

BAD = {
    "density": [0, 0.0, -0.1, 1.0001, 2, math.nan, math.inf, "0.1", None, True],
    "min_numel": [-1, 1.5, True, "8", None, math.nan],
    "exclude_vectors": [1, 0, None, "yes"],
    "exclude": ["bias", 3, [""], [None], [1]],
}
BAD_DGC = {
    "clip_norm": [0, -1.0, math.nan, math.inf, "1", True],
    "clip_mode": ["global", None, 1, ""],
    "warmup_epochs": [-1, math.nan, math.inf, "4", None, True],
    "warmup_steps": [-1, 2.0, "4", None, True],
    "momentum_correction": [1, None, "on"],
    "momentum_masking": [1, None, "on"],
    "dense_when_cheaper": [1, None, "on"],
}
CASES = [(cls, option, value) for cls in (DGC, Sparse) for option, values in BAD.items() for value in values]
CASES += [(DGC, option, value) for option, values in BAD_DGC.items() for value in values]
BAD_POWERSGD = {
    "rank": [0, -1, 1.0, "2", None, True, math.nan],
    "warm_start": [1, None, "on"],
    "min_compression_rate": [0.99, 0, -2, math.nan, math.inf, "2", None, True],
    "exclude": BAD["exclude"],
}
CASES += [(PowerSGD, option, value) for option, values in BAD_POWERSGD.items() for value in values]
BAD_EXCLUSION = {key: BAD[key] for key in ("min_numel", "exclude_vectors", "exclude")}
BAD_OTHERS = {
    OneBit: {"min_numel": BAD["min_numel"], "exclude": BAD["exclude"]},
    Threshold: {**BAD_EXCLUSION, "threshold": [0, -0.1, math.nan, math.inf, "1", None, True]},
    TernGrad: {**BAD_EXCLUSION, "clip": [0, -1, math.nan, math.inf, "2.5", True], "code": ["bits", None, 2, ""]},
    QSGD: {**BAD_EXCLUSION, "bits": [1, 9, 0, -1, 4.0, "8", None, True], "block": [0, -1, 1.5, None, True]},
    Cast: {"dtype": ["fp32", None, 16, ""]},
}
CASES += [(cls, option, value) for cls, bad in BAD_OTHERS.items() for option, all_ in bad.items() for value in all_]
CASES += [(Sparse, "scope", value) for value in ("layer", None, 1)]


@pytest.mark.parametrize(("cls", "option", "value"), CASES)
def test_a_bad_option_is_named_with_its_value_and_range(cls, option, value):
    with pytest.raises(ValueError, match=f"^{option}") as caught:
        cls(**{option: value})
    message = str(caught.value)
    assert repr(value[0] if isinstance(value, list) else value) in message
    assert "must be" in message


def test_density_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"density=1.5 must be a number in \(0, 1\]; 0.001 sends one entry"):
        DGC(density=1.5)


def test_two_lengths_of_warmup_are_refused():
    with pytest.raises(ValueError, match="warmup_epochs=4 and warmup_steps=100"):
        DGC(warmup_epochs=4, warmup_steps=100)


def test_options_are_keywords():
    with pytest.raises(TypeError):
        DGC(0.1)


def test_registry():
    assert {
        "none": NoCompression,
        "cast": Cast,
        "sparse": Sparse,
        "dgc": DGC,
        "powersgd": PowerSGD,
        "onebit": OneBit,
        "threshold": Threshold,
        "terngrad": TernGrad,
        "qsgd": QSGD,
    } == COMPRESSORS
    assert DGC().owns_momentum
    assert DGC().refuses_clipping
    assert not DGC(momentum_correction=False).owns_momentum
    assert not Sparse().owns_momentum
    assert Sparse().needs_whole_gradient
    assert DGC(clip_norm=1).needs_whole_gradient
    assert not DGC().needs_whole_gradient
    assert not DGC(clip_norm=1, clip_mode="tensor").needs_whole_gradient


def test_warmup_is_the_papers_schedule():
    sparsity = [100 * (1 - SparsityWarmup(0.001, epochs=4).at(0, epoch)) for epoch in (0, 0.99, 1, 2, 3, 3.9, 4, 100)]
    assert sparsity == pytest.approx([75, 75, 93.75, 98.4375, 99.609375, 99.609375, 99.9, 99.9], abs=1e-12)


def test_warmup_by_steps_and_to_other_densities():
    densities = [SparsityWarmup(0.01, steps=300).at(step, 55.0) for step in (0, 99, 100, 200, 299, 300)]
    assert densities == [0.25, 0.25, 0.0625, 0.015625, 0.015625, 0.01]
    assert SparsityWarmup(0.25, epochs=4).at(0, 0.0) == 0.25
    assert SparsityWarmup(1.0, epochs=4).at(0, 0.0) == 1.0
    assert SparsityWarmup(0.001).at(0, 0.0) == 0.001
    assert SparsityWarmup(0.0625, epochs=2).stages == (0.25,)


def test_exclusion_gives_its_reason():
    rule = Exclusion(min_numel=10, patterns=("head.*", "*.pos"))
    assert rule.reason(Param("body.weight", torch.zeros(5, 5))) is None
    assert rule.reason(Param("body.bias", torch.zeros(50))) == "dim <= 1"
    assert rule.reason(Param("temperature", torch.zeros(()))) == "dim <= 1"
    assert rule.reason(Param("tiny", torch.zeros(3, 3))) == "numel < 10"
    assert rule.reason(Param("head.weight", torch.zeros(5, 5))) == "name matches 'head.*'"
    assert Exclusion(vectors=False).reason(Param("body.bias", torch.zeros(500))) is None
