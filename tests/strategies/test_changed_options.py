"""Communication state meets a run with other options."""

import pytest
import torch

from lightning_distlab import QSGDStrategy
from lightning_distlab.collectives import Gather, ParameterServer
from lightning_distlab.compression import DGC, QSGD, Hyper, NoCompression, Param, PowerSGD, TernGrad
from lightning_distlab.compression.exclusion import Exclusion
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from lightning_distlab.payloads import Wire
from lightning_distlab.strategies.resume import restore_engine, save_engine

CPU = torch.device("cpu")


def engine(compressor, collective=None, wire=None, momentum=0.0):
    params = {"w": Param("w", torch.zeros(20, 30), Hyper(momentum)), "b": Param("b", torch.zeros(7), Hyper(momentum))}
    return Engine(compressor, collective or Gather(), InProcessDriver(2), params, wire)


def run(running, steps=2, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        grads = {
            r: {n: torch.randn(p.weight.shape, generator=generator) for n, p in running.params.items()} for r in (0, 1)
        }
        running.begin()
        running.submit(grads)
        running.finish()
    return grads[0]


@pytest.mark.parametrize("make", [QSGD, TernGrad, lambda: PowerSGD(rank=1)])
def test_all_memories_come_back_those_of_excluded_tensors_too(make):
    wire = Wire(value="fp16", dense="fp16")
    first, second = engine(make(), wire=wire), engine(make(), wire=wire)
    run(first)
    restore_engine(second, save_engine(first, "per_rank", CPU), "per_rank")
    assert "rounding" in second.states[0]["b"]
    a, b = run(first, first=2), run(second, first=2)
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(("before", "after"), [
    ((PowerSGD(rank=1), None), (PowerSGD(rank=2), None)),
    ((NoCompression(), ParameterServer(delay=2)), (NoCompression(), ParameterServer(delay=1))),
    ((NoCompression(), ParameterServer(delay=1)), (NoCompression(), ParameterServer())),
    ((DGC(density=0.1), ParameterServer(delay=1)), (DGC(density=0.1), ParameterServer())),
])  # fmt: skip
def test_memories_of_another_size_are_refused(before, after):
    first, second = engine(*before), engine(*after)
    run(first)
    saved = save_engine(first, "per_rank", CPU)
    with pytest.raises(
        ValueError, match=r"an option of the compressor or the collective has changed.*comm_state='reset'"
    ):
        restore_engine(second, saved, "per_rank")


@pytest.mark.parametrize(("before", "after"), [
    ((PowerSGD(rank=1, warm_start=False), None), (PowerSGD(rank=1), None)),
    ((DGC(density=0.1), None), (DGC(density=0.1), ParameterServer(delay=2))),
])  # fmt: skip
def test_memories_that_are_new_begin_fresh(before, after):
    first, second = engine(*before), engine(*after)
    run(first)
    restore_engine(second, save_engine(first, "per_rank", CPU), "per_rank")
    for state, other in zip(first.states[0].values(), second.states[0].values(), strict=True):
        assert state.keys() <= other.keys()
        assert all(torch.equal(state[key], other[key]) for key in state)
    run(second, first=2)


def test_presets_take_all_options_of_the_strategy():
    assert QSGDStrategy(bits=4, gradient_as_bucket_view=False)._ddp_kwargs["gradient_as_bucket_view"] is False
    with pytest.raises(TypeError, match="gradient_as_bukket_view"):
        QSGDStrategy(gradient_as_bukket_view=False)


def test_tensors_without_elements_are_left_alone():
    assert Exclusion(vectors=False, min_numel=0).reason(Param("w", torch.zeros(0, 5))) == "no elements"
