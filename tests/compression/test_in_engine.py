"""Compressors inside the exchange engine: the same averages and memories as in lock step, and skipped steps."""

import pytest
import torch

from lightning_distlab.collectives import COLLECTIVES, legal_collectives
from lightning_distlab.compression import DGC, QSGD, Hyper, OneBit, Param, PowerSGD, Sparse, TernGrad, Threshold
from lightning_distlab.exchange.drivers.in_process import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from tests.compression.harness import EXACT, Ranks, copy_of, random_grads, same_states, snapshot

SHAPES = {"a": (30, 20), "b": (5, 7, 13), "a.bias": (30,)}
MAKE = {
    "dgc-exact": lambda: DGC(density=0.02, clip_norm=20.0),
    "dgc-previous": lambda: DGC(density=0.02, clip_norm=20.0, clip_mode="previous"),
    "dgc-tensor": lambda: DGC(density=0.02, clip_norm=5.0, clip_mode="tensor"),
    "sparse-global": lambda: Sparse(density=0.02),
    "onebit": OneBit,
    "threshold": lambda: Threshold(threshold=1.0),
    "terngrad": TernGrad,
    "qsgd": lambda: QSGD(bits=4, block=100),
    "powersgd": lambda: PowerSGD(rank=2, min_compression_rate=1.0),
    "powersgd-random-start": lambda: PowerSGD(rank=1, warm_start=False),
    "sparse-tensor": lambda: Sparse(density=0.02, scope="tensor"),
}


def make_engine(name, collective, world):
    params = {n: Param(n, torch.zeros(s, dtype=torch.float64), Hyper(0.9, True, 0.0)) for n, s in SHAPES.items()}
    return Engine(MAKE[name](), COLLECTIVES[collective](), InProcessDriver(world), params, EXACT)


def engine_step(engine, grads):
    """One step in two buckets; the shaped gradients become averages."""
    named = {r: {n: g.view(SHAPES[n]) for n, g in rank.items()} for r, rank in enumerate(grads)}
    engine.begin()
    if engine.compressor.needs_whole_gradient:
        engine.observe(named)
    for bucket in (["a.bias", "b"], ["a"]):
        engine.submit({r: {n: rank[n] for n in bucket} for r, rank in named.items()})
    return engine.finish()


@pytest.mark.parametrize(
    "collective",
    ["gather", "ring", "recursive_doubling", "halving_doubling", "tree", "parameter_server", "sequential", "auto"],
)
@pytest.mark.parametrize("name", MAKE)
def test_the_engine_and_lock_step_agree(name, collective):
    world = 3
    if collective not in legal_collectives(MAKE[name]().rounds):
        pytest.skip("no legal pair")
    engine = make_engine(name, collective, world)
    weights = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    ranks = Ranks(MAKE[name](), weights, world, Hyper(0.9, True, 0.0))
    for t in range(4):
        grads = random_grads(world, weights, t)
        twin = copy_of(grads)
        assert not engine_step(engine, grads).skipped
        averages = ranks.step(twin)
        for rank in range(world):
            for n in SHAPES:
                torch.testing.assert_close(grads[rank][n], averages[n], rtol=1e-12, atol=1e-13)
                assert torch.equal(grads[rank][n], grads[0][n])
    # The excluded bias carries the momentum of averages, which different orders of addition round differently.
    for name_of in ("a", "b"):
        pairs = zip(engine.states.values(), ranks.states, strict=True)
        for x, y in pairs:
            if name.startswith("powersgd"):  # its memories follow from sums, which the ring adds in another order
                assert x[name_of].keys() == y[name_of].keys()
                for key, value in x[name_of].items():
                    torch.testing.assert_close(value, y[name_of][key], rtol=1e-10, atol=1e-11)
            else:
                assert same_states([{name_of: x[name_of]}], [{name_of: y[name_of]}])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", MAKE)
def test_a_gradient_that_is_not_finite_on_one_rank_changes_no_memory(name, bad):
    collective = legal_collectives(MAKE[name]().rounds)[-1]
    engine, twin = make_engine(name, collective, 2), make_engine(name, collective, 2)
    weights = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    for t in range(4):
        grads = random_grads(2, weights, t)
        if t == 2:
            before = snapshot(engine.states.values())
            grads[1]["a"][5:50] = bad
            assert engine_step(engine, grads).skipped
            assert same_states(engine.states.values(), before)
            continue
        other = copy_of(grads)
        twin.steps_done = engine.steps_done  # random draws follow the number of the step
        assert not engine_step(engine, grads).skipped
        engine_step(twin, other)
        assert same_states(engine.states.values(), twin.states.values())
        assert all(torch.equal(grads[0][n], other[0][n]) for n in SHAPES)
