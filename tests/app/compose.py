"""Composing our configurations in a test, as `train.py` would."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

import lightning_distlab.app  # noqa: F401  (registers resolvers and schemas)

ROOT = Path(__file__).parents[2]
STRATEGIES = sorted(path.stem for path in (ROOT / "lightning_distlab" / "conf" / "strategy").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


@contextmanager
def composed(*overrides: str, name: str = "train", folder: Path = Path("unused")) -> Iterator[DictConfig]:
    """The configuration that these words on the command line give, with Hydra's state around it."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        whole = compose(name, [*overrides, f"paths.output_dir={folder}"], return_hydra_config=True)
        former = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(whole)
        cfg = whole.copy()
        with open_dict(cfg):
            del cfg["hydra"]
        try:
            yield cfg
        finally:
            HydraConfig.instance().cfg = former
