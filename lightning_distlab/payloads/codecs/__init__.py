"""Wire codecs: strictly increasing indices and floating-point values to bytes and back."""

from lightning_distlab.payloads.codecs.index import INDEX_CODECS, IndexCodec
from lightning_distlab.payloads.codecs.value import VALUE_CODECS, ValueCodec

__all__ = ["INDEX_CODECS", "VALUE_CODECS", "IndexCodec", "ValueCodec"]
