"""Options of compressors, checked where they are set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real


def fraction(option: str, value: object) -> float:
    """A number in (0, 1].

    Raises:
        ValueError: It is not.
    """
    number = _real(value)
    if number is None or not 0.0 < number <= 1.0:
        raise ValueError(
            f"{option}={value!r} must be a number in (0, 1]; 0.001 sends one entry in a thousand, 1.0 sends all."
        )
    return number


def non_negative(option: str, value: object) -> float:
    """A finite number >= 0.

    Raises:
        ValueError: It is not.
    """
    number = _real(value)
    if number is None or number < 0.0:
        raise ValueError(f"{option}={value!r} must be a finite number in [0, inf); 0 turns it off.")
    return number


def positive(option: str, value: object) -> float:
    """A finite number > 0.

    Raises:
        ValueError: It is not.
    """
    number = _real(value)
    if number is None or number <= 0.0:
        raise ValueError(f"{option}={value!r} must be a finite number in (0, inf).")
    return number


def positive_or_none(option: str, value: object) -> float | None:
    """A finite number > 0, or None.

    Raises:
        ValueError: It is neither.
    """
    if value is None:
        return None
    number = _real(value)
    if number is None or number <= 0.0:
        raise ValueError(f"{option}={value!r} must be a finite number in (0, inf); use {option}=None to turn it off.")
    return number


def natural(option: str, value: object) -> int:
    """An integer >= 0.

    Raises:
        ValueError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"{option}={value!r} must be an integer in [0, inf); 0 turns it off.")
    return int(value)


def positive_integer(option: str, value: object) -> int:
    """An integer >= 1.

    Raises:
        ValueError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{option}={value!r} must be an integer in [1, inf).")
    return int(value)


def integer_between(option: str, value: object, low: int, high: int) -> int:
    """An integer in [low, high].

    Raises:
        ValueError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ValueError(f"{option}={value!r} must be an integer in [{low}, {high}].")
    return int(value)


def at_least_one(option: str, value: object) -> float:
    """A finite number >= 1.

    Raises:
        ValueError: It is not.
    """
    number = _real(value)
    if number is None or number < 1.0:
        raise ValueError(f"{option}={value!r} must be a finite number in [1, inf).")
    return number


def switch(option: str, value: object) -> bool:
    """True or False, and nothing that merely looks true.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{option}={value!r} must be True or False.")
    return value


def choice(option: str, value: object, choices: Sequence[str]) -> str:
    """One of a few words.

    Raises:
        ValueError: It is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{option}={value!r} must be one of {', '.join(choices)}.")
    return str(value)  # a member of a string enumeration becomes the plain word


def patterns(option: str, value: object) -> tuple[str, ...]:
    """A list of non-empty strings.

    Raises:
        ValueError: It is not; in particular when it is one bare string, whose letters would be taken as patterns.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{option}={value!r} must be a list of name patterns; write {option}=['head.*'] for one.")
    found = tuple(value)
    for pattern in found:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{option} holds {pattern!r}; every entry must be a non-empty string such as 'head.*'.")
    return found


def _real(value: object) -> float | None:
    """The value as a finite float, None where it is not a number (a truth value is none)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)
