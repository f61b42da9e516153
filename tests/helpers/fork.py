"""Ranks as forked processes of one test.

A fork of a process that has imported torch is ready in milliseconds, and the function may be a closure. The parent
must have started no threads that hold locks, and no autograd: the engine's threads do not survive a fork.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankError(AssertionError):
    """A forked rank raised; the text holds its traceback."""


def fork_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 30.0,
    store: str = "file",
    may_die: Collection[int] = (),
    **kwargs: Any,
) -> list[Any]:
    """Run `function(rank, *args, **kwargs)` on forked ranks that share a gloo process group.

    Args:
        world_size: Number of ranks.
        function: Gets its rank first; what it returns is pickled back to the parent. May be a closure.
        *args: Passed on.
        timeout_s: After that many seconds all ranks are killed and the test fails.
        group_timeout_s: Timeout of the process group.
        store: `file` (survives the death of any rank) or `tcp` (served by rank 0, as launchers do).
        may_die: Ranks whose death by a signal is part of the test; their result is None.
        **kwargs: Passed on.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank raised (its traceback is in the text), died, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        pids: list[int] = []
        pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                _child(rank, world_size, lambda r: function(r, *args, **kwargs), theirs, store, folder, listener,
                       group_timeout_s)  # fmt: skip
            theirs.close()
            pids.append(pid)
            pipes.append(ours)
        try:
            answers = _collect(pipes, timeout_s)
        finally:
            for pid in pids:
                _reap(pid)
            for pipe in pipes:
                pipe.close()
    failures = [f"rank {r}: {text}" for r, (ok, text) in answers.items() if not ok and r not in may_die]
    if failures:
        raise RankError("\n".join(failures))
    return [answers[r][1] if answers[r][0] else None for r in range(world_size)]


def _collect(pipes: list[Connection], timeout_s: float) -> dict[int, tuple[bool, Any]]:
    """One (success, result or text) for each rank."""
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(pipes):
        waiting = {pipe: r for r, pipe in enumerate(pipes) if r not in answers}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            answers.update(dict.fromkeys(waiting.values(), (False, f"did not end within {timeout_s} s")))
        for pipe in ready:
            try:
                answers[waiting[pipe]] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                answers[waiting[pipe]] = (False, "died without an answer")
    return answers


def _reap(pid: int) -> None:
    """End a child of ours that has answered, or will not, and collect it."""
    for _ in range(100):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _child(
    rank: int,
    world_size: int,
    function: Callable[[int], Any],
    pipe: Connection,
    store: str,
    folder: str,
    listener: socket.socket,
    group_timeout_s: float,
) -> None:
    """What a forked rank does; it never returns into the test."""
    code = 1
    try:
        torch.set_num_threads(1)
        timeout = timedelta(seconds=group_timeout_s)
        if store == "tcp":
            port, fd = listener.getsockname()[1], os.dup(listener.fileno()) if rank == 0 else None
            shared: dist.Store = dist.TCPStore(
                "127.0.0.1", port, world_size, rank == 0, timeout, master_listen_fd=fd, wait_for_workers=False
            )
        else:
            shared = dist.FileStore(str(Path(folder) / "store"), world_size)
        listener.close()
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=world_size, timeout=timeout)
        answer: tuple[bool, Any] = (True, function(rank))
        if dist.is_initialized():
            dist.destroy_process_group()
        code = 0
    except BaseException:
        answer = (False, traceback.format_exc())
    try:
        pipe.send_bytes(pickle.dumps(answer))
        pipe.close()
    finally:
        os._exit(code)
