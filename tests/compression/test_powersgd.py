"""PowerSGD against its definition, PyTorch's hook, and the published data volumes."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_distlab.collectives import Gather
from lightning_distlab.compression import Param, PowerSGD, Step
from lightning_distlab.compression.powersgd import matrix_shape, orthonormal_basis
from lightning_distlab.exchange.bucket import Entry, exchange_bucket
from lightning_distlab.exchange.ledger import Ledger
from lightning_distlab.payloads import Flags, Wire
from tests.compression.harness import Ranks, copy_of, random_grads, same_states, snapshot
from tests.helpers.fork import fork_ranks

HALF = Wire(value="fp16", dense="fp16")


def zeros(**shapes):
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}


def low_rank(shape, rank, seed):
    """A flat matrix of exactly that rank."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(shape[0], rank, generator=generator, dtype=torch.float64)
    return (a @ torch.randn(rank, shape[1], generator=generator, dtype=torch.float64)).view(-1)


@pytest.mark.parametrize("warm_start", [True, False])
def test_the_average_is_its_own_definition(warm_start):
    ranks = Ranks(PowerSGD(rank=2, warm_start=warm_start), zeros(w=(20, 6, 5), b=(20,)), world=3)
    errors = torch.zeros(3, 20, 30, dtype=torch.float64)
    q = ranks.compressor._random_start(ranks.params["w"], 0)
    for t in range(5):
        grads = random_grads(3, ranks.weights, t)
        matrices = torch.stack([g["w"].view(20, 30) for g in grads]) + errors
        bias = torch.stack([g["b"] for g in grads]).mean(0)
        if not warm_start:
            q = ranks.compressor._random_start(ranks.params["w"], t)
        basis = orthonormal_basis((matrices @ q.t()).sum(0))
        factors = matrices.transpose(1, 2) @ basis  # [3, m, r]
        q = factors.mean(0).t()
        errors = matrices - basis @ factors.transpose(1, 2)
        average = ranks.step(grads)
        torch.testing.assert_close(average["w"].view(20, 30), basis @ q, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(average["b"], bias, rtol=1e-15, atol=1e-15)
        for rank in range(3):
            error = ranks.states[rank]["w"]["error"].view(20, 30)
            torch.testing.assert_close(error, errors[rank], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_gradient_of_that_rank_is_recovered_exactly(rank, world):
    """In many equal layers too, and from the first step on: nothing of one layer enters another's norm."""
    weights = zeros(**{f"w{i}": (24, 30) for i in range(8)})
    ranks = Ranks(PowerSGD(rank=rank, min_compression_rate=1.0), weights, world)
    for t in range(3):
        whole = {name: low_rank((24, 30), rank, 100 * t + i) for i, name in enumerate(weights)}
        # Ranks differ, and yet their mean has that rank: each has a multiple of the same matrix.
        grads = [{n: g * (1.0 + r) for n, g in whole.items()} for r in range(world)]
        expected = {n: torch.stack([g[n] for g in grads]).mean(0) for n in whole}
        average = ranks.step(grads)
        for name, gradient in whole.items():
            torch.testing.assert_close(average[name], expected[name], rtol=0, atol=1e-12 * float(gradient.norm()))
            for state in ranks.states:
                assert state[name]["error"].norm() <= 1e-11 * gradient.norm()


@pytest.mark.parametrize("wire", [Wire(), HALF])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_is_lost(dtype, wire):
    """Sum of averages + mean of the final errors = sum of mean gradients, whatever the wire rounds away."""
    weights = {"w": torch.zeros(16, 24, dtype=dtype), "b": torch.zeros(9, dtype=dtype)}
    ranks = Ranks(PowerSGD(rank=1), weights, world=3, wire=wire)
    given = {n: torch.zeros(w.numel(), dtype=torch.float64) for n, w in weights.items()}
    got = {n: torch.zeros_like(g) for n, g in given.items()}
    for t in range(20):
        grads = random_grads(3, weights, t, dtype=dtype)
        for n in weights:
            given[n] += torch.stack([g[n] for g in grads]).double().mean(0)
        average = ranks.step(grads)
        for n in weights:
            got[n] += average[n].double()
    held = torch.stack([s["w"]["error"].double() for s in ranks.states]).mean(0)
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
    assert (got["w"] + held - given["w"]).norm() <= tolerance * given["w"].norm()
    assert held.norm() > 0.1 * given["w"].norm()  # there was something to lose


def test_a_matrix_that_was_zero_or_too_thin_is_seen_again():
    ranks = Ranks(PowerSGD(rank=2), zeros(w=(20, 30)), world=2)
    for content in (torch.zeros(600, dtype=torch.float64), low_rank((20, 30), 1, 0)):
        for _ in range(3):
            average = ranks.step([{"w": content.clone()} for _ in range(2)])["w"]
            assert average.isfinite().all()
        torch.testing.assert_close(average, content, rtol=1e-10, atol=1e-10)
    full = low_rank((20, 30), 2, 1)
    for _ in range(30):
        average = ranks.step([{"w": full.clone()} for _ in range(2)])["w"]
    torch.testing.assert_close(average, full, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "matrix", [torch.zeros(7, 3), torch.ones(7, 3), 1e-30 * torch.randn(7, 3), torch.eye(7)[:, :3]]
)
def test_the_basis_is_orthonormal_whatever_the_rank(matrix):
    basis = orthonormal_basis(matrix)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(3), rtol=0, atol=1e-6)
    torch.testing.assert_close(basis @ (basis.t() @ matrix), matrix, rtol=1e-5, atol=1e-36)


def test_a_skipped_step_changes_nothing():
    ranks = Ranks(PowerSGD(rank=2), zeros(w=(20, 30), b=(4,)), world=2)
    ranks.step(random_grads(2, ranks.weights, 0))
    before, grads = snapshot(ranks.states), random_grads(2, ranks.weights, 1)
    twin = copy_of(grads)
    ranks.abandon(grads)
    assert same_states(ranks.states, before)
    assert all(torch.equal(grads[r][n], twin[r][n]) for r in range(2) for n in twin[r])


def test_what_stays_dense_and_what_is_said_about_it():
    compressor = PowerSGD(rank=4, exclude=["head.*"])
    shapes = {"conv": (64, 3, 3, 3), "thin": (10, 13), "head.weight": (100, 100), "bias": (64,), "scale": ()}
    params = {n: Param(n, torch.zeros(s)) for n, s in shapes.items()}
    reasons = {n: compressor.reason(p) for n, p in params.items()}
    assert reasons == {
        "conv": None,
        "thin": "rank 4 saves less than 2x",
        "head.weight": "name matches 'head.*'",
        "bias": "dim <= 1",
        "scale": "dim <= 1",
    }
    text = compressor.describe(params)
    assert text.startswith("powersgd: rank 4, warm start; 1 of 5 tensors compressed (1,728 of")
    assert "1 where rank 4 saves less than 2x (130 elements)" in text


def test_matrices_follow_memory_order():
    weight = torch.zeros(8, 3, 5, 7)
    assert matrix_shape(weight) == (8, 105)
    assert matrix_shape(weight.to(memory_format=torch.channels_last)) == (8, 105)
    assert matrix_shape(torch.zeros(4, 9).t()) == (4, 9)
    assert matrix_shape(torch.zeros(1, 1)) == (1, 1)
    assert matrix_shape(torch.zeros(8, 3, 1, 1)) == (8, 3)
    assert matrix_shape(torch.zeros(8, 3, 1, 1).as_strided((8, 3, 1, 1), (3, 1, 99, 99))) == (8, 3)
    assert matrix_shape(torch.zeros(8, 3, 1, 1).to(memory_format=torch.channels_last)) == (8, 3)
    assert matrix_shape(torch.zeros(0, 3)) == (0, 0)


# --- PyTorch's own hook ---

N, M, FIRST = 18, 25, 3


def hook_run(rank, steps):
    """Averages of PyTorch's hook on random gradients from step `FIRST` on, and its memories before and behind them."""
    torch.manual_seed(0)
    net = nn.Linear(M, N, bias=False, dtype=torch.float64)
    ddp = DistributedDataParallel(net)
    state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, powerSGD_hook)
    averages, start = [], None
    for step in range(steps):
        if step == FIRST:  # the hook's own start has been drawn and used once
            start = (state.error_dict[0].clone(), state.q_memory_dict[0].clone())
        net.zero_grad()
        (ddp(torch.eye(M, dtype=torch.float64)).t() * gradient_of(step, rank)).sum().backward()
        averages.append(net.weight.grad.detach().clone().view(-1))
    error = float(state.error_dict[0].norm())
    del ddp
    dist.barrier()  # nobody tears the group down under the other
    return start, averages[FIRST:], error


def gradient_of(step, rank):
    return torch.randn(N, M, generator=torch.Generator().manual_seed(7919 * step + rank), dtype=torch.float64)


def test_averages_are_those_of_the_hook_and_the_residual_does_not_walk():
    """2000 steps of gradients of constant scale: same trajectory, while each rank's memory stays small."""
    steps = 2000
    answers = fork_ranks(2, hook_run, steps, timeout_s=100)
    ranks = Ranks(PowerSGD(rank=2, min_compression_rate=1.0), {"w": torch.zeros(N, M, dtype=torch.float64)})
    for rank, (start, _, _) in enumerate(answers):
        ranks.states[rank]["w"]["error"].copy_(start[0].view(-1))
        ranks.states[rank]["w"]["q"].copy_(start[1].view(M, 2).t().reshape(-1))
    for i, expected in enumerate(answers[0][1]):
        average = ranks.step([{"w": gradient_of(FIRST + i, r).view(-1)} for r in range(2)])["w"]
        if i < 50:  # random gradients have no leading directions: what is rounded differently grows from step to step
            torch.testing.assert_close(average, expected, rtol=0, atol=1e-8)
    for rank, (_, _, theirs) in enumerate(answers):
        assert float(ranks.states[rank]["w"]["error"].norm()) <= 0.2 * theirs


# --- the published data volumes, from real messages ---


def resnet18():
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        net = models.resnet18(num_classes=10)
        net.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    return [tuple(p.shape) for p in net.parameters()]


def wikitext2_lstm():
    """Three layers of 650, vocabulary 28,869, the decoder's weight tied to the embedding."""
    layer = [(2600, 650), (2600, 650), (2600,), (2600,)]
    return [(28_869, 650), *layer, *layer, *layer, (28_869,)]


@pytest.mark.parametrize(
    ("shapes", "steps", "rank", "mib"),
    [
        (resnet18, 24, 1, 4),
        (resnet18, 24, 2, 8),
        (resnet18, 24, 4, 14),
        (wikitext2_lstm, 70, 1, 25),
        (wikitext2_lstm, 70, 2, 38),
        (wikitext2_lstm, 70, 4, 64),
    ],
)
def test_data_an_epoch(shapes, steps, rank, mib):
    compressor, ledger, entries = PowerSGD(rank=rank), Ledger(), []
    for i, shape in enumerate(shapes()):
        param = Param(f"tensor{i}", torch.empty(shape))
        entries.append(Entry(param, torch.ones(math.prod(shape)), compressor.init_state(param)))
    running = exchange_bucket(entries, compressor, Gather(), Wire(), Step(0, 0.0, 0, 1), Flags.NONE, ledger)
    with pytest.raises(StopIteration):
        next(running)
    assert round(steps * ledger.payload_bytes / 2**20) == mib
