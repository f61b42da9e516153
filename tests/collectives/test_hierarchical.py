"""Nodes that average before they compress, and the choice by the alpha-beta model."""

import pytest
import torch

from lightning_distlab.collectives import Auto, Gather, Hierarchical, ParameterServer, legal_collectives
from lightning_distlab.compression import DGC, NoCompression, Param, PowerSGD, Sparse, TernGrad
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from lightning_distlab.payloads import DensePayload, Op, RoundSpec, SignPayload, Wire
from lightning_distlab.strategies import CompressedStrategy
from tests.compression.harness import EXACT, Ranks, random_grads, same_states
from tests.helpers.payloads import bits, bundle, dense, sparse

SHAPES = {"a": (30, 20), "b": (5, 7, 13), "a.bias": (30,)}
F = torch.float64
MAKE = {
    "none": NoCompression,
    "sparse": lambda: Sparse(density=0.02, scope="tensor"),
    "dgc": lambda: DGC(density=0.02, clip_norm=5.0, clip_mode="previous"),
    "powersgd": lambda: PowerSGD(rank=1),
    "terngrad": lambda: TernGrad(clip=None),
}


def play(collective, op, payloads):
    world = len(payloads)
    driver = InProcessDriver(world, faithful=True)
    results = driver.run({r: collective.run(op, payloads[r], r, world) for r in range(world)}, collective.name)
    return [results[r] for r in range(world)], driver


@pytest.mark.parametrize("outer", ["ring", "recursive_doubling", "halving_doubling", "tree"])
@pytest.mark.parametrize(("k", "nodes"), [(1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (4, 4)])
def test_sum_over_nodes(k, nodes, outer):
    collective = Hierarchical(k, outer)
    payloads = [bundle(rank // k, 31, 5) for rank in range(k * nodes)]  # the same on all ranks of a node
    results, _ = play(collective, Op.SUM, payloads)
    expected, _ = play(collective.outer, Op.SUM, payloads[::k])
    assert all(bits(result) == bits(results[0]) for result in results)
    torch.testing.assert_close(results[0].parts[0].values, expected[0].parts[0].values, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(results[0].parts[1].to_dense(), expected[0].parts[1].to_dense(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("k", "nodes"), [(2, 2), (2, 3), (3, 4)])
def test_traffic_is_the_formula(k, nodes):
    collective = Hierarchical(k)
    _, driver = play(collective, Op.SUM, [dense(rank // k, 31) for rank in range(k * nodes)])
    for rank in range(k * nodes):
        account = driver.ledger.account(rank, "replicate", "hierarchical")
        assert account.steps == collective.steps(k * nodes)
        assert account.bytes_sent == collective.sum_bytes(k * nodes, 31, 1.0, 16.0, 8.0, rank=rank)


@pytest.mark.parametrize("method", MAKE)
@pytest.mark.parametrize(("k", "nodes"), [(2, 2), (3, 2), (2, 3)])
def test_a_node_is_one_rank_with_the_average_gradient(method, k, nodes):
    """The average and the memories are those of the compressor on one rank per node; there is one residual a node."""
    world = k * nodes
    params = {n: Param(n, torch.zeros(s, dtype=F)) for n, s in SHAPES.items()}
    engine = Engine(MAKE[method](), Hierarchical(k), InProcessDriver(world, faithful=True), params, EXACT)
    weights = {n: torch.zeros(s, dtype=F) for n, s in SHAPES.items()}
    ranks = Ranks(MAKE[method](), weights, nodes)
    for step in range(4):
        grads = random_grads(world, weights, step)
        means = [
            {n: torch.stack([grads[r][n] for r in range(k * node, k * node + k)]).mean(0) for n in weights}
            for node in range(nodes)
        ]
        engine.begin()
        for bucket in (["a.bias", "b"], ["a"]):
            engine.submit({r: {n: g[n].view(SHAPES[n]) for n in bucket} for r, g in enumerate(grads)})
        assert not engine.finish().skipped
        averages = ranks.step(means)
        for rank in range(world):
            for n in weights:
                torch.testing.assert_close(grads[rank][n], averages[n], rtol=1e-10, atol=1e-11)
                assert torch.equal(grads[rank][n], grads[0][n])
            leader = engine.states[rank // k * k]
            assert same_states([engine.states[rank]], [leader])


@pytest.mark.parametrize("bad", [0, 3])
def test_a_nan_inside_a_node_stops_all(bad):
    params = {"a": Param("a", torch.zeros(30, 20, dtype=F))}
    engine = Engine(Sparse(density=0.1, scope="tensor"), Hierarchical(2), InProcessDriver(4), params, EXACT)
    grads = {r: {"a": torch.ones(30, 20, dtype=F)} for r in range(4)}
    grads[bad]["a"][3, 4] = torch.nan
    engine.begin()
    engine.submit(grads)
    assert engine.finish().skipped
    assert all(not state["a"]["residual"].any() for state in engine.states.values())


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="ranks_per_node=0 must be an integer"):
        Hierarchical(0)
    with pytest.raises(ValueError, match="outer='native' must be one of"):
        Hierarchical(2, "native")
    with pytest.raises(ValueError, match="ranks_per_node=2 does not divide 3 ranks; use a divisor"):
        Hierarchical(2).check_world(3)
    with pytest.raises(ValueError, match="looks at each rank's whole gradient first"):
        CompressedStrategy(Sparse(), Hierarchical(2))
    with pytest.raises(ValueError, match="every rank of a Trainer trains"):
        CompressedStrategy(NoCompression(), ParameterServer(dedicated=True))
    with pytest.raises(ValueError, match="needs a second rank"):
        ParameterServer(dedicated=True).check_world(1)


@pytest.mark.parametrize("server", [0, 2])
def test_a_server_of_its_own(server):
    """N workers: N M into the server, N M out of it, M and M at each worker; what the server brings is left out."""
    workers, size = 4, 10
    collective = ParameterServer(server, dedicated=True)
    payloads = [dense(rank, size) for rank in range(workers + 1)]
    results, driver = play(collective, Op.SUM, payloads)
    expected = sum(p.values for rank, p in enumerate(payloads) if rank != server)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result.values, expected, rtol=1e-14, atol=1e-14)
        account = driver.ledger.account(rank, "replicate", "parameter_server")
        factor = workers if rank == server else 1
        assert (account.bytes_sent, account.bytes_received) == (factor * 80, factor * 80)
        assert account.steps == 2


def test_a_dedicated_server_is_not_counted_in_the_average():
    params = {"a": Param("a", torch.zeros(6, dtype=F))}
    engine = Engine(NoCompression(), ParameterServer(dedicated=True), InProcessDriver(3), params, EXACT)
    grads = {r: {"a": torch.full((6,), float(r + 1), dtype=F)} for r in range(3)}
    engine.begin()
    engine.submit(grads)
    engine.finish()
    assert all(torch.equal(grads[r]["a"], torch.full((6,), 2.5, dtype=F)) for r in range(3))


@pytest.mark.parametrize(
    ("world", "one", "total", "name"),
    [
        (2, 1000, 2000, "gather"),
        (8, 100, 800, "gather"),
        (64, 1_000_000, 1_000_000, "halving_doubling"),
        (64, 10_000, 20_000, "recursive_doubling"),
        (6, 100_000_000, 100_000_000, "ring"),
    ],
)
def test_the_choice_by_size_and_number_of_ranks(world, one, total, name):
    assert Auto().choose(world, one, total).name == name


def test_the_choice_is_the_fastest_by_brute_force():
    auto = Auto(latency_s=1e-4, gbit_per_s=1.0)
    for world in (2, 3, 8, 12, 64):
        for one in (10, 10_000, 10_000_000):
            for growth in (1, 4, world):
                total = one * min(growth, world)
                times = {
                    c.name: c.steps(world) * 1e-4 + c.sum_bytes(world, total, one / total, 1, 1) * 8e-9
                    for c in auto.candidates
                }
                assert times[auto.choose(world, one, total).name] == min(times.values())


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_auto_sums(world):
    payloads = [bundle(rank, 40, 3) for rank in range(world)]
    results, _ = play(Auto(), Op.SUM, payloads)
    torch.testing.assert_close(
        results[0].parts[0].values, torch.stack([p.parts[0].values for p in payloads]).sum(0), rtol=1e-14, atol=1e-14
    )
    assert all(bits(result) == bits(results[0]) for result in results)
    assert Auto().supports(RoundSpec(Op.SCATTER_SUM, SignPayload)) is None
    assert Auto().supports(RoundSpec(Op.GATHER, DensePayload)) is None
    with pytest.raises(ValueError, match="gbit_per_s=0"):
        Auto(gbit_per_s=0)


def test_onebit_goes_by_gather_or_auto():
    assert legal_collectives([RoundSpec(Op.SCATTER_SUM, SignPayload), RoundSpec(Op.ALL_GATHER, SignPayload)]) == [
        Gather.name,
        Auto.name,
    ]


def test_a_server_of_its_own_for_one_worker():
    payloads = [sparse(rank, 40, 5).rounded(Wire(value="fp16"))[0] for rank in range(2)]
    results, _ = play(ParameterServer(dedicated=True), Op.SUM, payloads)
    assert all(torch.equal(result.to_dense(), payloads[1].to_dense()) for result in results)
