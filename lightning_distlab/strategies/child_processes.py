"""The ranks that this process has started: their life, their death, and what is put back afterwards."""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

# What a launch writes into the environment; every name is put back as it was when the job is over.
JOB_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
PARENT_PID = "DISTLAB_PARENT_PID"
REMEDY = "The other ranks were stopped; resume from the last checkpoint (ckpt_path=...)."
_POLL_S = 0.25
_LOST_PEER = re.compile(
    r"closed by peer|connection (reset|closed|refused)|broken pipe|timed out|gloo|nccl|tcpstore|socket", re.IGNORECASE
)


class RankDiedError(RuntimeError):
    """A rank ended before the job did. The message names the rank and how it ended."""


@dataclass(frozen=True)
class DeadRank:
    """One rank that ended: its global number, process id and exit code (negative: a signal)."""

    rank: int
    pid: int
    code: int

    def __str__(self) -> str:
        if self.code < 0:
            how = f"was killed by {signal.Signals(-self.code).name}"
        else:
            how = f"ended with exit code {self.code}"
        return f"rank {self.rank} (process {self.pid}) {how}"


class ChildProcesses:
    """Ranks 1..N-1 of one job on this machine, started and watched by rank 0.

    Args:
        first_rank: Global rank of the launching process; child i has rank ``first_rank + i``.
        timeout_s: Seconds that the launching process may go on after a rank has died, before it ends itself.
        job: Name of the Hydra job they belong to (its folder); None outside of Hydra.
    """

    def __init__(self, first_rank: int, timeout_s: float, job: str | None) -> None:
        self.first_rank = first_rank
        self.job = job
        self.timeout_s = timeout_s
        self.procs: list[subprocess.Popen[bytes]] = []
        self.dead: DeadRank | None = None
        self.failed = False
        self._saved_env = {name: os.environ.get(name) for name in JOB_VARIABLES}
        self._saved_threads = torch.get_num_threads()
        self._closing = threading.Event()

    def start(self, num_processes: int, command: Callable[[int], tuple[list[str], str | None]]) -> None:
        """Start children 1..num_processes-1 with the present environment and begin to watch them."""
        for local_rank in range(1, num_processes):
            env = os.environ | {"LOCAL_RANK": str(local_rank), PARENT_PID: str(os.getpid())}
            arguments, cwd = command(local_rank)
            log.debug("starting local rank %d: %s", local_rank, arguments)
            self.procs.append(subprocess.Popen(arguments, env=env, cwd=cwd))
        if self.procs:
            threading.Thread(target=self._watch, name="distlab-rank-watch", daemon=True).start()

    def find_dead(self, wait_s: float = 0.0, codes: Callable[[int], bool] = bool) -> DeadRank | None:
        """Return the rank that failed (exit code accepted by `codes`), waiting up to `wait_s` seconds for the news."""
        deadline = time.monotonic() + wait_s
        while self.dead is None:
            for i, proc in enumerate(self.procs, start=1):
                code = proc.poll()
                if code is not None and codes(code):
                    # a signal explains more than the exit codes it causes in the other ranks
                    candidate = DeadRank(self.first_rank + i, proc.pid, code)
                    if self.dead is None or (code < 0 <= self.dead.code):
                        self.dead = candidate
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S / 5)
        return self.dead

    def explain(self, error: BaseException) -> RankDiedError | None:
        """Return the error to show instead, if `error` on this rank is only the echo of another rank's death."""
        self.failed = True
        if isinstance(error, RankDiedError):
            return None
        is_echo = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
        )
        dead = self.find_dead(wait_s=3.0 if is_echo else 0.0)
        if dead is None and is_echo:
            dead = self.find_dead(codes=lambda code: True)
        if dead is None or not (is_echo or dead.code < 0):
            return None
        where = "; its own log is in the run's folder" if dead.code > 0 else ""
        return RankDiedError(f"{dead}{where}. {REMEDY}")

    def close(self, *, failed: bool) -> None:
        """Wait for the children (kill them after a grace when `failed`) and put environment and threads back."""
        self._closing.set()
        self._wait(10.0 if failed else self.timeout_s)
        if not failed:
            self.find_dead()
        for name, value in self._saved_env.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        torch.set_num_threads(self._saved_threads)

    def signal_all(self, signum: int) -> None:
        """Send a signal to every child that still runs."""
        for proc in self.procs:
            proc.send_signal(signum)

    def _wait(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for proc in self.procs:
            with suppress(subprocess.TimeoutExpired):
                proc.wait(max(0.0, deadline - time.monotonic()))
        for signum, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            alive = [proc for proc in self.procs if proc.poll() is None]
            for proc in alive:
                log.warning("process %d has not ended within %.0f s: sending %s", proc.pid, grace_s, signum.name)
                proc.send_signal(signum)
            for proc in alive:
                with suppress(subprocess.TimeoutExpired):
                    proc.wait(patience_s)

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            dead = self.find_dead()
            if dead is None:
                continue
            log.error("%s; stopping the other ranks", dead)
            # peers of a gloo or NCCL group notice by themselves as a rule; the rest is stuck in a collective
            if not self._closing.wait(5.0):
                self.signal_all(signal.SIGKILL)
            if not self._closing.wait(self.timeout_s):
                sys.stderr.write(f"{dead}; rank {self.first_rank} hung for {self.timeout_s:.0f} s after it: ending\n")
                sys.stderr.flush()
                os._exit(1)
            return


_active: ChildProcesses | None = None  # like the environment variables, a fact about the whole process


def active_children() -> ChildProcesses | None:
    """Return the children of the job that this process is running, if it has started any."""
    return _active


def open_children(first_rank: int, timeout_s: float, job: str | None) -> ChildProcesses:
    """Make the group of children for a new job."""
    global _active
    assert _active is None, "the job before must be closed"
    _active = ChildProcesses(first_rank, timeout_s, job)
    atexit.register(_close_at_exit)
    return _active


def close_job(*, failed: bool = False, meet: bool = True) -> None:
    """End the distributed part of a job on this rank, so that the next job of this process starts from nothing.

    All ranks meet (unless `failed`, or not `meet`), the process group is destroyed, children are waited for,
    environment variables and thread counts return to their former values. Harmless when nothing is open.

    Raises:
        RankDiedError: If the job went well here but a child ended with an error.
    """
    global _active
    children, _active = _active, None
    try:
        if dist.is_available() and dist.is_initialized():
            if meet and not failed:
                _meet()
            dist.destroy_process_group()
    except RuntimeError as error:
        explained = children.explain(error) if children is not None else None
        failed = True
        raise (explained or error) from error
    finally:
        if children is not None:
            children.close(failed=failed)
    if children is not None and children.dead is not None and not failed:
        raise RankDiedError(f"{children.dead}, after training had ended on rank {children.first_rank}")


def _meet() -> None:
    if dist.get_backend() == "nccl":
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


def _close_at_exit() -> None:
    # In a program without our `app`, the end of the script is the end of the job. No barrier: a rank may have failed.
    global _active
    children, _active = _active, None
    if children is None:
        return
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    children.close(failed=children.failed or children.find_dead() is not None)


def watch_parent(timeout_s: float) -> None:
    """On a child: end this process when the launching rank has died and the collectives have not noticed in time."""
    parent = os.environ.get(PARENT_PID)
    if parent is None or os.getppid() != int(parent):
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(4 * _POLL_S)
        me = os.environ.get("LOCAL_RANK")
        sys.stderr.write(f"rank 0 of this machine (process {parent}) died; local rank {me} ends\n")
        sys.stderr.flush()
        time.sleep(min(timeout_s, 10.0))
        os._exit(1)

    threading.Thread(target=watch, name="distlab-parent-watch", daemon=True).start()
