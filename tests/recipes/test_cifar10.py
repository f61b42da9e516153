import io
import logging
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler, Subset

from recipes.vision import decode_cache
from recipes.vision.cifar10 import MEAN, STD, CIFAR10DataModule
from recipes.vision.decode_cache import cache_file, default_cache_dir, load_decoded
from recipes.vision.image_sources import CIFAR10_CLASSES, find_source
from recipes.vision.in_memory import InMemoryImages, as_collated

DATA = Path(os.environ.get("DISTLAB_DATA", Path(__file__).parents[2] / "../shared/data")) / "cifar10"


def images_of(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def png(image):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


def write_parquet(path, images, labels, column="img"):
    rows = [{"bytes": png(image), "path": f"{i}.png"} for i, image in enumerate(images)]
    pq.write_table(pa.table({column: rows, "label": pa.array(labels, pa.int64())}), path)


@pytest.fixture
def parquet_root(tmp_path):
    root = tmp_path / "cifar10"
    root.mkdir()
    train, test = images_of(60, 0), images_of(20, 1)
    write_parquet(root / "train-00000-of-00002.parquet", train[:40], [i % 10 for i in range(40)])
    write_parquet(root / "train-00001-of-00002.parquet", train[40:], [i % 10 for i in range(40, 60)])
    write_parquet(root / "test-00000-of-00001.parquet", test, [9 - i % 10 for i in range(20)])
    return root, train, test


def module_for(root, tmp_path, **options):
    module = CIFAR10DataModule(str(root), cache_dir=str(tmp_path / "cache"), **options)
    module.prepare_data()
    module.setup("fit")
    return module


def test_parquet_shards_are_read_in_order_and_normalised(parquet_root, tmp_path):
    root, _, test = parquet_root
    module = module_for(root, tmp_path, batch_size=7)
    batches = list(module.test_dataloader())
    images, labels = (torch.cat(parts) for parts in zip(*batches))
    assert [len(y) for _, y in batches] == [7, 7, 6]
    assert labels.tolist() == [9 - i % 10 for i in range(20)]
    expected = (test / 255 - np.array(MEAN)) / np.array(STD)
    torch.testing.assert_close(images.double(), torch.from_numpy(expected).permute(0, 3, 1, 2), rtol=0, atol=1e-5)


def test_image_folder(tmp_path):
    root = tmp_path / "folder"
    pictures = images_of(20, 2)
    for split in ("train", "test"):
        for i, name in enumerate(CIFAR10_CLASSES):
            (root / split / name).mkdir(parents=True)
            (root / split / name / "a.png").write_bytes(png(pictures[i]))
    module = module_for(root, tmp_path, batch_size=10)
    images, labels = next(iter(module.test_dataloader()))
    assert labels.tolist() == list(range(10))
    bytes_ = (images * module._splits["test"].std + module._splits["test"].mean).round().byte()
    assert torch.equal(bytes_, torch.from_numpy(pictures[:10]).permute(0, 3, 1, 2))
    (root / "train" / "zebra").mkdir()
    (root / "train" / "zebra" / "a.png").write_bytes(png(pictures[0]))
    with pytest.raises(ValueError, match="zebra"):
        find_source(root).read(root, "train")


def test_without_held_out_images_the_test_set_validates(parquet_root, tmp_path):
    module = module_for(parquet_root[0], tmp_path, batch_size=32)
    assert len(module._splits["train"]) == 60
    assert module._splits["val"] is module._splits["test"]
    assert [len(y) for _, y in module.train_dataloader()] == [32]  # the short batch of 28 is dropped


def test_held_out_images_are_stratified_fixed_and_never_trained_on(parquet_root, tmp_path):
    module = module_for(parquet_root[0], tmp_path, val_size=20, batch_size=20)
    kept, held_out = module._splits["train"].subset, module._splits["val"].subset
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(60))
    (_, labels) = next(iter(module.val_dataloader()))
    assert torch.bincount(labels, minlength=10).tolist() == [2] * 10
    torch.manual_seed(99)
    again = module_for(parquet_root[0], tmp_path, val_size=20)
    assert torch.equal(again._splits["val"].subset, held_out)


def test_training_batches_are_augmented_and_evaluation_is_not(parquet_root, tmp_path):
    module = module_for(parquet_root[0], tmp_path)
    train, test = module._splits["train"], module._splits["test"]
    indices = list(range(20))
    assert not torch.equal(train.__getitems__(indices)[0], train.__getitems__(indices)[0])
    assert torch.equal(test.__getitems__(indices)[0], test.__getitems__(indices)[0])
    plain = module_for(parquet_root[0], tmp_path, augment=False)._splits["train"]
    assert torch.equal(plain.__getitems__(indices)[0], plain.__getitems__(indices)[0])


def test_batched_fetch_works_with_stock_samplers_and_single_items():
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 1, 2, 2)
    data = InMemoryImages(images, torch.arange(10), mean=0.0, std=1.0)
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=3)
        for x, y in DataLoader(data, batch_size=2, sampler=sampler, collate_fn=as_collated):
            assert torch.equal(x[:, 0, 0, 0].long(), y)
            seen += y.tolist()
    assert sorted(seen) == list(range(10))
    x, y = data[7]
    assert (x.shape, int(x[0, 0, 0]), int(y)) == ((1, 2, 2), 7, 7)
    subset = DataLoader(Subset(data, [4, 6]), batch_size=2, collate_fn=as_collated)
    assert next(iter(subset))[1].tolist() == [4, 6]


def test_decoded_once_until_a_file_changes(parquet_root, tmp_path):
    root, cache = parquet_root[0], tmp_path / "cache"
    source = find_source(root)
    first = load_decoded(cache, source, root, "test")
    path = cache_file(cache, source, root, "test")
    stamp = path.stat().st_mtime_ns
    assert torch.equal(load_decoded(cache, source, root, "test").images, first.images)
    assert path.stat().st_mtime_ns == stamp
    write_parquet(root / "test-00000-of-00001.parquet", images_of(5, 7), [0] * 5)
    assert cache_file(cache, source, root, "test") != path
    assert len(load_decoded(cache, source, root, "test").labels) == 5
    assert not list(cache.glob("*.tmp"))


def _load_and_sum(cache, root, results):
    results.put(int(load_decoded(cache, find_source(root), root, "train").images.sum()))


def test_ranks_may_decode_at_the_same_time(parquet_root, tmp_path):
    root, train, _ = parquet_root
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=_load_and_sum, args=(tmp_path / "cache", root, results)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    assert [results.get() for _ in ranks] == [int(train.sum())] * 4
    for rank in ranks:
        rank.join()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_unwritable_cache_is_said_and_costs_only_time(parquet_root, tmp_path, caplog):
    root = parquet_root[0]
    blocked = tmp_path / "a_file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, logger=decode_cache.__name__):
        decoded = load_decoded(blocked, find_source(root), root, "test")
    assert len(decoded.labels) == 20
    assert "data.cache_dir" in caplog.text


def test_default_cache_follows_the_xdg_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "lightning_distlab" / "cifar10"


def test_missing_directory_is_refused_at_construction(tmp_path):
    with pytest.raises(ValueError, match=r"does not exist.*data\.root=DIR.*DISTLAB_DATA.*data\.download=true"):
        CIFAR10DataModule(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="holds no CIFAR-10"):
        CIFAR10DataModule(str(tmp_path))


def test_unreadable_content_is_named(tmp_path):
    root = tmp_path / "bad"
    root.mkdir()
    for split in ("train", "test"):
        write_parquet(root / f"{split}-0.parquet", images_of(2, 0), [0, 1], column="image")
    with pytest.raises(ValueError, match=r"train-0\.parquet has the columns \['image', 'label'\]"):
        find_source(root).read(root, "train")
    rows = [{"bytes": b"no image", "path": "x"}]
    pq.write_table(pa.table({"img": rows, "label": [0]}), root / "train-0.parquet")
    with pytest.raises(ValueError, match=r"train-0\.parquet row 0 is not a readable PNG or JPEG"):
        find_source(root).read(root, "train")
    pq.write_table(pa.table({"img": [{"bytes": None, "path": "x"}], "label": [0]}), root / "train-0.parquet")
    with pytest.raises(ValueError, match="row 0 holds no image bytes"):
        find_source(root).read(root, "train")
    write_parquet(root / "train-0.parquet", np.zeros((1, 16, 16, 3), np.uint8), [0])
    with pytest.raises(ValueError, match=r"shape \(3, 16, 16\), expected \(3, 32, 32\)"):
        find_source(root).read(root, "train")
    write_parquet(root / "train-0.parquet", images_of(1, 0), [10])
    with pytest.raises(ValueError, match=r"labels 10 \.\.\. 10"):
        find_source(root).read(root, "train")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"batch_size": 0}, "batch_size=0"), ({"num_workers": -1}, "num_workers=-1"), ({"val_size": 50_000}, "val_size")],
)
def test_bad_arguments(parquet_root, options, message):
    with pytest.raises(ValueError, match=message):
        CIFAR10DataModule(str(parquet_root[0]), **options)


def test_too_few_images_for_one_batch(parquet_root, tmp_path):
    module = module_for(parquet_root[0], tmp_path, batch_size=64)
    with pytest.raises(ValueError, match="60 training images do not fill one batch of 64 on each of 1 ranks"):
        module.train_dataloader()


@pytest.mark.skipif(not DATA.is_dir(), reason=f"DISTLAB_DATA names no directory with cifar10 in it ({DATA})")
def test_the_real_files(tmp_path):
    source = find_source(DATA)
    test = source.read(DATA, "test")
    assert source.name == "parquet"
    assert test.images.shape == (10_000, 3, 32, 32)
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    # Published means of the training set hold for the test set to about 1 %.
    assert test.images.double().mean((0, 2, 3)).div(255).tolist() == pytest.approx(MEAN, rel=0.015)
