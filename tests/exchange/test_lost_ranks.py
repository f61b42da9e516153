"""Survivors find out who is missing from the notes in the store."""

import pickle
import time

import pytest
import torch.distributed as dist

from lightning_distlab.exchange.errors import RankLostError
from lightning_distlab.exchange.lost_ranks import name_missing_ranks, someone_broke_off


class DeadStore(dist.Store):
    """What is left when the rank that served the store has been killed."""

    def set(self, key, value):
        raise dist.DistNetworkError("Connection reset by peer")

    def check(self, keys):
        raise dist.DistNetworkError("Connection reset by peer")


def leave(store, rank, suspect):
    name_missing_ranks(store, [rank], rank, suspect=suspect, grace_s=0)


def test_accusations_are_followed_to_the_rank_without_a_note():
    store = dist.HashStore()
    assert not someone_broke_off(store)
    leave(store, 3, 2)
    assert someone_broke_off(store)
    leave(store, 4, 3)
    assert name_missing_ranks(store, range(6), 5, suspect=4, grace_s=60) == (2,)  # at once: 60 s are not waited for


def test_the_rank_that_serves_the_store_stays_for_the_others():
    store = dist.HashStore()
    started = time.monotonic()
    assert name_missing_ranks(store, range(4), 0, suspect=2, grace_s=0.3) == (2,)
    assert time.monotonic() - started >= 0.3


def test_without_a_suspect_the_ranks_without_notes_are_missing():
    store = dist.HashStore()
    leave(store, 0, None)
    assert name_missing_ranks(store, range(4), 3, grace_s=0.2) == (1, 2)
    leave(store, 1, None)
    assert name_missing_ranks(store, range(4), 3, grace_s=60) == (2,)


def test_ranks_that_accuse_each_other_are_all_alive():
    store = dist.HashStore()
    leave(store, 0, 1)
    assert name_missing_ranks(store, range(2), 1, suspect=0, grace_s=1) == ()


def test_a_lost_store_means_a_lost_host():
    assert name_missing_ranks(DeadStore(), range(4), 3, suspect=2, grace_s=1) == (0,)
    assert someone_broke_off(DeadStore())


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((2,), "Rank 2 was lost during ring"),
        ((1, 2), "Ranks 1, 2 were lost during ring"),
        ((), "though all of them still answer"),
        ((0,), "the log of rank 0 names it"),
    ],
)
def test_the_error_names_rank_exchange_and_cause(ranks, text):
    error = pickle.loads(pickle.dumps(RankLostError(ranks, "ring", "connection closed")))
    assert error.ranks == ranks
    assert text in str(error)
    assert "resume from the last checkpoint" in str(error)
    assert str(error).endswith("connection closed")
