"""A run's settings as flat, stable keys: what the run table of W&B filters on."""

from __future__ import annotations

from typing import Any

from lightning_distlab.app.secrets import is_secret

_SECTIONS = ("model", "data", "strategy", "trainer")
_SINGLE = ("seed", "task_name", "ckpt_path")
# Long-winded homes of the settings that people compare by.
_LIFTED = ("strategy.compressor.", "strategy.collective.")
_SCALARS = (str, int, float, bool)


def flat_hparams(cfg: dict[str, Any], strategy: str, recipe: str, world_size: int) -> dict[str, Any]:
    """Return the settings of a run as scalars under dotted keys.

    Options of compressor and collective stand directly under ``strategy.`` (``strategy.density``), and the parts by
    name (``strategy.compressor: DGC``). Secrets and ``_target_`` are left out.

    Args:
        cfg: The resolved configuration as plain containers.
        strategy: Name of the strategy.
        recipe: Name of the recipe.
        world_size: Ranks that average.
    """
    flat: dict[str, Any] = {"strategy.name": strategy, "recipe": recipe, "world_size": world_size}
    flat |= {key: cfg[key] for key in _SINGLE if cfg.get(key) is not None}
    for section in _SECTIONS:
        _flatten(section, cfg.get(section), flat)
    return flat


def _flatten(key: str, node: Any, into: dict[str, Any]) -> None:
    if isinstance(node, dict):
        for name, child in node.items():
            if name == "_target_" and key.startswith("strategy."):
                into[key] = str(child).rpartition(".")[2]  # strategy.compressor: DGC
            elif not str(name).startswith("_"):
                _flatten(f"{key}.{name}", child, into)
    elif isinstance(node, _SCALARS) and not is_secret(key):
        for prefix in _LIFTED:
            if key.startswith(prefix):
                key = f"strategy.{key.removeprefix(prefix)}"
        into[key] = node
