"""How ranks come to life on one machine: by a second start of the program, by fork, or by spawn.

Lightning's own script launcher repeats ``sys.argv`` and leaves the process group and its environment variables behind.
In a Hydra sweep that starts the whole sweep once per rank, and a second job that wants other devices crashes. The
launcher here starts children for *this* job only, names the rank that died, and leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf
from torch.multiprocessing.spawn import ProcessExitedException
from typing_extensions import override

from lightning_distlab.strategies.child_command import child_command
from lightning_distlab.strategies.child_processes import (
    REMEDY,
    DeadRank,
    RankDiedError,
    active_children,
    close_job,
    open_children,
    watch_parent,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ParallelStrategy, Strategy

StartMethod = Literal["popen", "fork", "spawn", "forkserver"]
START_METHODS = ("popen", "fork", "spawn", "forkserver")


class HydraSafeLauncher(_SubprocessScriptLauncher):
    """Start the program once more per further rank, with the overrides of the present Hydra job.

    Children live until the end of the job (fit, test, ...), which `close_job` or the end of the program marks.

    Args:
        strategy: Its cluster environment knows addresses and ranks; one that creates processes itself (torchrun) is
            left alone. Its ``check_before_launch(trainer, module)``, if any, may refuse a run before it costs anything.
        num_processes: Ranks on this machine.
        timeout_s: Seconds that ranks may go on after one has died.
    """

    def __init__(self, strategy: ParallelStrategy, num_processes: int, timeout_s: float = 1800.0) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, num_processes, int(getattr(strategy, "num_nodes", 1)))
        self.strategy = strategy
        self.timeout_s = timeout_s
        self._job = _job_identity()
        earlier = active_children()
        if earlier is not None and earlier.job != self._job:
            # A job of a user's own Hydra sweep ended and nobody said so; its children may have been ahead of rank 0.
            with suppress(RankDiedError):  # told already when it happened, and no fault of the new job
                close_job(failed=earlier.failed, meet=False)

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the children unless they run already, then run `function` here as rank 0.

        Raises:
            RankDiedError: If another rank of this machine died; names it, and its signal or exit code.
        """
        if trainer is not None:
            refuse_early(self.strategy, trainer, trainer.lightning_module)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        else:
            watch_parent(self.timeout_s)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            children = active_children()
            explained = children.explain(error) if children is not None else None
            if explained is None:
                raise
            raise explained from error

    @override
    def _call_children_scripts(self) -> None:
        self.procs = []
        self._check_can_spawn_children()
        environment = self.cluster_environment
        children = open_children(environment.node_rank() * self.num_processes, self.timeout_s, self._job)
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        children.start(self.num_processes, child_command)
        self.procs = children.procs


_LEFT = "rank 0 left by SystemExit"
_STOPPED = "rank 0 stopped after SIGTERM"


class ForkSafeLauncher(_MultiProcessingLauncher):
    """Lightning's fork and spawn launcher, with the dead rank named, and without waiting for a rank that has left."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run `function` in N new processes and return what rank 0 returned.

        Raises:
            RankDiedError: If a worker was killed or ended early.
            SIGTERMException: If the workers stopped because one of them got SIGTERM.
        """
        if trainer is not None:
            refuse_early(self._strategy, trainer, trainer.lightning_module)
        saved = {name: os.environ.get(name) for name in ("MASTER_PORT", "WORLD_SIZE")}
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except ProcessExitedException as error:
            raise RankDiedError(f"{DeadRank(error.error_index, error.error_pid, error.exit_code)}. {REMEDY}") from error
        finally:
            for name, value in saved.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: Any,
        global_states: Any = None,
    ) -> None:
        if self._start_method == "fork" and "OMP_NUM_THREADS" not in os.environ:
            # Threads of the parent's OpenMP pool do not survive a fork; a parallel region here would wait for them.
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        try:
            super()._wrapping_function(process_idx, trainer, function, args, kwargs, return_queue, global_states)
        except SystemExit as left:
            # A worker that leaves with exit code 0 has not failed, but the launching process waits for an answer.
            if process_idx == 0 and not left.code:
                return_queue.put(_STOPPED if isinstance(left, SIGTERMException) else _LEFT)
            raise

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        if worker_output == _STOPPED:
            raise SIGTERMException
        if worker_output == _LEFT:
            raise SystemExit
        super()._recover_results_in_main_process(worker_output, trainer)


def refuse_early(strategy: Strategy, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Let a strategy raise for what it cannot do, while there is one process only and nothing has been written."""
    check = getattr(strategy, "check_before_launch", None)
    if check is not None:
        check(trainer, module)


def _job_identity() -> str | None:
    """Name the Hydra job that runs now by its folder; None outside of Hydra."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized() or OmegaConf.is_missing(HydraConfig.get().runtime, "output_dir"):
        return None  # the second: a configuration composed in a test or a notebook, where no job runs
    return str(HydraConfig.get().runtime.output_dir)


def make_launcher(
    strategy: ParallelStrategy, num_processes: int, start_method: StartMethod, timeout_s: float = 1800.0
) -> HydraSafeLauncher | ForkSafeLauncher:
    """Return the launcher for a strategy's ``_configure_launcher``.

    Raises:
        ValueError: If `start_method` is unknown.
    """
    if start_method == "popen":
        return HydraSafeLauncher(strategy, num_processes, timeout_s)
    if start_method not in START_METHODS:
        raise ValueError(f"start_method={start_method!r} is unknown: use one of {', '.join(START_METHODS)}")
    return ForkSafeLauncher(strategy, start_method=start_method)
