"""Evaluate a checkpoint on the test set.

Example:
    python eval.py ckpt_path=outputs/train/runs/<time>/checkpoints/last.ckpt
"""

import hydra
from omegaconf import DictConfig

from lightning_distlab.app import evaluate, guarded, run_job


@hydra.main(version_base="1.3", config_path="conf", config_name="eval")
def main(cfg: DictConfig) -> float | None:
    """Run one job; returns the metric that `optimized_metric` names."""
    return run_job(evaluate, cfg)


if __name__ == "__main__":
    guarded(main)
