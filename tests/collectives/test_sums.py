"""Every algorithm computes what it promises, with the same bits on all ranks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.collectives import (
    COLLECTIVES,
    Auto,
    Balanced,
    Gather,
    GTopK,
    HalvingDoubling,
    Hierarchical,
    Native,
    ParameterServer,
    RecursiveDoubling,
    Ring,
    Sequential,
    Tree,
)
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.payloads import Bundle, DensePayload, Flags, Op, SparsePayload, Wire, even_bounds
from tests.helpers.payloads import as_vector, bits, bundle, dense, sparse

WORLDS = (1, 2, 3, 4, 5, 8)
OURS = (Gather(), Ring(), RecursiveDoubling(), HalvingDoubling(), Tree(), ParameterServer(), Sequential())


def play(collective, op, payloads, faithful=True):
    world = len(payloads)
    driver = InProcessDriver(world, faithful=faithful)
    results = driver.run({r: collective.run(op, payloads[r], r, world) for r in range(world)}, collective.name)
    return [results[r] for r in range(world)], driver


@pytest.mark.parametrize("size", [0, 1, 3, 7, 64, 101])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("collective", OURS, ids=lambda c: c.name)
def test_sum_of_all_kinds_of_payloads(collective, world, size):
    for entries in (0, 1, size // 3, size):
        payloads = [bundle(rank, size, entries) for rank in range(world)]
        expected = torch.stack([as_vector(p) for p in payloads]).sum(0)
        for contributions in (payloads, [p.parts[0] for p in payloads], [p.parts[1] for p in payloads]):
            results, _ = play(collective, Op.SUM, contributions)
            assert all(bits(result) == bits(results[0]) for result in results)
        results, _ = play(collective, Op.SUM, payloads)
        torch.testing.assert_close(as_vector(results[0]), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("collective", [*OURS, Native()], ids=lambda c: c.name)
def test_maximum_and_native_sum(collective, world):
    payloads = [Bundle((dense(rank, 13), dense(rank, 2)), Flags.NONE, 0, 2) for rank in range(world)]
    stacked = torch.stack([as_vector(p) for p in payloads])
    results, _ = play(collective, Op.MAX, payloads)
    assert all(torch.equal(as_vector(result), stacked.amax(0)) for result in results)
    results, _ = play(collective, Op.SUM, payloads)
    torch.testing.assert_close(as_vector(results[-1]), stacked.sum(0), rtol=1e-14, atol=1e-14)
    assert all(bits(result) == bits(results[0]) for result in results)


@pytest.mark.parametrize("size", [0, 2, 5, 24])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("collective", [Gather(), Ring()], ids=lambda c: c.name)
def test_scatter_then_gather_is_a_sum(collective, world, size):
    payloads = [bundle(rank, size, 3) for rank in range(world)]
    expected = torch.stack([as_vector(p) for p in payloads]).sum(0)
    ranges, _ = play(collective, Op.SCATTER_SUM, payloads)
    for part, length in enumerate((size + 1, size)):
        bounds = even_bounds(length, world)
        assert [r.parts[part].length for r in ranges] == [b - a for a, b in pairwise(bounds)]

    def placed(rank):  # NaN everywhere but in the own range: nothing else may count
        parts = []
        for part, length in enumerate((size + 1, size)):
            bounds = even_bounds(length, world)
            whole = torch.full((length,), torch.nan, dtype=torch.float64)
            whole[bounds[rank] : bounds[rank + 1]] = as_vector(ranges[rank].parts[part])
            parts.append(DensePayload(whole))
        return Bundle(tuple(parts), ranges[rank].flags, ranges[rank].present, 70)

    results, _ = play(collective, Op.ALL_GATHER, [placed(rank) for rank in range(world)])
    for result in results:
        torch.testing.assert_close(as_vector(result), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("world", WORLDS)
def test_gather_hands_out_every_payload_in_rank_order(world):
    payloads = [bundle(rank, 9, 4) for rank in range(world)]
    driver = InProcessDriver(world, faithful=True)
    results = driver.run({r: Gather().gather(payloads[r], r, world) for r in range(world)})
    for everyone in results.values():
        assert [bits(p) for p in everyone] == [bits(p) for p in payloads]
        assert [p.flags for p in everyone] == [p.flags for p in payloads]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("collective", "op"),
    [(c, op) for c in OURS for op in (Op.SUM, Op.SCATTER_SUM, Op.ALL_GATHER) if op in c.ops],
    ids=lambda value: value.name,
)
def test_flags_and_presence_reach_everybody(collective, world, op):
    results, _ = play(collective, op, [bundle(rank, 3, 1) for rank in range(world)])
    for result in results:
        assert result.flags == (Flags.SIGNAL if world > 1 else Flags.NONE)
        assert result.present == (1 << world) - 1


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(OURS),
    st.integers(1, 7),
    st.integers(1, 40),
    st.integers(0, 40),
    st.sampled_from(["int32", "run16", "rice", "bitmap", "auto"]),
    st.sampled_from(["fp32", "fp16", "bf16", "int8"]),
)
def test_objects_and_bytes_give_the_same_bits_and_books(collective, world, size, entries, index, value):
    wire = Wire(index=index, value=value, dense=value)

    def contribution(rank):
        few = sparse(rank, size, entries, dtype=torch.float32).rounded(wire)[0]
        all_ = dense(rank, size, torch.float32).rounded(wire)[0]
        return Bundle((few, all_), Flags.NONE, 1, 2)

    payloads = [contribution(rank) for rank in range(world)]
    objects, fast = play(collective, Op.SUM, payloads, faithful=False)
    decoded, slow = play(collective, Op.SUM, payloads, faithful=True)
    assert all(bits(result) == bits(objects[0]) for result in objects + decoded)
    assert fast.ledger.accounts == slow.ledger.accounts
    expected = torch.stack([as_vector(p) for p in payloads]).double().sum(0)
    torch.testing.assert_close(as_vector(objects[0]).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("collective", OURS, ids=lambda c: c.name)
def test_negative_zeros_do_not_tell_ranks_apart(collective):
    def contribution(rank):
        index = torch.tensor([rank, 4 + rank])
        return SparsePayload(index, torch.tensor([-0.0, 1.0]), 12, 2, Wire(index="int32"))

    for world in (2, 3, 4):
        results, _ = play(collective, Op.SUM, [contribution(rank) for rank in range(world)])
        assert all(bits(result) == bits(results[0]) for result in results)


def test_registry_knows_every_algorithm_by_its_name():
    # the others are made of these or cut what they sum, and have tests of their own
    assert {type(c) for c in OURS} | {Native, Hierarchical, Auto, GTopK, Balanced} == set(COLLECTIVES.values())
    assert all(kind.name == name for name, kind in COLLECTIVES.items())
