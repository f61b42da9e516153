import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.helpers.fork import RankError, fork_ranks


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_ranks_share_a_group(store):
    def body(rank, offset):
        total = torch.tensor([float(rank + offset)])
        dist.all_reduce(total)
        return total

    assert [t.item() for t in fork_ranks(3, body, 1, store=store)] == [6.0, 6.0, 6.0]


def test_traceback_of_a_rank_reaches_the_parent():
    def body(rank):
        if rank == 1:
            raise ZeroDivisionError("from rank one")

    with pytest.raises(RankError, match="from rank one"):
        fork_ranks(2, body)


def test_death_and_timeout_are_told_apart():
    def body(rank):
        os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None
        return rank

    assert fork_ranks(2, body, may_die={1}) == [0, None]
    with pytest.raises(RankError, match="rank 1: died"):
        fork_ranks(2, body)
    with pytest.raises(RankError, match="did not end within"):
        fork_ranks(1, lambda rank: signal.pause(), timeout_s=0.5)
