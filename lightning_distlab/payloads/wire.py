"""Which codecs a message is written with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_distlab.payloads.codecs import INDEX_CODECS, VALUE_CODECS, IndexCodec, ValueCodec

EXACT = "exact"


@dataclass(frozen=True)
class Wire:
    """Codecs of a message; the rounding error of lossy ones goes back to the sender's residual.

    Attributes:
        index: `int32`, `run16` (the DGC paper's 16-bit run length), `rice`, `bitmap` or `auto` (the smallest).
        value: For the values of sparse payloads: `exact` (the gradient's own precision), `fp32`, `fp16`, `bf16`, `int8`
            (8-bit logarithmic) or `fp64`.
        dense: The same names, for what travels densely: biases, norms, and everything that a rule excludes.

    Raises:
        ValueError: A name is not a codec.
    """

    index: str = "auto"
    value: str = EXACT
    dense: str = EXACT

    def __post_init__(self) -> None:
        """Check the three names."""
        values = [EXACT, *VALUE_CODECS]
        for field, known in (("index", list(INDEX_CODECS)), ("value", values), ("dense", values)):
            name = getattr(self, field)
            if name not in known:
                raise ValueError(f"wire.{field}={name!r} is not a codec; use one of {', '.join(sorted(known))}.")

    def resolved(self, exact: str) -> Wire:
        """The wire for gradients of one dtype: `exact` replaced by the name of the codec that carries it."""
        if self.value != EXACT != self.dense:
            return self
        value = exact if self.value == EXACT else self.value
        dense = exact if self.dense == EXACT else self.dense
        return replace(self, value=value, dense=dense)

    @property
    def index_codec(self) -> IndexCodec:
        """Codec of the indices."""
        return INDEX_CODECS[self.index]

    @property
    def value_codec(self) -> ValueCodec:
        """Codec of the values of sparse payloads."""
        return VALUE_CODECS[self.value]

    @property
    def dense_codec(self) -> ValueCodec:
        """Codec of dense payloads."""
        return VALUE_CODECS[self.dense]

    def merged(self, full: str) -> Wire:
        """The wire of a partial sum: same indices, values in full precision (`fp32` or `fp64`)."""
        return self if self.value == self.dense == full else replace(self, value=full, dense=full)


PAPER_WIRE = Wire(index="run16", value="fp32", dense="fp32")
"""The format of the DGC paper: 32-bit values, 16-bit run lengths, dense fp32 tail."""

COMPACT_WIRE = Wire(index="auto", value="fp16", dense="fp16")
"""Rice indices, half-precision values and tail."""
