"""Lightning's DDP as it is, for comparison, started by the launcher that sweeps can live with."""

from __future__ import annotations

from datetime import timedelta

from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_distlab.strategies.launcher import StartMethod, make_launcher


class LightningDDP(DDPStrategy):
    """Stock `DDPStrategy`; only the way its processes are started is ours.

    Args:
        start_method: ``popen`` starts the program once more per rank, ``fork`` and ``spawn`` start workers.
        timeout_s: Seconds that a rank waits for another one in a collective.
        process_group_backend: ``gloo``, ``nccl``, ...; None lets torch choose by device.
        find_unused_parameters: Passed on to `DistributedDataParallel`.
    """

    def __init__(
        self,
        *,
        start_method: StartMethod = "popen",
        timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} must be positive: seconds to wait for a rank, e.g. timeout_s=1800")
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
        )
        self._timeout_s = timeout_s

    @override
    def _configure_launcher(self) -> None:
        self._launcher = make_launcher(self, self.num_processes, self._start_method, self._timeout_s)
