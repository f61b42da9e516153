"""Who carries out exchanges: real ranks under torch.distributed, or any number of them in one process."""

from lightning_distlab.exchange.drivers.in_process import InProcessDriver, Link
from lightning_distlab.exchange.drivers.torch import TorchDriver

__all__ = ["InProcessDriver", "Link", "TorchDriver"]
