"""Train a model under a communication strategy.

Examples:
    python train.py                                              # digits, two ranks, DGC over a ring
    python train.py strategy=ddp trainer.devices=4
    python train.py -m strategy=ddp,dgc_ring seed=0,1,2          # a sweep, one folder per job
    torchrun --nproc-per-node=2 train.py strategy=dgc_ring
"""

import hydra
from omegaconf import DictConfig

from lightning_distlab.app import guarded, run_job, train


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Run one job; returns the metric that `optimized_metric` names."""
    return run_job(train, cfg)


if __name__ == "__main__":
    guarded(main)
