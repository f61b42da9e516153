import itertools
import pickle
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.parallel.mesh import AXES, DATA_AXES, GRADIENT_AXES, Mesh, ProcessGroups
from tests.helpers.fork import fork_ranks

SIZES = st.tuples(*[st.integers(1, 3)] * 6)


@given(SIZES)
@settings(max_examples=40, deadline=None)
def test_rank_and_coordinate_are_inverse_and_row_major(sizes):
    mesh = Mesh(*sizes)
    grid = torch.arange(mesh.size).reshape(sizes)
    for place in itertools.product(*map(range, sizes)):
        coordinate = dict(zip(AXES, place))
        rank = mesh.rank(coordinate)
        assert rank == grid[place].item()
        assert mesh.coordinate(rank) == coordinate


@given(SIZES, st.sets(st.sampled_from(AXES), min_size=1))
@settings(max_examples=40, deadline=None)
def test_groups_cut_the_world_into_equal_disjoint_sets(sizes, axes):
    mesh, axes = Mesh(*sizes), tuple(axes)
    groups = mesh.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    assert [g[0] for g in groups] == sorted(g[0] for g in groups)
    for group in groups:
        assert group == sorted(group)
        assert len(group) == mesh.axis_size(axes)
        assert all(mesh.peers(rank, axes) == group for rank in group)
        others = [{a: c for a, c in mesh.coordinate(rank).items() if a not in axes} for rank in group]
        assert all(other == others[0] for other in others)


def test_written_out_example():
    mesh = Mesh(pipeline=2, replicate=2, tensor=2)
    assert mesh.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("replicate") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups(("pipeline", "tensor")) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert mesh.groups(("tensor", "pipeline")) == mesh.groups(("pipeline", "tensor"))
    assert [mesh.data_rank(r) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@given(SIZES)
@settings(max_examples=40, deadline=None)
def test_sampler_coordinate_numbers_the_data_shares_and_ignores_other_axes(sizes):
    mesh = Mesh(*sizes)
    for group in mesh.groups(DATA_AXES):
        assert [mesh.data_rank(rank) for rank in group] == list(range(mesh.data_size))
    for group in mesh.groups(("pipeline", "ring", "ulysses", "tensor")):
        assert len({mesh.data_rank(rank) for rank in group}) == 1
    assert mesh.gradient_size == mesh.data_size * mesh.ring * mesh.ulysses


def test_open_size_takes_the_rest():
    assert Mesh.of(8) == Mesh(replicate=8)
    assert Mesh.of(8, tensor=2) == Mesh(replicate=4, tensor=2)
    assert Mesh.of(8, replicate=1, shard=-1, tensor=2) == Mesh(shard=4, tensor=2)
    assert Mesh.of(4, replicate=2, tensor=2) == Mesh(replicate=2, tensor=2)


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (lambda: Mesh(tensor=0), ["tensor=0", ">= 1"]),
        (lambda: Mesh(ring=2.0), ["ring=2.0"]),
        (lambda: Mesh(shard=-1), ["Mesh.of(world_size, shard=-1)"]),
        (lambda: Mesh.of(8, shard=-1), ["replicate=-1 and shard=-1", "only one"]),
        (lambda: Mesh.of(8, tensor=3), ["world size 8", "tensor 3", "pipeline 1", "6 or 9"]),
        (lambda: Mesh.of(2, tensor=3), ["Nearest world sizes: 3"]),
        (lambda: Mesh.of(0), ["world size 0"]),
        (lambda: Mesh.of(8, replicate=3, tensor=2),
         ["pipeline 1 x replicate 3 x shard 1 x ring 1 x ulysses 1 x tensor 2 = 6", "has 8", "replicate=4", "start 6"]),
        (lambda: Mesh.of(7, replicate=3, tensor=2), ["= 6 ranks", "has 7", "change them"]),
        (lambda: Mesh().groups("tensors"), ["'tensors'", "ulysses"]),
        (lambda: Mesh(tensor=2).rank({"tensor": 2}), ["tensor=2", "0 to 1"]),
        (lambda: Mesh(tensor=2).coordinate(2), ["rank 2", "0 to 1"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_the_numbers_and_the_way_out(call, texts):
    with pytest.raises(ValueError, match=re.escape(texts[0])) as error:
        call()
    for text in texts:
        assert text in str(error.value)


def test_every_size_that_the_error_offers_fits():
    for world in range(1, 25):
        try:
            Mesh.of(world, replicate=3, shard=2, tensor=2)
        except ValueError as error:
            text = str(error).split(": ")[-1]
            for axis in AXES:
                if f"{axis}=" in text:
                    size = int(text.split(f"{axis}=")[1].split()[0].strip(","))
                    Mesh.of(world, **({"replicate": 3, "shard": 2, "tensor": 2} | {axis: size}))


def test_mesh_is_a_value():
    mesh = Mesh(replicate=2, tensor=4)
    assert mesh == pickle.loads(pickle.dumps(mesh))
    assert hash(mesh) == hash(Mesh(replicate=2, tensor=4))
    with pytest.raises(AttributeError):
        mesh.tensor = 2


def test_groups_of_a_real_world_talk_to_exactly_their_peers():
    mesh = Mesh(replicate=2, tensor=2)

    def body(rank):
        groups = ProcessGroups(mesh, rank, "gloo", timedelta(seconds=20))
        got = {}
        # asked for in another order on each rank: they are made in one order all the same
        for axes in [("tensor",), ("replicate",), DATA_AXES, GRADIENT_AXES][:: 1 if rank % 2 else -1]:
            group = groups.group(axes)
            got[axes] = dist.get_process_group_ranks(group), group.group_desc
        for axes in ["replicate", "tensor"]:
            total = torch.tensor([1 << rank])
            dist.all_reduce(total, group=groups.group(axes))
            got[axes] = total.item()
        assert groups.optional("pipeline") is None
        with pytest.raises(ValueError, match="pipeline has size 1"):
            groups.group("pipeline")
        with pytest.raises(ValueError, match="unions"):
            groups.group(("pipeline", "tensor"))
        torch_mesh = mesh.device_mesh("cpu")
        got["torch"] = torch_mesh.mesh_dim_names, tuple(torch_mesh.get_coordinate())
        groups.destroy()
        return got

    for rank, got in enumerate(fork_ranks(4, body)):
        for axes in ["replicate", "tensor"]:
            assert got[axes] == sum(1 << peer for peer in mesh.peers(rank, axes))
        assert got["tensor",] == (mesh.peers(rank, "tensor"), "tensor")
        assert got[GRADIENT_AXES] == (mesh.peers(rank, GRADIENT_AXES), "replicate_shard_ring_ulysses")
        assert got["torch"] == (AXES, tuple(mesh.coordinate(rank).values()))


def test_a_mesh_of_another_size_than_the_world_is_refused_before_any_group():
    def body(rank):
        with pytest.raises(ValueError, match="the world has 2"):
            ProcessGroups(Mesh(tensor=4), rank).group("tensor")

    fork_ranks(2, body)
