"""Gradient dropping (Aji & Heafield, EMNLP 2017): send the largest entries, keep the rest for later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.compression import checks
from lightning_distlab.compression.averaging import dense_average, entries, put_back, write_average
from lightning_distlab.compression.base import Compression, Compressor, Param, State, Step
from lightning_distlab.compression.exclusion import Exclusion
from lightning_distlab.compression.global_cut import counts_of_global_top_k
from lightning_distlab.compression.selection import SCRATCH_BYTES, top_k
from lightning_distlab.payloads import DensePayload, Op, Reply, Request, RoundSpec, SparsePayload, accumulation_dtype

SCOPES = ("global", "tensor")


class Sparse(Compressor):
    """Each rank adds its gradient to what it has not sent yet, sends the largest entries, and keeps the others.

    With local gradient g and residual e:

        p ← e + g
        mask ← entries of largest |p|
        send p ⊙ mask;  e ← p ⊙ ¬mask (and what the wire rounded away)
        G = (1/N) Σ sent

    Momentum and weight decay stay in the optimizer and act on G: an entry that comes late has missed the momentum
    that it would have gathered, which is what Deep Gradient Compression repairs. There is no clipping and no warm-up.

    The threshold is exact: k = density x elements entries are sent, those of largest magnitude, ties in favour of the
    lowest position. `scope="global"`, the paper's default, takes one threshold over all compressed tensors, which
    needs the whole gradient before anything is sent and so rules out overlap with the backward pass; the number of
    entries of a tensor then differs between ranks, and the bound that all agree on, which sizes receive buffers, is
    min(elements of the tensor, k). `scope="tensor"` cuts each tensor by itself.

    Memory: e, as large as the parameters, in fp32 for half precision. State keys: `residual`; `rounding` for what a
    lossy wire takes from an excluded tensor (allocated when needed).

    Args:
        density: Share of the entries that is sent, in (0, 1]. The paper drops 99 %.
        scope: `global` or `tensor`.
        exclude_vectors: Average tensors of dimension 0 and 1 (biases, normalisation) densely.
        min_numel: The same for tensors with fewer elements.
        exclude: The same for parameters whose name matches one of these shell patterns.

    Raises:
        ValueError: An option is outside its range.
    """

    name: ClassVar[str] = "sparse"

    def __init__(
        self,
        *,
        density: float = 0.01,
        scope: str = "global",
        exclude_vectors: bool = True,
        min_numel: int = 256,
        exclude: Sequence[str] = (),
    ) -> None:
        self.density = checks.fraction("density", density)
        self.scope = checks.choice("scope", scope, SCOPES)
        self.exclusion = Exclusion(
            checks.switch("exclude_vectors", exclude_vectors),
            checks.natural("min_numel", min_numel),
            checks.patterns("exclude", exclude),
        )
        self.needs_whole_gradient = self.scope == "global" and self.density < 1.0
        # At density 1 every payload is dense, and a collective that knows nothing else will do.
        self.rounds = (RoundSpec(Op.SUM, DensePayload if self.density == 1.0 else SparsePayload),)

    @override
    def init_state(self, param: Param) -> State:
        if self.exclusion.reason(param) is not None:
            return {}
        dtype = accumulation_dtype(param.weight.dtype)
        return {"residual": torch.zeros(param.weight.numel(), dtype=dtype, device=param.weight.device)}

    @override
    def observe(
        self, gradients: Mapping[str, Tensor], states: Mapping[str, State], step: Step
    ) -> tuple[dict[str, int], int] | None:
        """Entries of each tensor that lie above the global threshold, and their number k in all."""
        if not self.needs_whole_gradient:
            return None
        pieces = {
            name: (state["residual"], gradients.get(name)) for name, state in states.items() if "residual" in state
        }
        total = entries(self.density, sum(residual.numel() for residual, _ in pieces.values()))
        return (counts_of_global_top_k(pieces, total, step.scratch) if pieces else {}), total

    @override
    def exchange(self, grad: Tensor, state: State, param: Param, step: Step) -> Compression:
        if self.exclusion.reason(param) is not None:
            yield from dense_average(grad, grad, state, step.world_size, keep_error=True)
            return
        residual, numel = state["residual"], grad.numel()
        if self.scope == "tensor":
            count = limit = entries(self.density, numel)
        elif self.density == 1.0:
            count = limit = numel
        else:
            assert step.observed is not None, "observe must run before the first tensor of a step is compressed"
            counts, total = step.observed
            count, limit = counts[param.name], min(numel, total)

        # Another tensor's compressor takes the same scratch once this one waits: nothing in it outlives the request.
        scratch = step.scratch.take(residual, purpose="candidate")
        candidate = torch.add(residual, grad, out=scratch)
        everything = self.density == 1.0
        payload: DensePayload | SparsePayload
        if everything:
            payload = DensePayload(candidate.clone())
        else:
            indices = top_k(candidate, count, scratch=step.scratch.raw(SCRATCH_BYTES), seed=step.index)
            payload = SparsePayload(indices, candidate[indices], numel, limit)
        reply: Reply = yield Request(Op.SUM, payload, final=True)

        torch.add(residual, grad, out=residual)
        if everything:
            residual.zero_()
        else:
            residual[indices] = 0.0
        put_back(reply.returned, residual)
        write_average(reply.payload, grad, step.world_size)

    @override
    def describe(self, params: Mapping[str, Param]) -> str:
        return f"sparse: density {self.density:g}, {self.scope} threshold; {self.exclusion.describe(params)}"
