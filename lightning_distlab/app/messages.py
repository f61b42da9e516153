"""What a user sees when something is wrong: one line that says what, and what to do."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hydra.errors import (
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from lightning_distlab.strategies.child_processes import RankDiedError

# Errors that state a user's mistake when raised by code that checks: ours, the recipes', Lightning's.
_MISTAKES = (ValueError, MisconfigurationException, FileNotFoundError, NotADirectoryError)
_CHECKING = ("lightning_distlab", "recipes", "lightning")
_MARK = "_lightning_distlab_reported"
_GUARDED = "DISTLAB_GUARDED"  # tells child processes that HYDRA_FULL_ERROR is our doing and not the user's


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "did you mean a or b? " for the names most like `word`, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}? " if close else ""


def was_reported(error: BaseException, *, mark: bool = False) -> bool:
    """Say whether an error has been shown in a job's log already; with `mark`, note that it has."""
    if mark:
        setattr(error, _MARK, True)
    return getattr(error, _MARK, False)


def one_line(error: BaseException) -> str | None:
    """Return the message for an error that the user can repair, or None where the traceback matters."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _missing_config(error)
    if isinstance(error, OverrideParseException):
        remedy = "quote values that hold '=', ',' or spaces, as in 'ckpt_path=\"a=1.ckpt\"'"
        return f"{error.override!r} cannot be read: {remedy}"
    if isinstance(error, InstantiationException):
        cause = error.__cause__
        key = str(error).rpartition("full_key: ")[2] if "full_key: " in str(error) else ""
        text = _flat(cause if cause is not None else error)
        return f"{key}: {text}" if key else text
    if isinstance(error, HydraException | OmegaConfBaseException):
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        return _flat(error) + _similar_key(error) + (f" ({_flat(cause)}{_similar_key(cause)})" if cause else "")
    if isinstance(error, ValueError) and "Config group override must be a string" in str(error):
        return "a group cannot be null on the command line: leave it out with '~', as in '~strategy' or '~logger'"
    if isinstance(error, RankDiedError):
        return str(error)
    if isinstance(error, _MISTAKES) and _raised_in(error, _CHECKING):
        return _flat(error)
    if isinstance(error, TypeError) and _raised_in(error, ("lightning",)):  # Trainer's word for a bad value
        return _flat(error)
    return None


def _flat(error: BaseException) -> str:
    return " ".join(str(error).split())


def _missing_config(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    options = sorted(error.options or [])
    if not group or not options:
        return _flat(error)
    return f"unknown {group} {name!r}: {nearest(name, options)}Available: {', '.join(options)}"


def _similar_key(error: BaseException) -> str:
    """Name the keys most like a mistyped one, where OmegaConf says which node lacks it."""
    node, key = getattr(error, "parent_node", None), getattr(error, "key", None)
    if node is None or key is None or not hasattr(node, "keys"):
        return ""
    hint = nearest(str(key), [str(known) for known in node.keys()])  # noqa: SIM118 (a DictConfig is no dict)
    return f"; {hint.strip()}" if hint else ""


def _raised_in(error: BaseException, packages: tuple[str, ...]) -> bool:
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame.f_globals.get("__name__", "")
    return innermost is not None and innermost.partition(".")[0] in packages


def guarded(main: Callable[[], Any]) -> None:
    """Call a function made by ``hydra.main``; a user's mistake ends in one line on stderr and exit code 1.

    With ``HYDRA_FULL_ERROR=1`` in the environment every error shows its whole traceback.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1" and _GUARDED not in os.environ:
        main()
        return
    os.environ["HYDRA_FULL_ERROR"] = os.environ[_GUARDED] = "1"  # makes Hydra raise instead of printing and leaving
    try:
        main()
    except Exception as error:
        if was_reported(error) and int(os.environ.get("LOCAL_RANK", "0")) > 0:
            sys.exit(1)  # rank 0 speaks for all
        line = one_line(error)
        if line is not None:
            sys.stderr.write(f"error: {line}\n")
        elif was_reported(error):
            sys.stderr.write(f"error: {type(error).__name__}: {_flat(error)}\n")
        else:
            traceback.print_exception(error)
        if line is None:
            sys.stderr.write(f"HYDRA_FULL_ERROR=1 {Path(sys.argv[0]).name} ... shows the whole traceback\n")
        sys.exit(1)
    finally:
        for name in ("HYDRA_FULL_ERROR", _GUARDED):
            os.environ.pop(name, None)
