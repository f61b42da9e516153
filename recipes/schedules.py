"""Learning-rate schedules as one pure function of the optimizer step."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

SCHEDULES = ("constant", "cosine", "step")


def check_schedule(name: str, milestones: Sequence[int]) -> None:
    """Raises ValueError unless ``name`` is a known schedule and ``milestones`` fit it."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"schedule={name!r} is unknown{hint}: use one of {', '.join(SCHEDULES)}.")
    if name == "step" and not milestones:
        raise ValueError("schedule='step' needs milestones, the epochs at which lr drops, say milestones=[81, 122].")
    if name != "step" and milestones:
        raise ValueError(f"milestones={list(milestones)} mean nothing to schedule={name!r}: use schedule='step'.")
    if any(later <= earlier for earlier, later in zip([0, *milestones], milestones)):
        raise ValueError(f"milestones={list(milestones)} must be positive and increasing epochs.")


def lr_factor(
    step: int,
    schedule: str,
    *,
    total_steps: float,
    warmup_steps: int = 0,
    milestones: Sequence[int] = (),
    gamma: float = 0.1,
) -> float:
    """Returns what the base learning rate is multiplied with at one optimizer step.

    The warm-up is linear and ends at 1: step t < W has the factor (t + 1) / W. "cosine" then falls from 1 to 0 as
    (1 + cos(pi p)) / 2 with p the part of the remaining steps that is done (SGDR, Loshchilov & Hutter 2017, equation 5,
    one period). "step" multiplies with ``gamma`` at each milestone.

    Args:
        step: Optimizer steps already taken, from 0.
        schedule: "constant", "cosine" or "step".
        total_steps: Optimizer steps of the whole run; used by "cosine" only.
        warmup_steps: Length W of the warm-up.
        milestones: In optimizer steps; used by "step" only.
        gamma: Factor at each milestone.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "cosine":
        done = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    if schedule == "step":
        return float(gamma ** sum(step >= milestone for milestone in milestones))
    return 1.0
