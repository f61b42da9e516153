import io
import random

import numpy as np
import pytest
import torch

from lightning_distlab.parallel.rng import RngStreams


def draw():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.random(), random.gauss(0, 1)


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def test_interleaved_streams_draw_what_separate_processes_draw():
    seed_all(7)
    alone = [draw() for _ in range(3)]
    seed_all(7)
    streams = RngStreams(2)
    got = {0: [], 1: []}
    for _ in range(3):
        for rank in (0, 1):
            with streams.use(rank):
                got[rank].append(draw())
    assert got == {0: alone, 1: alone}
    assert draw() == alone[0], "the process itself must not have moved"


def test_seeded_streams_differ_and_repeat():
    streams = RngStreams(["replicate", "tensor"])
    for _ in range(2):
        streams.seed("replicate", 1)
        streams.seed("tensor", 2)
        with streams.use("replicate"):
            one = draw()
        with streams.use("tensor"):
            two = draw()
        seed_all(1)
        assert one == draw()
        seed_all(2)
        assert two == draw()


def test_state_goes_through_a_weights_only_checkpoint():
    streams = RngStreams(2)
    streams.seed(1, 5)
    with streams.use(1):
        draw()
    file = io.BytesIO()
    torch.save(streams.state_dict(), file)
    expected = {}
    for rank in (0, 1):
        with streams.use(rank):
            expected[rank] = draw()
    other = RngStreams(2)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for rank in (0, 1):
        with other.use(rank):
            assert draw() == expected[rank]


def test_an_error_inside_a_block_keeps_both_positions():
    streams = RngStreams(1)
    streams.seed(0, 3)
    seed_all(4)
    outside = draw()
    seed_all(4)
    with pytest.raises(ZeroDivisionError), streams.use(0):
        raise ZeroDivisionError(draw())
    assert draw() == outside
    seed_all(3)
    draw()
    expected = draw()
    with streams.use(0):
        assert draw() == expected


def test_misuse_is_refused():
    streams = RngStreams(2)
    with pytest.raises(ValueError, match="unknown random stream 2"), streams.use(2):
        pass
    with streams.use(0), pytest.raises(ValueError, match="inside the block of stream 0"), streams.use(1):
        pass
    with pytest.raises(ValueError, match="as many"):
        RngStreams(3).load_state_dict(streams.state_dict())
    with pytest.raises(ValueError, match="each name once"):
        RngStreams(["a", "a"])
    with pytest.raises(ValueError, match="at least one"):
        RngStreams(0)
