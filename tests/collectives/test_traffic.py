"""Bytes, messages and steps of each rank equal the documented formulas exactly."""

import pytest
import torch

from lightning_distlab.collectives import (
    Gather,
    HalvingDoubling,
    Native,
    ParameterServer,
    RecursiveDoubling,
    Ring,
    Sequential,
    Tree,
)
from lightning_distlab.exchange.drivers import InProcessDriver, Link
from lightning_distlab.payloads import Bundle, Flags, Op, SparsePayload, even_bounds
from tests.helpers.payloads import EXACT, bundle, dense, sparse
from tests.helpers.traffic import SPARSE_HEADER, doubling_bytes, gather_bytes, ring_bytes

WORLDS = (1, 2, 3, 4, 5, 8)
OURS = (Gather(), Ring(), RecursiveDoubling(), HalvingDoubling(), Tree(), ParameterServer(), Sequential())


def accounts(collective, payloads, **options):
    world = len(payloads)
    driver = InProcessDriver(world, **options)
    driver.run({r: collective.run(Op.SUM, payloads[r], r, world) for r in range(world)}, collective.name)
    return [driver.ledger.account(rank, "replicate", collective.name) for rank in range(world)], driver


@pytest.mark.parametrize("size", [0, 1, 3, 24, 101, 120])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("collective", OURS, ids=lambda c: c.name)
def test_dense_bytes_and_steps(collective, world, size):
    books, _ = accounts(collective, [dense(rank, size) for rank in range(world)])
    for rank, book in enumerate(books):
        assert book.steps == collective.steps(world)
        assert book.bytes_sent == collective.sum_bytes(world, size, 1.0, 16.0, 8.0, rank=rank)
        assert book.header_bytes == 0
    assert sum(book.bytes_sent for book in books) == sum(book.bytes_received for book in books)
    most = max(book.bytes_sent for book in books)
    power = 1 << (world.bit_length() - 1)
    if isinstance(collective, Ring) and size % world:
        assert abs(most - collective.sum_bytes(world, size, 1.0, 16.0, 8.0)) < 2 * 8
    elif isinstance(collective, HalvingDoubling) and size % power:  # less than an element off in each of its swaps
        assert abs(most - collective.sum_bytes(world, size, 1.0, 16.0, 8.0)) < 8 * collective.steps(world)
    else:
        assert most == collective.sum_bytes(world, size, 1.0, 16.0, 8.0)


@pytest.mark.parametrize(("world", "steps"), [(1, 0), (2, 2), (3, 4), (4, 6), (5, 8), (8, 14)])
def test_ring_written_out(world, steps):
    size = 101
    books, _ = accounts(Ring(), [dense(rank, size) for rank in range(world)])
    bounds = even_bounds(size, world)
    chunk = [bounds[i + 1] - bounds[i] for i in range(world)]
    for rank, book in enumerate(books):
        moved = 2 * size - chunk[rank] - chunk[(rank + 1) % world] if world > 1 else 0
        assert (book.steps, book.messages, book.bytes_sent) == (steps, steps, 8 * moved)


@pytest.mark.parametrize(
    ("world", "steps", "most"), [(1, 0, 0), (2, 1, 1), (3, 3, 2), (4, 2, 2), (5, 4, 3), (6, 4, 3), (7, 4, 3), (8, 3, 3)]
)
def test_recursive_doubling_written_out(world, steps, most):
    books, _ = accounts(RecursiveDoubling(), [dense(rank, 10) for rank in range(world)])
    assert [book.steps for book in books] == [steps] * world
    assert max(book.bytes_sent for book in books) == most * 80
    if world == 6:
        assert [book.bytes_sent // 80 for book in books] == [1, 3, 1, 3, 2, 2]


@pytest.mark.parametrize("size", [1, 7, 96, 301])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("collective", "formula"),
    [(Gather(), gather_bytes), (Ring(), ring_bytes), (RecursiveDoubling(), doubling_bytes)],
    ids=["gather", "ring", "recursive_doubling"],
)
def test_sparse_bytes_follow_from_the_supports(collective, formula, world, size):
    for entries in (0, 1, size // 10, size // 2, size):
        payloads = [sparse(rank, size, entries) for rank in range(world)]
        books, _ = accounts(collective, payloads, faithful=True)
        supports = [set(p.indices.tolist()) for p in payloads]
        assert [book.bytes_sent for book in books] == formula(supports, size)
        assert {book.steps for book in books} == {collective.steps(world)}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("collective", OURS, ids=lambda c: c.name)
def test_sum_bytes_is_exact_for_disjoint_supports(collective, world):
    size, per_chunk = 64 * world * world, 2  # each rank has `per_chunk` entries of its own in each chunk
    chunks = world << (world.bit_length() - 1)  # no algorithm cuts through one
    chunk = size // chunks

    def contribution(rank):
        first = torch.arange(chunks) * chunk + per_chunk * rank
        indices = (first[:, None] + torch.arange(per_chunk)).flatten()
        return SparsePayload(indices, torch.ones(indices.numel(), dtype=torch.float64), size, indices.numel(), EXACT)

    books, _ = accounts(collective, [contribution(rank) for rank in range(world)])
    for rank, book in enumerate(books):
        measured = book.bytes_sent - SPARSE_HEADER * book.messages
        density = per_chunk * chunks / size
        formula = collective.sum_bytes(world, size, density, 12.0, 8.0, rank=rank)
        assert measured == pytest.approx(formula, abs=1e-6)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("collective", OURS, ids=lambda c: c.name)
def test_headers_are_counted_apart(collective, world):
    books, _ = accounts(collective, [bundle(rank, 40, 3) for rank in range(world)])
    header = 16 + 16 + 8  # fixed part, 70 bits filled up to 8 bytes, two sizes
    assert all(book.header_bytes == header * book.messages for book in books)


@pytest.mark.parametrize("world", WORLDS)
def test_native_is_entered_by_formula(world):
    payloads = [Bundle((dense(rank, 30), dense(rank, 10)), Flags.NONE, 0, 2) for rank in range(world)]
    _, driver = accounts(Native(), payloads)
    for rank in range(world):
        book = driver.ledger.account(rank, "replicate", "native:sum")
        assert book.modelled == (world > 1)
        assert book.bytes_sent == pytest.approx(Native().sum_bytes(world, 40, 1.0, 16.0, 8.0), abs=1)
        assert book.steps == 2 * Native().steps(world)  # two parts, one after the other


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("collective", [*OURS, Native()], ids=lambda c: c.name)
def test_clock_follows_latency_and_bandwidth(collective, world):
    size = 120
    link = Link(latency_s=0.5, bandwidth_bytes_per_s=1000.0)
    _, driver = accounts(collective, [dense(rank, size) for rank in range(world)], link=link)
    rounds = {
        "gather": 1,
        "ring": 2 * (world - 1),
        "native": 2 * (world - 1),
        "parameter_server": 2,
        "sequential": world,
    }
    power = 1 << (world.bit_length() - 1)
    moved = {
        "gather": 8 * size * (world - 1),
        "ring": 8 * size * 2 * (world - 1) / world,
        "native": 8 * size * 2 * (world - 1) / world,
        "recursive_doubling": 8 * size * collective.steps(world),  # every round, somebody moves all of it
        "halving_doubling": 8 * size * 2 * (power - 1) / power + (16 * size if world > power else 0),
        "tree": 8 * size * collective.steps(world),
        "parameter_server": 2 * 8 * size * (world - 1),
        "sequential": world * 8 * size * (world - 1),
    }
    expected = 0.5 * rounds.get(collective.name, collective.steps(world)) + moved[collective.name] / 1000.0
    assert driver.clock_s == pytest.approx(expected, rel=1e-12)
    assert driver.ledger.exchange_s == driver.clock_s


@pytest.mark.parametrize(
    ("collective", "world"), [(Ring(), 256), (RecursiveDoubling(), 1024)], ids=["ring", "recursive_doubling"]
)
def test_hundreds_of_ranks_in_one_process(collective, world):
    """1,024 ranks of a ring exchange two million messages; `benchmarks/collectives_scale.py` plays them."""
    size = world
    payloads = [dense(0, size) for _ in range(world)]
    if isinstance(collective, RecursiveDoubling):
        payloads = [Bundle((p, sparse(0, size, 3)), Flags.NONE, 1 << r, world) for r, p in enumerate(payloads)]
    books, driver = accounts(collective, payloads, link=Link(1e-3, 1e9))
    if isinstance(collective, Ring):
        assert {book.bytes_sent for book in books} == {8 * 2 * (world - 1)}
        assert {book.steps for book in books} == {2 * (world - 1)}
    else:
        assert {book.steps for book in books} == {10}
    assert driver.clock_s >= 1e-3 * collective.steps(world)
