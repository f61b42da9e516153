"""What can go wrong between ranks."""

from __future__ import annotations

from collections.abc import Sequence


class RankLostError(RuntimeError):
    """A rank died, hung, or left while others still exchange with it.

    Args:
        ranks: Global ranks that are gone; empty where nobody can be named.
        exchange: What was going on.
        cause: What the backend said.

    Attributes:
        ranks: As above.
    """

    def __init__(self, ranks: Sequence[int], exchange: str, cause: str) -> None:
        self.ranks = tuple(ranks)
        if len(self.ranks) == 1:
            who = f"Rank {self.ranks[0]} was lost"
        elif self.ranks:
            who = f"Ranks {', '.join(map(str, self.ranks))} were lost"
        else:
            who = "The connection between ranks was lost, though all of them still answer,"
        # Rank 0 serves the store in which survivors tell each other what they know.
        hint = " Where another rank was lost first, the log of rank 0 names it." if 0 in self.ranks else ""
        super().__init__(
            f"{who} during {exchange}. Look into the log of that rank for the reason, then resume from the last "
            f"checkpoint.{hint} A rank that ended without an error had fewer batches than the others: give all the "
            f"same number (trainer.limit_train_batches, max_steps). The backend said: {cause}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the finished message, since the constructor takes something else."""
        return _rebuild, (self.ranks, str(self))


def _rebuild(ranks: tuple[int, ...], message: str) -> RankLostError:
    error = RankLostError.__new__(RankLostError)
    RuntimeError.__init__(error, message)
    error.ranks = ranks
    return error
