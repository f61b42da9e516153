"""Random number streams: ranks of one process, or mesh axes, that draw without disturbing each other."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from typing_extensions import override

State = dict[str, Any]
"""One stream's position, by library."""


class RngStreams:
    """Separate torch (CPU and, once used, CUDA), numpy and Python random states, switched in and out by name.

    Streams begin where the process stands when they are made, all at the same place: N ranks of one process then draw
    what N processes seeded alike draw. `seed` tells them apart where that is wanted, e.g. dropout on tensor shards.
    Make them after CUDA is in use, or the device's state is left out.

    Args:
        names: How many streams (named 0 to n-1), or their names.
    """

    def __init__(self, names: int | Sequence[Hashable]) -> None:
        self.names: tuple[Hashable, ...] = tuple(range(names)) if isinstance(names, int) else tuple(names)
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"names={names!r}: at least one stream is needed, and each name once")
        start = get_state()
        self._states: dict[Hashable, State] = dict.fromkeys(self.names, start)
        self._active: Hashable | None = None

    @contextmanager
    def use(self, name: Hashable) -> Iterator[None]:
        """Draw from a stream inside the block; outside, the process goes on where it stood.

        Raises:
            ValueError: If the name is unknown, or a block of another stream is still open.
        """
        self._check(name)
        if self._active is not None:
            raise ValueError(f"stream {name!r} cannot start inside the block of stream {self._active!r}")
        outside = get_state()
        set_state(self._states[name])
        self._active = name
        try:
            yield
        finally:
            self._states[name] = get_state()
            self._active = None
            set_state(outside)

    def seed(self, name: Hashable, seed: int) -> None:
        """Start a stream anew from a seed."""
        with self.use(name):
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)

    def state_dict(self) -> dict[str, State]:
        """Positions of all streams, by the text of their names; tensors, numbers and lists, for `weights_only=True`."""
        return {str(name): _to_saved(self._states[name]) for name in self.names}

    def load_state_dict(self, states: Mapping[str, State]) -> None:
        """Put all streams back.

        Raises:
            ValueError: If the saved streams are not these.
        """
        expected = {str(name) for name in self.names}
        if set(states) != expected:
            raise ValueError(
                f"saved random streams {sorted(states)} are not the streams of this run, {sorted(expected)}: resume "
                "with as many (virtual) ranks as the checkpoint was written with"
            )
        self._states = {name: _from_saved(states[str(name)]) for name in self.names}

    def _check(self, name: Hashable) -> None:
        if name not in self._states:
            raise ValueError(f"unknown random stream {name!r}: there are {', '.join(map(repr, self.names))}")


class RankStreams(RngStreams):
    """Streams of ranks that one process plays: outside their blocks it stands where rank 0 does.

    What is drawn there (the seed of a validation loader, noise in a callback) every rank of a real run draws by
    itself. So streams that stood where rank 0's did move along with it; one that had drawn differently stays.
    """

    @contextmanager
    @override
    def use(self, name: Hashable) -> Iterator[None]:
        self._check(name)
        self._move_along()
        with super().use(name):
            yield
        set_state(self._states[self.names[0]])

    def _move_along(self) -> None:
        """Follow what was drawn outside since the last block."""
        first = self._states[self.names[0]]
        if self._active is not None or _same(now := get_state(), first):
            return
        self._states = {n: now if _same(state, first) else state for n, state in self._states.items()}


def get_state() -> State:
    """The random state of this process: torch CPU, torch's current CUDA device (if CUDA was used), numpy, Python."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _cuda_in_use() else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_state(state: State) -> None:
    """Put a state of `get_state` back."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def _same(a: State, b: State) -> bool:
    """Whether two states are one position."""
    if a is b:
        return True
    cuda = a["cuda"] is b["cuda"] or (a["cuda"] is not None and b["cuda"] is not None and a["cuda"].equal(b["cuda"]))
    keys = np.array_equal(a["numpy"][1], b["numpy"][1]) and a["numpy"][2:] == b["numpy"][2:]
    return bool(cuda and keys and torch.equal(a["torch"], b["torch"]) and a["python"] == b["python"])


def _to_saved(state: State) -> State:
    """In tensors and numbers, for a checkpoint: too slow for every switch of streams."""
    _, keys, *rest = state["numpy"]
    version, words, gauss = state["python"]
    return state | {
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
    }


def _from_saved(saved: State) -> State:
    """The inverse of `_to_saved`."""
    keys, *rest = saved["numpy"]
    version, words, gauss = saved["python"]
    return saved | {
        "numpy": ("MT19937", keys.numpy().astype(np.uint32), *rest),
        "python": (version, tuple(words.tolist()), gauss),
    }


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
