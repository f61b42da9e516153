"""Keeping secrets out of what is printed and logged."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

MASK = "********"
_SECRET = re.compile(r"(^|[_\-.])(api_?)?(key|token|secret|password|passwd|credentials?)s?$", re.IGNORECASE)


def is_secret(key: str) -> bool:
    """Say whether a key names a secret: ``api_key``, ``hub.token``, ``password``, ..."""
    return _SECRET.search(key) is not None


def masked(config: Any) -> Any:
    """Return `config` as plain containers, unresolved, with the values of secret keys replaced.

    Interpolations such as ``${oc.env:TOKEN}`` stay as written, so that no environment variable is shown.
    """
    if isinstance(config, DictConfig | ListConfig):
        config = OmegaConf.to_container(config, resolve=False)
    if isinstance(config, dict):
        return {key: _mask(value) if is_secret(str(key)) else masked(value) for key, value in config.items()}
    if isinstance(config, list):
        return [masked(value) for value in config]
    return config


def _mask(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value.startswith("${")):
        return value
    return MASK
