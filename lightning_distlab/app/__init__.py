"""What `train.py`, `eval.py` and a user's own Hydra program do: compose, check, build, fit, summarise."""

import lightning_distlab.conf  # noqa: F401  (registers the schemas that strategy configurations name)
from lightning_distlab.app.evaluate import evaluate
from lightning_distlab.app.instantiate import TargetNotAllowedError, allow_targets, instantiate
from lightning_distlab.app.job import JobResult, run_job
from lightning_distlab.app.messages import guarded
from lightning_distlab.app.quiet import hush
from lightning_distlab.app.resolvers import register_resolvers
from lightning_distlab.app.train import train

hush()
register_resolvers()  # before hydra.main composes: the run's folder is named with one of them

__all__ = [
    "JobResult",
    "TargetNotAllowedError",
    "allow_targets",
    "evaluate",
    "guarded",
    "instantiate",
    "register_resolvers",
    "run_job",
    "train",
]
