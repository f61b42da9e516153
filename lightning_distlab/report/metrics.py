"""Which way a metric is good."""

from __future__ import annotations

import re

_LOWER = re.compile(r"(loss|error|err|perplexity|ppl|nll|bpc|wer|cer|mse|mae|rmse|bytes|(_|/)(m?s|seconds))(_|/|$)")


def lower_is_better(name: str) -> bool:
    """Say whether a smaller value of this metric is better: losses, errors, perplexities, bytes and times.

    >>> lower_is_better("val/loss"), lower_is_better("val/acc"), lower_is_better("comm/codec_ms")
    (True, False, True)
    """
    return _LOWER.search(name.lower()) is not None
