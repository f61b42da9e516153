"""Who is missing, once a connection has broken.

A broken connection alone does not tell who died: when rank 2 is killed, rank 3 fails and goes down, and rank 0, which
talks to rank 3 only, sees that one's connection break. So each survivor leaves a note in the store ("rank 2 broke off
on me") before it goes down itself. Whoever finds its peer gone reads the peer's note and follows the accusations:
0 -> 3 -> 2. The end of the chain, which has left no note, is the rank that was lost. A collective of the backend does
not tell whose connection broke; there, all who wait for it look for notes from time to time, leave their own, and the
rank without one is the rank that was lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

_LOGGER = logging.getLogger(__name__)
_UNKNOWN = -1  # the note of a rank that fails in a collective of the backend: somebody is gone, but not who
_POLL_S = 0.05
_ANYBODY = "lightning_distlab/broken_off"
STORE_HOST = 0
"""Global rank that serves the store under every launcher."""


def someone_broke_off(store: Store) -> bool:
    """Whether any survivor has left a note; a lost store counts as one."""
    try:
        return bool(store.check([_ANYBODY]))
    except RuntimeError:  # all errors of a store derive from it
        return True


def name_missing_ranks(
    store: Store, ranks: Sequence[int], me: int, *, suspect: int | None = None, grace_s: float = 5.0
) -> tuple[int, ...]:
    """Find out which ranks are gone; every survivor calls this when its communication fails.

    Args:
        store: The store through which the ranks met.
        ranks: Global ranks of the group.
        me: This global rank.
        suspect: The peer whose connection broke; None where the backend does not say.
        grace_s: How long to wait for the notes of the other survivors. The rank that serves the store stays that long
            for their sake, others only until they know.

    Returns:
        Global ranks that are gone. The rank that serves the store where the store is out of reach; nobody where all
        have left a note and no accusation leads to a rank without one.
    """
    deadline = time.monotonic() + grace_s
    notes: dict[int, int] = {}
    try:
        store.set(_key(me), str(_UNKNOWN if suspect is None else suspect))
        store.set(_ANYBODY, "1")
        while True:
            for rank in ranks:
                if rank not in notes and store.check([_key(rank)]):
                    notes[rank] = int(store.get(_key(rank)))
            missing = tuple(rank for rank in ranks if rank not in notes)
            lost = _follow(me, notes)
            known = lost is not None and me != STORE_HOST
            if known or len(missing) <= 1 or time.monotonic() > deadline:
                return missing if lost is None else (lost,)
            time.sleep(_POLL_S)
    except RuntimeError as error:
        _LOGGER.debug("The store is out of reach: %s", error)
        return (STORE_HOST,)


def _follow(rank: int, notes: dict[int, int]) -> int | None:
    """The rank at the end of the accusations that start with that of `rank`; None where they lead nowhere."""
    seen = set()
    while rank in notes:
        if rank in seen or notes[rank] == _UNKNOWN:
            return None
        seen.add(rank)
        rank = notes[rank]
    return rank


def _key(rank: int) -> str:
    return f"{_ANYBODY}/{rank}"
