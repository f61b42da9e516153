"""What the number that `training_step` returns means, in one place.

With W ranks, M micro-batches a step, loss means l[r,m] over n[r,m] tokens, and Lightning dividing each loss by the
accumulation factor A before backward:

* A scalar means what it means under DDP, the mean over ranks of means: g = 1/W Σ_r 1/A Σ_m ∇l[r,m].
* ``{"loss": mean, "num_tokens": n}`` is the exact mean over all tokens of the step, however unevenly they lie:
  g = Σ_r Σ_m n[r,m] ∇l[r,m] / T with T = Σ_r Σ_m n[r,m].

The second is reached without touching Lightning's division or the averaging: each loss is multiplied by n·A before
backward, so that after the division a rank holds Σ_m n ∇l; averaging over W ranks and multiplying by W/T leaves g.
T is one sum over ranks of two numbers a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Tokens = int | Tensor
RULE = (
    "all micro-batches of all ranks return the same form: either a scalar loss (mean over ranks of means) or "
    '{"loss": mean, "num_tokens": n} (exact mean over all tokens)'
)


class LossContract:
    """Applies the loss rule for one rank (or one virtual rank).

    Per micro-batch: `read`, then back-propagate what `weigh` returns (through Lightning, which divides by the
    accumulation factor). Per step: sum `summary` over the ranks if `exchanges`, multiply the gradients, accumulated or
    averaged, by `close`.

    Args:
        accumulate: The factor that Lightning divides each loss by; assign `accumulate` when a schedule changes it.

    Raises:
        ValueError: If the factor is not a positive integer.
    """

    def __init__(self, accumulate: int = 1) -> None:
        self.accumulate = accumulate
        self._kind: Literal["scalar", "tokens"] | None = None
        self._tokens: Tokens = 0
        self._agreed = False

    @property
    def accumulate(self) -> int:
        """Lightning's divisor."""
        return self._accumulate

    @accumulate.setter
    def accumulate(self, factor: int) -> None:
        if factor < 1:
            raise ValueError(f"accumulate={factor} must be an integer >= 1, as in Trainer(accumulate_grad_batches=1)")
        self._accumulate = factor

    @property
    def exchanges(self) -> bool:
        """Whether `summary` must be summed over ranks at the end of this step.

        Always at the first step, where ranks find out whether they use the same form; afterwards for tokens only, so
        that scalars cost nothing.
        """
        return self._kind == "tokens" or not self._agreed

    def read(self, output: Tensor | Mapping[str, Any]) -> tuple[Tensor, Tokens | None]:
        """Take the loss and the token count (None for a scalar) out of what `training_step` returned.

        Raises:
            ValueError: If there is no loss, the count is no whole number >= 0, or the form differs from before.
        """
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"training_step must return a loss of one element, or a dict with one under 'loss', "
                f"not {_shown(output)}"
            )
        tokens = output.get("num_tokens") if isinstance(output, Mapping) else None
        kind: Literal["scalar", "tokens"] = "scalar" if tokens is None else "tokens"
        if self._kind not in (None, kind):
            raise ValueError(f"training_step returned a {kind} loss after a {self._kind} loss. The rule: {RULE}")
        self._kind = kind
        return loss, None if tokens is None else _checked_count(tokens)

    def weight(self, tokens: Tokens | None) -> Tokens:
        """What to multiply a micro-batch's loss with before Lightning's division: 1 for a scalar, else n·A."""
        return 1 if tokens is None else tokens * self.accumulate

    def weigh(self, loss: Tensor, tokens: Tokens | None) -> Tensor:
        """Count a micro-batch in, and return the loss to back-propagate.

        A mean over no tokens counts nothing and may be NaN, but its *gradient* must be finite, which holds for
        `cross_entropy` with `ignore_index`; a mean of your own should divide by `max(n, 1)`.
        """
        if tokens is None:
            return loss
        self._tokens = self._tokens + (tokens.detach() if isinstance(tokens, Tensor) else tokens)
        counts = torch.as_tensor(tokens, device=loss.device) > 0
        return torch.where(counts, loss, torch.zeros_like(loss)) * self.weight(tokens)

    def summary(self, device: torch.device | str | None = None) -> Tensor:
        """This rank's (tokens of the step, 1 if it counts tokens), shape (2,), fp64, to be summed over ranks."""
        counts = torch.tensor([0.0, float(self._kind == "tokens")], dtype=torch.float64, device=device)
        counts[0] = self._tokens
        return counts

    def close(self, summed: Tensor | Sequence[float] | None, world_size: int) -> float:
        """End the step and return the factor for its gradients: 1 for scalars, else W/T.

        Args:
            summed: The sum of `summary` over the ranks; None where `exchanges` is false.
            world_size: Ranks over which gradients are averaged.

        Raises:
            ValueError: If some ranks count tokens and others do not, or no rank has any token.
        """
        self._tokens = 0
        if summed is None:
            assert not self.exchanges, "the summary of this step has to be summed over ranks"
            return 1.0
        total, counting = (float(value) for value in summed)
        self._agreed = True
        if counting not in (0, world_size):
            raise ValueError(
                f"{int(counting)} of {world_size} ranks return num_tokens and the others do not. The rule: {RULE}"
            )
        if counting == 0:
            return 1.0
        if total <= 0:
            raise ValueError(
                f"no rank of {world_size} has a token in this step, so there is no mean over tokens: num_tokens counts "
                "the entries that the loss is a mean of, padding left out"
            )
        return world_size / total


def _checked_count(tokens: object) -> Tokens:
    """A token count as a number or a tensor without shape; tensors on accelerators are not read, that would wait."""
    if isinstance(tokens, Tensor):
        good = tokens.numel() == 1 and not tokens.is_complex()
        if good and tokens.device.type == "cpu":
            good = float(tokens) >= 0 and float(tokens) == int(tokens)
        if good:
            return tokens.detach().reshape(())
    elif isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0:
        return tokens
    raise ValueError(
        f"num_tokens={tokens!r} must be a whole number >= 0, the count of tokens that the loss is a mean of"
    )


def _shown(output: object) -> str:
    """What was returned, short enough for a message."""
    if isinstance(output, Mapping):
        return f"a dict with {', '.join(map(repr, output)) or 'nothing in it'}"
    return f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else repr(output)
