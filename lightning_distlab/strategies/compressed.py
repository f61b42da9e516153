"""Data parallelism with any compressor over any collective, as a Lightning strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distlab.collectives import Native
from lightning_distlab.collectives.base import Collective
from lightning_distlab.compression import NoCompression
from lightning_distlab.compression.base import Compressor, Param
from lightning_distlab.exchange.drivers import InProcessDriver, TorchDriver
from lightning_distlab.exchange.engine import Engine
from lightning_distlab.exchange.ledger import Ledger
from lightning_distlab.parallel.mesh import Mesh
from lightning_distlab.parallel.rng import RankStreams
from lightning_distlab.payloads import Wire
from lightning_distlab.strategies import compat
from lightning_distlab.strategies.adapters import Adapter, BucketAdapter, NamedAdapter, StepFacts
from lightning_distlab.strategies.checks import check_devices, check_options, check_run
from lightning_distlab.strategies.comm_state import KEY
from lightning_distlab.strategies.launcher import StartMethod, make_launcher
from lightning_distlab.strategies.momentum import MomentumLoan
from lightning_distlab.strategies.progress import epoch_fraction, global_seed
from lightning_distlab.strategies.replicas import average_buffers, check_replicas, check_same_model
from lightning_distlab.strategies.resume import restore_engine, save_engine, stock_optimizer_state, take_optimizer_state
from lightning_distlab.strategies.token_mean import TokenMean
from lightning_distlab.strategies.trainable import Trainable, follow, gradients_as_views
from lightning_distlab.strategies.virtual import VirtualAdapter, VirtualBatch, VirtualLoader

log = logging.getLogger(__name__)

Overlap = Literal["bucket", "after_backward"]
CommState = Literal["per_rank", "mean", "drop", "reset"]


class CompressedStrategy(DDPStrategy):
    """Data parallel training that exchanges what a compressor makes of the gradients.

    Arguments:
        compressor: What is sent; default nothing compressed.
        collective: How it is summed; default the backend's own all-reduce.
        wire: Codecs of the messages; default exact values.
        overlap: `bucket` exchanges during the backward pass through DDP's hook, `after_backward` by name when it is
            over. Default: `bucket`, unless the compressor needs the whole gradient, parameters are frozen, optimization
            is manual, or ranks are virtual.
        virtual_ranks: Play this many ranks in one process.
        comm_state: What checkpoints hold of residuals and momenta: `per_rank` all of them (exact resume), `mean` their
            average, `drop` nothing; `reset` also starts anew when a checkpoint has none, or in spite of it.
        bucket_cap_mb: Size of a bucket in MiB.
        find_unused_parameters: Some parameters take no part in some steps. That is always allowed with
            `overlap="after_backward"`, which this selects.
        check_replicas_every_n_steps: Debug switch: compare the weights of all ranks bit for bit; 0 never.
        start_method: `popen` starts the program once more per rank; `fork` and `spawn` start workers of this process.
        timeout_s: Seconds after which a silent rank counts as lost.
        process_group_backend: `gloo`, `nccl`; default by device.
        **kwargs: Further arguments of `DDPStrategy` and `DistributedDataParallel`. `gradient_as_bucket_view` is on by
            default unless the network has convolutions, which such a layout slows down on CPUs.

    Raises:
        ValueError: An option, or the pair of compressor and collective, is not possible; the text says what is.
    """

    def __init__(
        self,
        compressor: Compressor | None = None,
        collective: Collective | None = None,
        *,
        wire: Wire | None = None,
        overlap: Overlap | None = None,
        virtual_ranks: int = 1,
        comm_state: CommState = "per_rank",
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        check_replicas_every_n_steps: int = 0,
        start_method: StartMethod = "popen",
        timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.compressor = compressor or NoCompression()
        self.collective = collective or Native()
        check_options(
            self.compressor,
            self.collective,
            overlap,
            comm_state,
            virtual_ranks,
            bucket_cap_mb,
            timeout_s,
            find_unused_parameters,
            check_replicas_every_n_steps,
            start_method,
        )
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=False,
            **kwargs,
        )
        self.wire = wire or Wire()
        self.virtual_ranks = virtual_ranks
        self.ledger = Ledger()
        self._overlap = overlap
        self._comm_state = comm_state
        self._timeout_s = timeout_s
        self._bucket_bytes = int(bucket_cap_mb * 2**20)
        self._check_every = check_replicas_every_n_steps
        self._adapter: Adapter | None = None
        self._loan: MomentumLoan | None = None
        self._names: dict[int, str] = {}
        self._takes_part: Trainable | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._loaded_any = False
        self._mean: TokenMean | None = None
        self._rng: RankStreams | None = None
        self._blocked = False
        self._opened_group = False

    # --- facts

    @property
    def averaged_ranks(self) -> int:
        """Number of ranks, real or virtual, over which gradients are averaged."""
        return self.virtual_ranks if self.virtual_ranks > 1 else self.world_size

    @property
    def mesh(self) -> Mesh:
        """All ranks on the `replicate` axis."""
        return Mesh(replicate=self.averaged_ranks)

    @property
    def overlap(self) -> Overlap:
        """How gradients reach the engine in this run."""
        return "bucket" if isinstance(self._adapter, BucketAdapter) else "after_backward"

    @property
    def engine(self) -> Engine | None:
        """The exchange engine, while fitting."""
        return self._adapter.engine if self._adapter else None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = Mesh(replicate=self.num_nodes * self.num_processes)
        return {"num_replicas": mesh.data_size, "rank": mesh.data_rank(self.global_rank)}

    def comm_summary(self) -> dict[str, float]:
        """What was communicated so far, as this rank counts it; bytes, milliseconds, steps."""
        ledger, rank = self.ledger, 0 if self.virtual_ranks > 1 else self.global_rank
        payload = float(ledger.payload_bytes)
        return {
            "comm/dense_bytes": float(ledger.dense_bytes),
            "comm/payload_bytes": payload,
            "comm/payload_ratio": ledger.dense_bytes / payload if payload else 0.0,
            "comm/bytes_sent_per_rank": float(ledger.bytes_sent(rank)),
            "comm/codec_ms": 1e3 * ledger.codec_s,
            "comm/exchange_ms": 1e3 * ledger.exchange_s,
            "comm/steps": float(ledger.steps),
            "comm/skipped_steps": float(ledger.skipped_steps),
        }

    # --- life cycle

    @override
    def _configure_launcher(self) -> None:
        self._launcher = make_launcher(self, self.num_processes, self._start_method, self._timeout_s)

    def check_before_launch(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Refuse what cannot work; the launcher asks before it starts processes."""
        if trainer.state.fn == TrainerFn.FITTING:
            check_run(trainer, module, self.compressor, self.virtual_ranks)
            check_devices(self.root_device, self._layer_sync)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        self.check_before_launch(trainer, module)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        super().setup(trainer)
        params = {name: Param(name, p.detach()) for name, p in module.named_parameters() if p.requires_grad}
        if self.compressor.owns_momentum:
            self._loan = MomentumLoan(self.optimizers, params, self._names, self.compressor.name)
        engine = self._build_engine(params)
        self._adapter = self._build_adapter(engine, module)
        if self._loaded_any:
            restore_engine(engine, self._loaded, self._comm_state)
        compat.silence_sigterm_broadcast(trainer)
        rank_zero_info(self._announcement(engine))

    @override
    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        check_same_model(module, self.root_device)
        if self._uses_buckets(module):
            self._ddp_kwargs.setdefault("gradient_as_bucket_view", gradients_as_views(module))
            self.model = self._setup_model(module)
        else:
            _sync_module_states(module)

    def _uses_buckets(self, module: pl.LightningModule) -> bool:
        """Whether DDP's reducer feeds the engine in this run."""
        if self.virtual_ranks > 1 or not module.automatic_optimization:
            return False
        if self._overlap is not None:
            return self._overlap == "bucket"
        if self._ddp_kwargs.get("find_unused_parameters"):
            return False
        return not self.compressor.needs_whole_gradient and all(p.requires_grad for p in module.parameters())

    def _build_engine(self, params: dict[str, Param]) -> Engine:
        if self.virtual_ranks > 1:
            driver: Any = InProcessDriver(self.virtual_ranks, ledger=self.ledger)
        else:
            driver = TorchDriver(device=self.root_device, ledger=self.ledger)
        return Engine(self.compressor, self.collective, driver, params, self.wire, seed=global_seed())

    def _build_adapter(self, engine: Engine, module: pl.LightningModule) -> Adapter:
        self._mean = TokenMean(self.virtual_ranks, self.averaged_ranks, self.root_device)
        if self.virtual_ranks > 1:
            return VirtualAdapter(engine, self._facts, self._names, module, self._streams(), self._bucket_bytes)
        if isinstance(self.model, DistributedDataParallel):
            return BucketAdapter(engine, self._facts, self._names, self.model)
        return NamedAdapter(engine, self._facts, self._names, self._bucket_bytes)

    def _streams(self) -> RankStreams:
        if self._rng is None:
            self._rng = RankStreams(self.virtual_ranks)
        return self._rng

    def _announcement(self, engine: Engine) -> str:
        ranks = f"{self.averaged_ranks} {'virtual ' if self.virtual_ranks > 1 else ''}ranks"
        if self.averaged_ranks == 1:
            ranks = "1 device: nothing is communicated, the compressor acts on this device's own gradients"
        return f"{self.compressor.describe(engine.params)}; over {self.collective.name}, {self.overlap}; {ranks}."

    @override
    def setup_distributed(self) -> None:
        self._opened_group = not dist.is_initialized()
        super().setup_distributed()

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            compat.restore_sigterm_broadcast(module.trainer)
        if self._loan is not None:
            self._loan.close()
        self._loan, self._adapter, self._takes_part, self._mean = None, None, None, None
        self._loaded, self._loaded_any = None, False
        super().teardown()
        if self._opened_group and dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()  # forks of this process would inherit it

    # --- a step

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer if self.lightning_module else None
        if self.virtual_ranks == 1 or trainer is None or not trainer.training:
            return dataloader
        return VirtualLoader(dataloader, self._streams(), self.virtual_ranks)  # type: ignore[arg-type]

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, VirtualBatch):
            return VirtualBatch(
                super(CompressedStrategy, self).batch_to_device(b, device, dataloader_idx) for b in batch
            )
        return super().batch_to_device(batch, device, dataloader_idx)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._blocked = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._blocked = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        self._follow_requires_grad(module)
        assert self._mean is not None
        output: STEP_OUTPUT
        if isinstance(self._adapter, VirtualAdapter):
            output = self._adapter.training_step(super().training_step, self._mean, *args, **kwargs)
            return output
        output = super().training_step(*args, **kwargs)
        if output is not None:
            self._mean.read(output)
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        automatic = module.automatic_optimization
        if not automatic:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        assert self._mean is not None
        self._mean.set_accumulation(compat.accumulation_factor(module.trainer))
        if isinstance(self._adapter, VirtualAdapter):
            run = partial(self.precision_plugin.backward, model=module, optimizer=None, **kwargs)
            self._adapter.backward(run, loss, self._mean, self._trainable(module))
        else:
            weighed = self._mean.weigh(loss)
            if not self._blocked:
                self._mean.start()
            self.precision_plugin.backward(weighed, module, optimizer, *args, **kwargs)
        if not self._blocked:
            self._exchange(self._trainable(module))
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        owned = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]

        def closure_then_exchange() -> Any:
            result = closure()
            self._follow_requires_grad(module)
            self._exchange(owned)
            return result

        return super().optimizer_step(optimizer, closure_then_exchange, model, **kwargs)

    def _exchange(self, parameters: Sequence[nn.Parameter]) -> None:
        """Turn the gradients of `parameters` into averages; act on what the other ranks said."""
        assert self._adapter is not None
        assert self.lightning_module is not None
        outcome = self._adapter.after_backward(parameters)
        trainer = self.lightning_module.trainer
        if outcome.signal:
            compat.request_stop(trainer)
        if outcome.skipped:
            rank_zero_info(
                f"Step {trainer.global_step} skipped: a gradient was not finite on some rank "
                f"({self.ledger.skipped_steps} of {self.ledger.steps} steps so far)."
            )
        if self._check_every and self.ledger.steps % self._check_every == 0 and self.virtual_ranks == 1:
            check_replicas(self._trainable(self.lightning_module), self.root_device)

    def _facts(self) -> StepFacts:
        """What an adapter has to know at the start of an exchange."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._loan is not None:
            self._loan.refresh()
        scaler = getattr(self.precision_plugin, "scaler", None)
        return StepFacts(
            epoch=epoch_fraction(trainer),
            signal=compat.received_sigterm(trainer),
            loss_scale=float(scaler.get_scale()) if scaler is not None else 1.0,
            weight=self._mean.factor() if self._mean and self.lightning_module.automatic_optimization else 1.0,
        )

    # --- parameters that come and go

    def _trainable(self, module: nn.Module) -> list[nn.Parameter]:
        return list(self._by_name(module).values())

    def _by_name(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Parameters that require gradients."""
        if self._takes_part is None or self._takes_part.module is not module:
            self._takes_part = Trainable(module)
        return self._takes_part.named()

    def _follow_requires_grad(self, module: pl.LightningModule) -> None:
        """Take in parameters that were unfrozen, drop the memory of those that were frozen."""
        assert self._adapter is not None
        # Toggled optimizers freeze the others' parameters for the time of a step only.
        fixed = isinstance(self._adapter, BucketAdapter)
        follow(self._adapter.engine, self._by_name(module), self._names, fixed, module.automatic_optimization)

    # --- evaluation and checkpoints

    @override
    def on_validation_start(self) -> None:
        self._average_buffers()

    def _average_buffers(self) -> None:
        """Average running statistics over ranks; they were each rank's own since the last time."""
        module = self.lightning_module
        if self._adapter is None or module is None:
            return
        if isinstance(self._adapter, VirtualAdapter):
            self._adapter.average_buffers()
        elif self.world_size > 1:
            average_buffers(module, self.ledger, self.global_rank, self.world_size)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._average_buffers()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self._adapter is None or not self.compressor.owns_momentum:
            return state
        return stock_optimizer_state(state, optimizer, self._adapter.engine, self._names, self.root_device)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self._adapter is not None and "optimizer_states" in checkpoint:
            saved = save_engine(self._adapter.engine, self._comm_state, self.root_device)
            if saved is not None:
                checkpoint[KEY] = saved
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only is not False)
        self._loaded, self._loaded_any = checkpoint.get(KEY), "optimizer_states" in checkpoint
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._adapter is not None and self.compressor.owns_momentum:
            has_state = self._loaded is not None and self._comm_state != "reset"
            checkpoint = take_optimizer_state(checkpoint, self.optimizers, self._adapter.engine, self._names, has_state)
        super().load_optimizer_state_dict(checkpoint)
