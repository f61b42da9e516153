"""1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014): a sign an element, two means a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.compression import checks
from lightning_distlab.compression.averaging import dense_average
from lightning_distlab.compression.base import Compression, Compressor, Param, State, Step
from lightning_distlab.compression.exclusion import Exclusion
from lightning_distlab.compression.powersgd import matrix_shape
from lightning_distlab.payloads import (
    DensePayload,
    Op,
    Reply,
    Request,
    RoundSpec,
    SignPayload,
    accumulation_dtype,
    even_bounds,
)
from lightning_distlab.payloads.signs import SignRanges, column_blocks, columns_of

_BLOCK = 1 << 16  # elements that are worked on together: they stay in a core's cache


class OneBit(Compressor):
    """Quantise, add up at the owner of each range, quantise the sum again; both keep what their quantiser lost.

    Q replaces the negative elements of a column by their mean, and the others by theirs. With local gradient g, the
    rank's error e, and o, the error of the sums of the range that the rank owns:

        p ← e + g;        send Q(p) range by range to the owners;     e ← p - Q(p)
        s ← o + Σ Q(p);   send Q(s) of the own range to everybody;    o ← s - Q(s)
        G = (1/N) Q(s)

    One bit an element each way, whatever the number of ranks; the two phases are a scatter of ranges, added by their
    owners, and a gather of the sums. Sums on the way would have to be quantised at each hop, so only a collective that
    adds at the destination can carry it.

    A column is the weights into one unit, a column of the matrix [in, out] of the paper's speech networks, which is a
    row of PyTorch's [out, in]. Where ranges end within a column, each part has means of its own at its owner.

    Sign methods harm what is mostly zero: an embedding's rows that did not occur would all move. Exclude embeddings.

    Momentum and weight decay stay in the optimizer. Memory: e and o, each as large as the parameter, in fp32 for half
    precision; o is zero outside the rank's range. What is found there, after a resume from the mean of all ranks or at
    another number of them, is taken over into e, so that nothing is lost. State keys: `error`, `owner`; `rounding` for
    what a lossy wire takes from an excluded tensor (allocated when needed).

    Args:
        min_numel: Average tensors with fewer elements densely; those of dimension 0 and 1 always are.
        exclude: The same for parameters whose name matches one of these shell patterns.

    Raises:
        ValueError: An option is outside its range.
    """

    name: ClassVar[str] = "onebit"
    rounds = (RoundSpec(Op.SCATTER_SUM, SignPayload), RoundSpec(Op.ALL_GATHER, SignPayload))

    def __init__(self, *, min_numel: int = 256, exclude: Sequence[str] = ("*embed*",)) -> None:
        self.exclusion = Exclusion(
            vectors=True,
            min_numel=checks.natural("min_numel", min_numel),
            patterns=checks.patterns("exclude", exclude),
        )

    @override
    def init_state(self, param: Param) -> State:
        if self.exclusion.reason(param) is not None:
            return {}
        like = torch.zeros(
            param.weight.numel(), dtype=accumulation_dtype(param.weight.dtype), device=param.weight.device
        )
        return {"error": like, "owner": torch.zeros_like(like)}

    @override
    def exchange(self, grad: Tensor, state: State, param: Param, step: Step) -> Compression:
        if self.exclusion.reason(param) is not None:
            yield from dense_average(grad, grad, state, step.world_size, keep_error=True)
            return
        error, owner, column = state["error"], state["owner"], matrix_shape(param.weight)[1]
        first, last = even_bounds(grad.numel(), step.world_size)[step.rank : step.rank + 2]
        reply: Reply

        def pending(at: slice, out: Tensor) -> Tensor:
            """P of some elements, in scratch, which another tensor's compressor takes once this one waits."""
            torch.add(error[at], grad[at], out=out)
            if at.start < first:
                out[: first - at.start] += owner[at.start : min(at.stop, first)]
            if at.stop > last:
                out[max(0, last - at.start) :] += owner[max(at.start, last) : at.stop]
            return out

        own = quantise(pending, error, column, 0, step)
        reply = yield Request(Op.SCATTER_SUM, own)
        # A single rank gets its own payload back, which nobody has added to anything.
        assert isinstance(reply.payload, SignPayload | DensePayload)
        total = reply.payload.values

        def sums(at: slice, out: Tensor) -> Tensor:
            return torch.add(total[at], owner[first:last][at], out=out)

        again = quantise(sums, total, column, first % column, step)
        reply = yield Request(Op.ALL_GATHER, _in_place(again, grad.numel(), first, column), final=True)

        for at, block in own.blocks():
            pending(at, error[at]).sub_(block)
        for at, block in again.blocks():
            sums(at, total[at]).sub_(block)
        owner.zero_()
        owner[first:last] = total
        assert isinstance(reply.payload, SignPayload | SignRanges)
        for at, block in reply.payload.blocks():
            torch.div(block, step.world_size, out=grad[at])

    @override
    def describe(self, params: Mapping[str, Param]) -> str:
        return f"onebit: {self.exclusion.describe(params)}"


def quantise(
    read: Callable[[slice, Tensor], Tensor], like: Tensor, column: int, offset: int, step: Step
) -> SignPayload:
    """Two means and signs of a range of a matrix.

    Args:
        read: Fills a tensor with some elements of the range.
        like: As long as the range, of the dtype of its elements.
        column: Elements of a column.
        offset: Elements of the first column that lie before the range.
        step: Gives scratch.
    """
    length = like.numel()
    flags = torch.empty(length, dtype=torch.uint8, device=like.device)
    means = torch.empty(columns_of(length, column, offset), 2, device=like.device)  # fp32, as they travel
    for at, numbers in column_blocks(length, column, offset, _BLOCK):
        columns = numbers.stop - numbers.start
        values = read(at, step.scratch.take(like[at], purpose="values")).view(columns, -1)
        high = torch.ge(values, 0.0, out=flags[at].view(torch.bool).view(columns, -1))
        ones = step.scratch.take(like[at], purpose="ones").view(columns, -1).copy_(high)
        count, total = ones.sum(1), values.sum(1)
        above = ones.mul_(values).sum(1)
        below, rest = total - above, values.shape[1] - count
        means[numbers, 0] = (below / rest.clamp(min=1)).masked_fill_(rest == 0, 0.0).to(torch.float32)
        means[numbers, 1] = (above / count.clamp(min=1)).to(torch.float32)
    return SignPayload(flags, means, column, offset, like.dtype)


def _in_place(part: SignPayload, length: int, first: int, column: int) -> SignPayload:
    """A payload over the whole index space in which only the range that begins at `first` counts."""
    flags = part.flags.new_zeros(length)
    flags[first : first + part.length] = part.flags
    means = part.means.new_zeros(columns_of(length, column, 0), 2)
    start = first // column
    means[start : start + len(part.means)] = part.means
    return SignPayload(flags, means, column, 0, part.dtype)
