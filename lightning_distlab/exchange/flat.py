"""One-dimensional views of tensors, whatever their memory format."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def flat_view(tensor: Tensor) -> Tensor:
    """All elements in memory order, [numel], sharing storage.

    Memory order, so that a channels-last gradient and its slice of a flat bucket are the same vector.

    Raises:
        ValueError: The tensor's elements do not fill one block of memory.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if span != tensor.numel() or 0 in tensor.stride():
        raise ValueError(
            f"A gradient of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps in memory and cannot be "
            f"exchanged in place. Make its parameter contiguous before training."
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped_view(flat: Tensor, like: Tensor) -> Tensor:
    """The inverse of `flat_view`: a vector in memory order, seen in the shape and memory format of `like`."""
    return flat.as_strided(like.shape, like.stride())


def adjacent_runs(flats: Sequence[Tensor]) -> list[list[int]]:
    """Positions of 1-D tensors, grouped where each begins at the end of the one before, in one storage."""
    runs: list[list[int]] = []
    before: tuple[object, ...] | None = None
    for position, flat in enumerate(flats):
        start = flat.storage_offset()
        storage = flat.untyped_storage().data_ptr()
        if before == (storage, flat.dtype, start):
            runs[-1].append(position)
        else:
            runs.append([position])
        before = (storage, flat.dtype, start + flat.numel())
    return runs


def joined(run: Sequence[Tensor]) -> Tensor:
    """One view of adjacent 1-D tensors, [sum of numel]."""
    if len(run) == 1:
        return run[0]
    return run[0].as_strided((sum([flat.numel() for flat in run]),), (1,))
