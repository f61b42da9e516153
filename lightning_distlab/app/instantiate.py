"""Building objects from configuration, inside an allow-list.

A configuration is data, perhaps from a stranger, while ``_target_`` may name any importable callable. Hydra blocks some
names it knows to be bad; here only prefixes known to be good pass. Both the written name and the home of the object
behind it are checked, since every module re-exports others: a file would be deleted by
``lightning.pytorch.callbacks.model_checkpoint.Path.unlink``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf

# Modules whose classes may be built. No place of ours that could widen this list is on it.
_CLASSES = ("lightning.pytorch.", "lightning.fabric.plugins.", "torch.optim.", "torch.nn.", "torchmetrics.")
# Modules whose functions may be called too.
_CLASSES_AND_FUNCTIONS = (
    "lightning_distlab.app.loggers.",
    "lightning_distlab.callbacks.",
    "lightning_distlab.collectives.",
    "lightning_distlab.compression.",
    "lightning_distlab.parallel.",
    "lightning_distlab.payloads.",
    "lightning_distlab.strategies.",
    "lightning_distlab.updates.",
    "recipes.",
    "torchvision.",
)
_added: list[str] = []


class TargetNotAllowedError(ValueError):
    """A ``_target_`` names something that configuration may not build."""


def allow_targets(prefix: str) -> None:
    """Let configurations build classes and call functions of your own package.

    Call it in your program, before the configuration is used; there is no way to do it from a configuration.

    Args:
        prefix: A package or module with a trailing dot, as in ``"mypkg."``.

    Raises:
        ValueError: If the trailing dot is missing, without which ``mypkg_evil`` would pass too.
    """
    if not prefix.endswith(".") or prefix.strip(".") == "":
        raise ValueError(f"allow_targets({prefix!r}): name a package and end with a dot, as in allow_targets('mypkg.')")
    if prefix not in _added:
        _added.append(prefix)


def instantiate(config: Any, key: str = "", **kwargs: Any) -> Any:
    """Build what `config` describes, after every ``_target_`` in it has been found allowed.

    The tree is resolved once, checked, and exactly what was checked is built. Containers arrive as dicts and lists.

    Args:
        config: A configuration node, dict or list; None gives None.
        key: Where it stands in the whole configuration, for messages.
        **kwargs: Further arguments for the top-level target, or ``_partial_=True``.

    Raises:
        TargetNotAllowedError: If a target, at whatever depth, is not allowed. Nothing has been built then.
        hydra.errors.InstantiationException: If a constructor raised.
    """
    if config is None:
        return None
    tree = config
    if isinstance(config, DictConfig | ListConfig):
        tree = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    for where, target in _targets(tree, key):
        check_target(target, where)
    try:
        return hydra.utils.instantiate(tree, _convert_="all", **kwargs)
    except InstantiationException as error:
        text, _, below = str(error).partition("\nfull_key: ")
        full_key = ".".join(part for part in (key, below) if part)
        raise InstantiationException(f"{text}\nfull_key: {full_key}") from error.__cause__


def _targets(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield key, node["_target_"]
        for name, child in node.items():
            yield from _targets(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list | tuple):
        for i, child in enumerate(node):
            yield from _targets(child, f"{key}[{i}]")
    elif isinstance(node, str) and "${" in node:
        raise TargetNotAllowedError(f"{key}: {node!r} would be interpolated again, after the check of its targets")


def _locate(name: str) -> Any:
    """Import the longest part of a dotted name that is a module and follow the rest as attributes."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:i]))
        found = getattr(found, part)
    return found


def check_target(target: Any, key: str = "") -> None:
    """Refuse a ``_target_`` that is not on the allow-list.

    Args:
        target: Its value.
        key: Where it stands, for the message.

    Raises:
        TargetNotAllowedError: If its name, or the module where the object behind it is defined, is outside.
    """
    where = f"{key}._target_" if key else "_target_"
    prefixes = (*_CLASSES, *_CLASSES_AND_FUNCTIONS, *_added)
    remedy = f"Allowed are {', '.join(prefixes)} and what allow_targets('mypkg.') adds in your program."
    if not isinstance(target, str):
        raise TargetNotAllowedError(f"{where}: {target!r} must be a dotted name. {remedy}")
    if not target.startswith(prefixes):
        raise TargetNotAllowedError(f"{where}: {target!r} is outside the allow-list. {remedy}")
    try:
        found = _locate(target)
    except Exception as error:  # an import may raise anything
        raise TargetNotAllowedError(f"{where}: {target!r} cannot be imported: {error}") from error
    home = f"{getattr(found, '__module__', None)}."
    if not home.startswith(prefixes):
        raise TargetNotAllowedError(f"{where}: {target!r} is really something of {home!r}. {remedy}")
    if inspect.isclass(found):
        return
    # methods, among them load_from_checkpoint, and instances are no constructors
    if not inspect.isfunction(found) or "." in found.__qualname__:
        raise TargetNotAllowedError(f"{where}: {target!r} is neither a class nor a function of a module")
    if not home.startswith((*_CLASSES_AND_FUNCTIONS, *_added)):
        raise TargetNotAllowedError(f"{where}: {target!r} is a function; of {home!r} only classes are allowed")
