"""The parameter server: push to one rank, pull from it (Li et al., OSDI 2014)."""

from __future__ import annotations

from functools import reduce
from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, Receive, Round, combine, sum_size
from lightning_distlab.payloads import Op, Payload


class ParameterServer(Collective):
    """One rank adds everything up: a reduce to it, then a broadcast from it.

        push (reduce)       x1 -> 0, x2 -> 0, x3 -> 0     0 adds x0 + x1 + x2 + x3, in rank order
        pull (broadcast)    0 -> 1, 0 -> 2, 0 -> 3

    2 steps for any W, each a synchronisation point. A worker sends M and receives M; the server receives (W - 1) M and
    sends (W - 1) M, so its link grows with W and decides the time: at 256 workers, 97.5 MB and 3 iterations a second it
    has to take in 73.1 GB/s. The server is one of the workers, or, dedicated, a rank of its own: then what it
    brings is left out, the W - 1 others are N workers, and N M come in and N M go out.

    Bounded delay: a worker goes on with what the server had `delay` steps ago, so it need not wait for the slowest push
    of the step under way. Here every step's average is applied exactly `delay` steps later (of those in which some rank
    had a gradient for the tensor), and nothing in the first ones: the most stale that the bound allows, and the same on
    all ranks and in every run. It shows what staleness does to convergence; messages are waited for all the same.

    Args:
        server: Rank that adds.
        dedicated: That rank only serves. For programs of one's own: every rank of a `Trainer` trains.
        delay: Steps after which an average is applied.

    Raises:
        ValueError: A negative server or delay.
    """

    name: ClassVar[str] = "parameter_server"
    ops: ClassVar[frozenset[Op]] = frozenset({Op.SUM, Op.MAX})

    def __init__(self, server: int = 0, dedicated: bool = False, delay: int = 0) -> None:
        if server < 0:
            raise ValueError(f"server={server} is no rank; use a number from 0 to the number of ranks - 1.")
        self.server = server
        self.dedicated = dedicated
        if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
            raise ValueError(f"delay={delay!r} must be a number of steps, an integer of at least 0.")
        self.delay = delay

    @override
    def check_world(self, world_size: int) -> None:
        if self.server >= world_size:
            raise ValueError(f"server={self.server} does not exist among {world_size} ranks; use a smaller number.")
        if self.dedicated and world_size < 2:
            raise ValueError("dedicated=True needs a second rank that works; use dedicated=False.")

    @override
    def contributor(self, rank: int, world_size: int) -> tuple[int, int]:
        return rank, world_size - self.dedicated

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        self.check_world(world_size)
        if world_size == 1:
            return payload
        workers = [worker for worker in range(world_size) if worker != self.server]
        if rank != self.server:
            yield Round(sends=((self.server, payload),))
            (total,) = yield Round(receives=(Receive(self.server, payload, world_size - self.dedicated),))
            return total
        pushed = yield Round(receives=[Receive(worker, payload) for worker in workers])
        if not self.dedicated:
            pushed.insert(self.server, payload)
        if op is Op.MAX:
            total = reduce(lambda a, b: combine(op, a, b), pushed)
        else:  # the sum of one is itself, in the form in which it has come
            total = type(payload).merge_all(pushed) if len(pushed) > 1 else pushed[0]
        yield Round(sends=[(worker, total) for worker in workers])
        return total

    @override
    def steps(self, world_size: int) -> int:
        return 2 if world_size > 1 else 0

    @override
    def sum_bytes(
        self,
        world_size: int,
        elements: int,
        density: float,
        entry_bytes: float,
        dense_bytes: float,
        *,
        rank: int | None = None,
    ) -> float:
        if world_size > 1 and rank not in (None, self.server):
            return sum_size(1, elements, density, entry_bytes, dense_bytes)
        return (world_size - 1) * sum_size(world_size - self.dedicated, elements, density, entry_bytes, dense_bytes)


def server_bandwidth(bytes_per_worker: float, workers: int, iterations_per_s: float) -> float:
    """Bytes per second that a server takes in, and as many that it sends out, when all workers push at every iteration.

    >>> round(server_bandwidth(97.5 * 2**20, 256, 3) / 2**30, 1)  # ResNet-50
    73.1
    """
    return bytes_per_worker * workers * iterations_per_s
