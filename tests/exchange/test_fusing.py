"""Tensors that lie in one buffer are handled together where the compressor allows it, with the same result."""

import pytest
import torch

from lightning_distlab.collectives import Native, Ring
from lightning_distlab.compression import NoCompression
from lightning_distlab.compression.base import Param
from lightning_distlab.exchange.bucket import all_finite
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from lightning_distlab.exchange.flat import adjacent_runs, joined
from lightning_distlab.payloads import Wire

SIZES = {"a": 5, "b": 3, "c": 7}


class OneByOne(NoCompression):
    fuses = False


def step(compressor, collective, wire=None, absent=(), poison=None, ranks=3):
    """Averages, outcome, how many compressions ran."""
    engine = Engine(
        compressor, collective, InProcessDriver(ranks), {n: Param(n, torch.zeros(k)) for n, k in SIZES.items()}, wire
    )
    started = []
    exchange = compressor.exchange
    compressor.exchange = lambda grad, *rest: (started.append(grad.numel()), exchange(grad, *rest))[1]
    torch.manual_seed(0)
    gradients = {}
    for rank in range(ranks):
        pieces = torch.randn(15).split(list(SIZES.values()))
        gradients[rank] = dict(zip(SIZES, pieces, strict=True))
        if poison == rank:
            gradients[rank]["b"][1] = float("nan")
        for owner, name in absent:
            if owner == rank:
                gradients[rank][name] = None
    engine.begin()
    engine.submit(gradients)
    outcome = engine.finish()
    return gradients, outcome, started, engine


@pytest.mark.parametrize("collective", [Native, Ring])
@pytest.mark.parametrize("wire", [None, Wire(dense="fp16")])
def test_fused_averages_have_the_same_bits(collective, wire):
    if collective is Native and wire is not None:
        pytest.skip("the backend adds tensors as they are; no codec applies")
    fused, _, started, engine = step(NoCompression(), collective(), wire)
    single, _, _, reference = step(OneByOne(), collective(), wire)
    assert started == [15] * 3
    assert all(torch.equal(fused[r][n], single[r][n]) for r in range(3) for n in SIZES)
    assert engine.ledger.accounts == reference.ledger.accounts
    assert engine.ledger.payload_bytes == reference.ledger.payload_bytes


@pytest.mark.parametrize("collective", [Native, Ring])
def test_a_rank_without_a_gradient_still_gets_the_average(collective):
    absent = [(1, "b")]
    fused, outcome, started, _ = step(NoCompression(), collective(), absent=absent)
    single, expected, _, _ = step(OneByOne(), collective(), absent=absent)
    assert sorted(started) == [3, 5, 7, 15, 15]
    assert torch.equal(outcome.created[1]["b"], expected.created[1]["b"])
    assert all(torch.equal(fused[r][n], single[r][n]) for r in range(3) for n in SIZES if (r, n) not in absent)


@pytest.mark.parametrize("collective", [Native, Ring])
def test_a_nan_inside_a_run_skips_the_step(collective):
    assert step(NoCompression(), collective(), poison=2)[1].skipped


def test_runs_end_at_gaps_and_other_storages():
    buffer = torch.arange(10.0)
    flats = [buffer[:2], buffer[2:5], buffer[6:8], torch.zeros(3), buffer[8:9], buffer[9:]]
    assert adjacent_runs(flats) == [[0, 1], [2], [3], [4, 5]]
    assert torch.equal(joined(flats[:2]), buffer[:5])
    assert torch.equal(joined(flats[4:]), buffer[8:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_finite_sees_every_place(bad, dtype):
    tensors = [torch.ones(4, dtype=dtype), torch.ones(3, dtype=dtype)]
    assert all_finite(tensors)
    for tensor in tensors:
        tensor[-1] = bad
        assert not all_finite(tensors)
        tensor[-1] = 1.0


def test_infinities_of_both_signs_do_not_cancel():
    assert not all_finite([torch.tensor([float("inf")]), torch.tensor([float("-inf")])])
    assert all_finite([])
