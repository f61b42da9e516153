"""Every case is held against torch's own function on the full tensors of one process.

What the assertions would catch: an axis summed over twice or not at all (norm off by a factor of about sqrt(2)), a
mixture of meshes refused or summed over the wrong group, an uneven last shard left out, a scale applied to a copy.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_distlab.parallel.clipping import clip_grad_norm_, clip_grad_value_, total_norm
from lightning_distlab.parallel.mesh import Mesh, ProcessGroups
from tests.helpers.fork import fork_ranks

NORMS = [1.0, 2.0, 3.0, math.inf]
SHAPES = [(7, 3), (5,), (), (4, 6), (3, 0)]


def full_params(shapes=SHAPES, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in shapes:
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        params.append(param)
    return params


def reference(max_norm, p, **kwargs):
    params = full_params(**kwargs)
    norm = nn.utils.clip_grad_norm_([q for q in params if q.numel()], max_norm, p)
    return norm, [q.grad for q in params]


def distributed(param, mesh, placements):
    out = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
    out.grad = distribute_tensor(param.grad, mesh, placements)
    return out


def gathered(param):
    return param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_plain_tensors_as_in_torch(p, foreach, max_norm):
    params = full_params()
    norm = clip_grad_norm_(params, max_norm, p, foreach=foreach)
    expected, grads = reference(max_norm, p)
    torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0)
    for param, grad in zip(params, grads):
        torch.testing.assert_close(param.grad, grad, rtol=1e-13, atol=0)
    assert (norm > max_norm) == (max_norm == 0.5), "one case clips, the other does not"


def test_low_precision_gradients_get_a_norm_in_fp32():
    params = [*full_params([(1000,)], torch.bfloat16), *full_params([(50,)], torch.float32, seed=1)]
    exact = torch.cat([param.grad.double() for param in params]).norm()
    before = params[0].grad.clone()
    norm = clip_grad_norm_(params, 1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    assert params[0].grad.dtype == torch.bfloat16
    assert torch.equal(params[0].grad, (before.float() / (norm + 1e-6)).bfloat16())


def test_given_twice_counts_once_and_missing_gradients_are_left_out():
    params = full_params()
    params.append(nn.Parameter(torch.zeros(3)))
    expected = total_norm(full_params())
    norm = clip_grad_norm_([*params, params[0], params[1]], 1.0)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(total_norm(params), torch.ones_like(norm), rtol=1e-5, atol=0)
    assert clip_grad_norm_([], 1.0).item() == 0
    assert clip_grad_norm_(params[0], 1.0) <= 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("p", NORMS)
def test_non_finite_gradients(bad, p):
    params = full_params()
    params[1].grad[2] = bad
    before = [param.grad.clone() for param in params]
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        clip_grad_norm_(params, 1.0, p, error_if_nonfinite=True)
    assert all(torch.equal(a.nan_to_num(), b.grad.nan_to_num()) for a, b in zip(before, params)), "nothing was scaled"
    norm = clip_grad_norm_(params, 1.0, p)
    assert norm.isnan() if math.isnan(bad) else norm.isinf()


@pytest.mark.parametrize("foreach", [None, False])
def test_value_clipping_as_in_torch(foreach):
    params, expected = full_params(), full_params()
    clip_grad_value_(params, 0.3, foreach=foreach)
    nn.utils.clip_grad_value_(expected, 0.3)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(params, expected))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: clip_grad_norm_(p, -1.0), "max_norm=-1.0"),
        (lambda p: clip_grad_norm_(p, math.nan), "max_norm=nan"),
        (lambda p: clip_grad_norm_(p, 1.0, 0.0), "norm_type=0.0"),
        (lambda p: clip_grad_value_(p, -1.0), "clip_value=-1.0"),
    ],
)
def test_bad_numbers_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call(full_params())


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        clip_grad_norm_(table.parameters(), 1.0)


def test_shards_copies_and_plain_tensors_mixed_on_two_ranks():
    """Row 7 over 2 ranks is uneven, (3, 0) is empty; a scalar can only be replicated."""
    expected = {p: reference(0.5, p) for p in NORMS}

    def body(rank):
        mesh = dist.init_device_mesh("cpu", (2,))
        got = {}
        for p in NORMS:
            full = full_params()
            params = [
                distributed(full[0], mesh, [Shard(0)]),
                distributed(full[1], mesh, [Replicate()]),
                full[2],
                distributed(full[3], mesh, [Shard(1)]),
                full[4],
            ]
            got[p] = clip_grad_norm_(params, 0.5, p), [gathered(param) for param in params]
        return got

    for got in fork_ranks(2, body):
        for p, (norm, grads) in got.items():
            torch.testing.assert_close(norm, expected[p][0], rtol=1e-12, atol=0)
            for grad, wanted in zip(grads, expected[p][1]):
                torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=0)


def test_several_meshes_at_once_on_four_ranks():
    shapes = [(7, 3), (5, 4), (6,), (4, 6), (9, 2)]
    expected_norm, expected = reference(0.5, 2.0, shapes=shapes)

    def body(rank):
        mesh = Mesh(shard=2, tensor=2).device_mesh("cpu")
        shard, tensor, both = mesh["shard"], mesh["tensor"], mesh["shard", "tensor"]
        full = full_params(shapes)
        params = [
            distributed(full[0], shard, [Shard(0)]),
            distributed(full[1], both, [Shard(0), Shard(1)]),
            distributed(full[2], tensor, [Shard(0)]),
            distributed(full[3], both, [Replicate(), Shard(0)]),
            full[4],
        ]
        norm = clip_grad_norm_(params, 0.5)
        return norm, [gathered(param) for param in params]

    for norm, grads in fork_ranks(4, body):
        torch.testing.assert_close(norm, expected_norm, rtol=1e-12, atol=0)
        for grad, wanted in zip(grads, expected):
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=0)


def test_fully_shard_around_tensor_parallel_layers():
    """The usual 2-D setup, strided shards included, next to a layer that is only sharded."""

    def build():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)).double()

    data = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def body(rank):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        model = build()
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
        model(data[rank // 2]).square().mean().backward()
        norm = clip_grad_norm_(model.parameters(), 0.01)
        return norm, [gathered(param) for param in model.parameters()]

    model = build()
    torch.stack([model(part).square().mean() for part in data]).mean().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for norm, grads in fork_ranks(4, body):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for grad, param in zip(grads, model.parameters()):
            torch.testing.assert_close(grad, param.grad, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_stages_with_a_tied_parameter_and_a_stage_without_gradients(p):
    """Three stages: weights on 0 and 1, a copy of 0's last weight on 1, nothing trainable on 2."""
    expected_norm, expected = reference(0.5, p)

    def body(rank):
        group = ProcessGroups(Mesh(pipeline=3), rank).group("pipeline")
        full = full_params()
        tied = full[3]
        params = {0: [full[0], tied], 1: [full[1], full[2], tied], 2: []}[rank]
        norm = clip_grad_norm_(params, 0.5, p, reduce_over=[group], counted=lambda q: rank == 0 or q is not tied)
        return norm, [param.grad for param in params]

    results = fork_ranks(3, body)
    for rank, indices in enumerate([[0, 3], [1, 2, 3], []]):
        norm, grads = results[rank]
        # a stage without parameters cannot know that the others are fp64 and answers in fp32
        torch.testing.assert_close(norm.double(), expected_norm, rtol=1e-12 if grads else 1e-7, atol=0)
        for grad, index in zip(grads, indices):
            torch.testing.assert_close(grad, expected[index], rtol=1e-12, atol=0)


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_nan_on_one_rank_reaches_all(p):
    def body(rank):
        params = full_params()
        if rank == 1:
            params[0].grad[0, 0] = math.nan
        return clip_grad_norm_(params, 0.5, p, reduce_over=[dist.group.WORLD])

    assert all(norm.isnan() for norm in fork_ranks(3, body))


def test_partial_sums_are_summed_for_the_norm_and_refused_for_value_clipping():
    expected_norm, (expected, *_) = reference(0.5, 2.0, shapes=[(7, 3)])

    def body(rank):
        mesh = dist.init_device_mesh("cpu", (2,))
        (full,) = full_params([(7, 3)])
        share = 0.25 if rank else 0.75
        param = nn.Parameter(distribute_tensor(full.detach(), mesh, [Replicate()]))
        param.grad = DTensor.from_local(full.grad * share, mesh, [Partial()])
        with pytest.raises(ValueError, match="redistribute"):
            clip_grad_value_([param], 1.0)
        return clip_grad_norm_([param], 0.5), param.grad.full_tensor()

    for norm, grad in fork_ranks(2, body):
        torch.testing.assert_close(norm, expected_norm, rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-16)


def test_value_clipping_of_shards():
    expected = full_params()
    nn.utils.clip_grad_value_(expected, 0.3)

    def body(rank):
        mesh = dist.init_device_mesh("cpu", (2,))
        full = full_params()
        params = [distributed(full[0], mesh, [Shard(0)]), full[1]]
        clip_grad_value_(params, 0.3)
        return [gathered(param) for param in params]

    for grads in fork_ranks(2, body):
        assert all(torch.equal(grad, wanted.grad) for grad, wanted in zip(grads, expected))
