"""The driver of real ranks: same results, same bits, same books as the one that plays them."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from lightning_distlab.collectives import COLLECTIVES, Gather, GTopK, Hierarchical, Native, Ring
from lightning_distlab.exchange.drivers import InProcessDriver, TorchDriver
from lightning_distlab.exchange.errors import RankLostError
from lightning_distlab.payloads import Bundle, DensePayload, Flags, Op, Wire
from tests.helpers.fork import fork_ranks
from tests.helpers.payloads import bits, bundle, dense, sparse
from tests.helpers.traffic import doubling_bytes, gather_bytes, ring_bytes

COMPACT = Wire(index="auto", value="fp16", dense="fp16")


def cases(rank):
    """One payload of each kind; the last travels compressed at first and in full precision once merged."""
    few = sparse(rank, 103, 9, dtype=torch.float32).rounded(COMPACT)[0]
    everything = dense(rank, 11, torch.float32).rounded(COMPACT)[0]
    return {
        "dense": dense(rank, 17),
        "sparse": sparse(rank, 60, 7),
        "empty": sparse(rank, 5, 0),
        "tiny": dense(rank, 1),
        "crowded": sparse(rank, 20, 15),
        "bundle": bundle(rank, 33, 5),
        "compact": Bundle((few, everything), Flags.NONE, 1, 2),
    }


def operations():
    """(algorithm, operation, case) that every driver can perform."""
    for collective in (kind() for kind in COLLECTIVES.values() if kind not in (Native, Hierarchical, GTopK)):
        for case in cases(0):
            yield collective, Op.SUM, case
        for op in sorted(collective.ops & {Op.SCATTER_SUM, Op.ALL_GATHER}, key=lambda op: op.value):
            yield collective, op, "bundle"
        yield collective, Op.MAX, "dense"
    yield Native(), Op.SUM, "dense"
    yield Native(), Op.MAX, "tiny"


def play(rank, world):
    driver = TorchDriver()
    results = []
    for number, (collective, op, case) in enumerate(operations()):
        running = collective.run(op, cases(rank)[case], rank, world)
        ticket = driver.open({rank: running}, (number, 0), f"{collective.name}/{op.value}/{case}")
        results.append(driver.finish(ticket)[rank])
    return [bits(result) for result in results], dict(driver.ledger.accounts)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_real_ranks_equal_played_ones(world):
    real = fork_ranks(world, play, world)
    played = InProcessDriver(world)
    for number, (collective, op, case) in enumerate(operations()):
        label = f"{collective.name}/{op.value}/{case}"
        running = {r: collective.run(op, cases(r)[case], r, world) for r in range(world)}
        results = played.run(running, label)
        for rank, (found, _) in enumerate(real):
            if collective.name == "native" and op is Op.SUM:  # gloo adds in the order of its own ring
                vector = torch.frombuffer(bytearray(found[number][0]), dtype=torch.float64)
                torch.testing.assert_close(vector, results[rank].values, rtol=1e-14, atol=1e-14)
            else:
                assert found[number] == bits(results[rank]), label
    books = {key: account for _, accounts in real for key, account in accounts.items()}
    assert books == dict(played.ledger.accounts)


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_bytes_and_steps_of_real_ranks_equal_the_formulas(world):
    size, entries = 101, 12

    def body(rank):
        driver = TorchDriver()
        for name in ("gather", "ring", "recursive_doubling"):
            for kind, payload in (("dense", dense(rank, size)), ("sparse", sparse(rank, size, entries))):
                running = COLLECTIVES[name]().run(Op.SUM, payload, rank, world)
                driver.run({rank: running}, f"{name}/{kind}")
        return {label: (book.bytes_sent, book.steps) for (_, _, label), book in driver.ledger.accounts.items()}

    real = fork_ranks(world, body)
    supports = [set(sparse(rank, size, entries).indices.tolist()) for rank in range(world)]
    formulas = {"gather": gather_bytes, "ring": ring_bytes, "recursive_doubling": doubling_bytes}
    for name, formula in formulas.items():
        collective, sparse_bytes = COLLECTIVES[name](), formula(supports, size)
        for rank in range(world):
            dense_bytes = collective.sum_bytes(world, size, 1.0, 16.0, 8.0, rank=rank)
            assert real[rank][f"{name}/dense"] == (dense_bytes, collective.steps(world))
            assert real[rank][f"{name}/sparse"] == (sparse_bytes[rank], collective.steps(world))


@pytest.mark.parametrize("names", [("ring", "recursive_doubling", "gather", "ring"), ("native", "ring", "native")])
def test_many_exchanges_open_at_once(names):
    world, sizes = 3, (4, 50, 7, 9)

    def body(rank):
        driver = TorchDriver()
        tickets = []
        for bucket, name in enumerate(names):
            running = COLLECTIVES[name]().run(Op.SUM, dense(rank, sizes[bucket]), rank, world)
            tickets.append(driver.open({rank: running}, (3, bucket), name))
        order = list(zip(sizes, tickets, strict=False))
        return [(size, driver.finish(ticket)[rank].values) for size, ticket in order[1:] + order[:1]]

    for answers in fork_ranks(world, body):
        assert len(answers) == len(names)
        for size, values in answers:
            expected = torch.stack([dense(r, size).values for r in range(world)]).sum(0)
            torch.testing.assert_close(values, expected, rtol=1e-14, atol=1e-14)


def test_opening_posts_and_moves_older_exchanges_on_without_finish():
    def body(rank):
        driver = TorchDriver()
        first = driver.open({rank: Ring().run(Op.SUM, dense(rank, 8), rank, 2)}, (0, 0), "first")
        for bucket in (1, 2):  # a ring of two ranks has two rounds
            driver.open({rank: Gather().run(Op.SUM, dense(rank, 8), rank, 2)}, (0, bucket), "other")
        return first.posted is None, driver.ledger.account(rank, "replicate", "first").steps

    assert fork_ranks(2, body) == [(True, 2)] * 2


def test_native_reduces_in_place_and_times_are_kept():
    def body(rank):
        driver = TorchDriver(axis="shard")
        payload = DensePayload(torch.full((5,), float(rank + 1)))
        result = driver.run({rank: Native().run(Op.SUM, payload, rank, 2)}, "native")[rank]
        same = result.values.data_ptr() == payload.values.data_ptr()
        if rank == 1:
            time.sleep(0.3)
        driver.run({rank: Ring().run(Op.SUM, dense(rank, 8), rank, 2)}, "ring")
        labels = {(axis, label) for _, axis, label in driver.ledger.accounts}
        return same, payload.values.tolist(), driver.ledger.exchange_s, driver.ledger.codec_s, labels

    (same, values, waited, codec, labels), (_, _, waited_late, _, _) = fork_ranks(2, body)
    assert same
    assert values == [3.0] * 5
    assert waited > 0.2 > waited_late
    assert 0 < codec < 0.2
    assert ("shard", "native:sum") in labels
    assert ("shard", "ring") in labels


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("name", ["ring", "gather", "recursive_doubling", "native"])
def test_survivors_name_the_rank_that_was_killed(name, victim, store):
    world = 4

    def body(rank):
        driver = TorchDriver(grace_s=1.5)
        collective = COLLECTIVES[name]()
        driver.run({rank: collective.run(Op.SUM, dense(rank, 64), rank, world)}, name)
        dist.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            for _ in range(3):  # messages sent before the death may still arrive
                driver.run({rank: collective.run(Op.SUM, dense(rank, 64), rank, world)}, name)
        except RankLostError as error:
            return error.ranks, str(error), time.monotonic() - started
        return None

    answers = fork_ranks(world, body, may_die={victim}, store=store, timeout_s=30)
    assert answers[victim] is None
    for rank in set(range(world)) - {victim}:
        ranks, message, seconds = answers[rank]
        assert ranks == (victim,), message
        assert f"Rank {victim} was lost during {name} on axis 'replicate'" in message
        assert seconds < 8


def test_a_rank_that_hangs_is_named_after_the_timeout():
    def body(rank):
        driver = TorchDriver(grace_s=0.5)
        if rank == 1:
            time.sleep(4)
            return None
        try:
            driver.run({rank: Ring().run(Op.SUM, dense(rank, 8), rank, 2)}, "ring")
        except RankLostError as error:
            return error.ranks
        return "finished"

    assert fork_ranks(2, body, group_timeout_s=1.0)[0] == (1,)
