"""Sparsity warm-up: the density falls exponentially in the first epochs (Lin et al. 2018, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SparsityWarmup:
    """Sparsity 75, 93.75, 98.4375, 99.609375 %, ... = 1 - 4^-k, one stage after the other, then the final one.

    The stages are those that are denser than `density`, each as long as the others: for the paper's 0.1 % there are
    four, which over four epochs means one an epoch; for 1 % there are three.

    Attributes:
        density: Share of entries sent after the warm-up.
        epochs: Length in epochs; 0 for none.
        steps: Length in optimizer steps, instead of epochs; 0 for none.
    """

    density: float
    epochs: float = 0.0
    steps: int = 0

    @property
    def stages(self) -> tuple[float, ...]:
        """Densities of the stages, falling, all above `density`."""
        stages: list[float] = []
        while 0.25 ** (len(stages) + 1) > self.density:
            stages.append(0.25 ** (len(stages) + 1))
        return tuple(stages)

    def at(self, index: int, epoch: float) -> float:
        """The density of a step.

        Args:
            index: Optimizer steps done.
            epoch: Epochs done, as a fraction.
        """
        stages, length = self.stages, self.epochs or self.steps
        done = epoch if self.epochs else index
        if done >= length:
            return self.density
        return (*stages, self.density)[int(done * len(stages) / length)]

    def describe(self) -> str:
        """The schedule in words."""
        if not (self.epochs or self.steps):
            return "no sparsity warm-up"
        length = f"{self.epochs:g} epochs" if self.epochs else f"{self.steps} steps"
        return f"sparsity warm-up over {length} through {', '.join(f'{100 * (1 - d):.7g} %' for d in self.stages)}"
