"""Links by name, or as `20ms,100mbit`."""

from __future__ import annotations

import math
import re

from lightning_distlab.exchange.drivers import Link

PROFILES: dict[str, Link] = {
    "rack": Link(0.01e-3, 10e9 / 8),
    "datacenter": Link(0.5e-3, 10e9 / 8),
    "home-wifi": Link(10e-3, 100e6 / 8),
    "continental": Link(30e-3, 200e6 / 8),
    "globe": Link(80e-3, 100e6 / 8),
    "cellular": Link(100e-3, 20e6 / 8),
}
"""One-way delay, and rate each way."""

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_DELAY = re.compile(_NUMBER + r"(us|µs|ms|s)")
_RATE = re.compile(_NUMBER + r"(kbit|mbit|gbit)")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_link(text: str) -> Link:
    """A profile, or a one-way delay, a rate, or both: `globe`, `20ms`, `100mbit`, `20ms,100mbit`.

    What is not given costs nothing.

    Raises:
        ValueError: It is none of these.
    """
    if text in PROFILES:
        return PROFILES[text]
    delay, rate, seen = 0.0, math.inf, set()
    for piece in text.split(","):
        if match := _DELAY.fullmatch(piece.strip()):
            delay, kind = float(match[1]) * _SECONDS[match[2]], "delay"
        elif match := _RATE.fullmatch(piece.strip()):
            rate, kind = float(match[1]) * _BITS[match[2]] / 8, "rate"
        else:
            kind = ""
        if not kind or kind in seen:
            raise ValueError(
                f"link={text!r} must be one of {', '.join(PROFILES)}, or a delay and a rate such as 20ms,100mbit."
            )
        seen.add(kind)
    return Link(delay, rate)
