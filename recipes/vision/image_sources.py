"""Where CIFAR-10 may lie on disk, and how each form becomes one tensor of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")
SIDE = 32
"""Height and width of a CIFAR image in pixels."""
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg"}


@dataclass(frozen=True)
class Decoded:
    """One split in memory: images (N, 3, 32, 32) uint8 and labels (N,) int64, 0 ... 9 in alphabetical order."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Source:
    """One form of the data: the files it consists of, and how a split is read."""

    name: str
    files: Callable[[Path, Split], list[Path]]
    read: Callable[[Path, Split], Decoded]


def _parquet_files(root: Path, split: Split) -> list[Path]:
    return sorted(root.glob(f"{split}-*.parquet"))


def _read_parquet(root: Path, split: Split) -> Decoded:
    """Reads columns ``img: {bytes, path}`` and ``label`` of every ``<split>-*.parquet`` in name order."""
    encoded: list[tuple[str, bytes]] = []
    labels: list[int] = []
    for file in _parquet_files(root, split):
        for table in _parquet_batches(file):
            column = table.column("img").field("bytes").to_pylist()
            encoded += [(f"{file} row {len(encoded) + i}", data) for i, data in enumerate(column)]
            labels += table.column("label").to_pylist()
    return Decoded(_decode(encoded, len(encoded)), _checked_labels(labels, root))


def _parquet_batches(file: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        schema = parquet.schema_arrow
        if "img" not in schema.names or "label" not in schema.names:
            raise ValueError(
                f"{file} has the columns {schema.names}, expected 'img' (struct of bytes, path) and 'label' (int64): "
                f"use the Parquet files of the set named cifar10 with these columns."
            )
        names = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = names.get("info", {}).get("features", {}).get("label", {}).get("names", list(CIFAR10_CLASSES))
        if tuple(names) != CIFAR10_CLASSES:
            raise ValueError(f"{file} names the classes {names}, expected those of CIFAR-10: {list(CIFAR10_CLASSES)}.")
        yield from parquet.iter_batches(batch_size=4096, columns=["img", "label"])


def _folder_files(root: Path, split: Split) -> list[Path]:
    folder = root / split
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.glob("*/*") if file.suffix.lower() in IMAGE_SUFFIXES)


def _read_folder(root: Path, split: Split) -> Decoded:
    """Reads ``<split>/<class>/*.png`` (or JPEG), the class named by its folder."""
    files = _folder_files(root, split)
    names = {file.parent.name for file in files}
    if unknown := sorted(names - set(CIFAR10_CLASSES)):
        raise ValueError(f"{root / split} has the folders {unknown}, expected classes of {list(CIFAR10_CLASSES)}.")
    labels = [CIFAR10_CLASSES.index(file.parent.name) for file in files]
    return Decoded(
        _decode(((str(file), file.read_bytes()) for file in files), len(files)), _checked_labels(labels, root)
    )


def _torchvision_files(root: Path, split: Split) -> list[Path]:
    pattern = "data_batch_*" if split == "train" else "test_batch"
    return sorted((root / "cifar-10-batches-py").glob(pattern))


def _read_torchvision(root: Path, split: Split) -> Decoded:
    """Reads the original archive; torchvision compares the MD5 sum of every file before it unpickles one."""
    from torchvision.datasets import CIFAR10

    original = CIFAR10(str(root), train=split == "train", download=False)
    images = torch.from_numpy(original.data).permute(0, 3, 1, 2).contiguous()  # (N, 32, 32, 3) -> (N, 3, 32, 32)
    return Decoded(images, _checked_labels(original.targets, root))


SOURCES = (
    Source("parquet", _parquet_files, _read_parquet),
    Source("folder", _folder_files, _read_folder),
    Source("torchvision", _torchvision_files, _read_torchvision),
)


def find_source(root: Path) -> Source:
    """Returns the form in which ``root`` holds both splits.

    Raises:
        ValueError: If the directory is missing, or holds none of the three forms; the message says how to get the data.
    """
    for source in SOURCES:
        if all(source.files(root, split) for split in SPLITS):
            return source
    problem = "holds no CIFAR-10" if root.is_dir() else "does not exist"
    raise ValueError(
        f"The data directory {root} {problem}. It needs one of: train-*.parquet and test-*.parquet with the columns "
        f"img {{bytes, path}} and label; train/<class>/*.png and test/<class>/*.png; or cifar-10-batches-py/ from the "
        f"original archive. Name the directory with data.root=DIR (or its parent with the environment variable "
        f"DISTLAB_DATA), or fetch the data with data.download=true."
    )


def _decode(encoded: Iterable[tuple[str, bytes]], count: int) -> Tensor:
    """Decodes PNG or JPEG bytes, each with a name for errors, to (N, 3, 32, 32) uint8."""
    from torchvision.io import ImageReadMode, decode_image

    images = torch.empty(count, 3, SIDE, SIDE, dtype=torch.uint8)
    for i, (name, data) in enumerate(encoded):
        if not data:
            raise ValueError(f"{name} holds no image bytes: the files must embed the images, not only their paths.")
        try:
            image = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
        except RuntimeError as error:
            raise ValueError(f"{name} is not a readable PNG or JPEG image: {error}") from error
        if image.shape != images.shape[1:]:
            raise ValueError(f"{name} has the shape {tuple(image.shape)}, expected (3, {SIDE}, {SIDE}).")
        images[i] = image
    return images


def _checked_labels(labels: list[int], root: Path) -> Tensor:
    tensor = torch.tensor(labels, dtype=torch.int64)
    if len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < len(CIFAR10_CLASSES):
        raise ValueError(f"{root} has labels {int(tensor.min())} ... {int(tensor.max())}, expected 0 ... 9.")
    return tensor
