"""Which tensors travel densely whatever the compressor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lightning_distlab.compression.base import Param


@dataclass(frozen=True)
class Exclusion:
    """The rule by which tensors are left uncompressed.

    Biases and normalisation weights are a vanishing share of the bytes, are read at every element of every batch, and
    lose most from staleness; so the papers send them densely.

    Attributes:
        vectors: Leave out tensors of dimension 0 and 1.
        min_numel: Leave out tensors with fewer elements.
        patterns: Leave out parameters whose name matches one of these (shell wildcards, case sensitive).
    """

    vectors: bool = True
    min_numel: int = 256
    patterns: tuple[str, ...] = ()

    def reason(self, param: Param) -> str | None:
        """Why this parameter is left out, or None when it is compressed."""
        if not param.weight.numel():
            return "no elements"
        if self.vectors and param.weight.dim() <= 1:
            return "dim <= 1"
        if param.weight.numel() < self.min_numel:
            return f"numel < {self.min_numel}"
        for pattern in self.patterns:
            if fnmatchcase(param.name, pattern):
                return f"name matches {pattern!r}"
        return None

    def describe(self, params: Mapping[str, Param], reason_of: Callable[[Param], str | None] | None = None) -> str:
        """The rule and its effect: tensors and elements compressed, and left dense for each reason.

        Args:
            params: All parameters.
            reason_of: A compressor's own rule, where it goes beyond `reason`.
        """
        tensors: dict[str | None, int] = defaultdict(int)
        elements: dict[str | None, int] = defaultdict(int)
        for param in params.values():
            reason = (reason_of or self.reason)(param)
            tensors[reason] += 1
            elements[reason] += param.weight.numel()
        text = (
            f"{tensors[None]} of {len(params)} tensors compressed "
            f"({elements[None]:,} of {sum(elements.values()):,} elements)"
        )
        dense = [f"{tensors[r]} where {r} ({elements[r]:,} elements)" for r in tensors if r is not None]
        idle = [p for p in self.patterns if not any(fnmatchcase(name, p) for name in params)]
        return (
            text
            + (f"; dense: {', '.join(dense)}" if dense else "")
            + (f"; patterns that match no parameter: {', '.join(map(repr, idle))}" if idle else "")
        )
