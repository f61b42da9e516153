"""Decoded images kept on disk, so that each machine decodes a data set once."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import torch

from recipes.vision.image_sources import Decoded, Source, Split

log = logging.getLogger(__name__)
FORMAT = 1
"""Part of every key; raise it when what is stored changes."""


def default_cache_dir() -> Path:
    """Returns the user's cache directory: ``$XDG_CACHE_HOME`` or ``~/.cache``, then ``lightning_distlab/cifar10``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning_distlab" / "cifar10"


def cache_file(cache_dir: Path, source: Source, root: Path, split: Split) -> Path:
    """Returns the file for one split, named by the paths, sizes and modification times of what it is decoded from."""
    digest = hashlib.sha256(f"{FORMAT} {source.name}".encode())
    for file in source.files(root, split):
        stat = file.stat()
        digest.update(f"\n{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    return cache_dir / f"{split}-{digest.hexdigest()[:20]}.pt"


def load_decoded(cache_dir: Path, source: Source, root: Path, split: Split) -> Decoded:
    """Returns a split from the cache, memory-mapped so that all ranks of a machine share the pages, or decodes it.

    Ranks may come at the same time: a file appears under its name only when complete (rename is atomic), and each
    writes the same bytes. A cache that cannot be written is logged and costs every rank its own decoding.
    """
    path = cache_file(cache_dir, source, root, split)
    if not path.exists():
        decoded = source.read(root, split)
        try:
            _write(path, decoded)
        except OSError as error:
            log.warning("Cannot keep decoded images in %s (%s): set data.cache_dir to a writable place.", path, error)
            return decoded
    stored = torch.load(path, mmap=True, weights_only=True)
    return Decoded(stored["images"], stored["labels"])


def _write(path: Path, decoded: Decoded) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save({"images": decoded.images, "labels": decoded.labels}, file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
