import pytest
import torch
from torchvision.transforms import functional as TF

from recipes.vision.augment import RandomCropFlip, crop_flip


@pytest.mark.parametrize("shape", [(6, 3, 32, 32), (5, 1, 8, 6)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_batch_gather_equals_the_per_image_reference(shape, dtype):
    B, _, H, W = shape
    images = torch.randint(0, 256, shape).to(dtype)
    dy, dx = torch.randint(0, 9, (2, B))
    mirror = torch.arange(B) % 2 == 0
    ours = crop_flip(images, dy, dx, mirror, padding=4)
    for b in range(B):
        reference = TF.crop(TF.pad(images[b], [4]), int(dy[b]), int(dx[b]), H, W)
        assert torch.equal(ours[b], TF.hflip(reference) if mirror[b] else reference)


def test_centre_window_is_the_image_itself():
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    centre = torch.full((3,), 4)
    assert torch.equal(crop_flip(images, centre, centre, torch.zeros(3, dtype=torch.bool), 4), images)


def test_offsets_differ_per_image_and_cover_the_whole_range():
    torch.manual_seed(0)
    # Each pixel holds its own position, so the top-left pixel of an uncropped corner tells the offset.
    position = torch.arange(1, 1 + 32 * 32, dtype=torch.int64).view(1, 1, 32, 32).expand(2000, 1, 32, 32)
    out = RandomCropFlip(padding=4)(position.contiguous())
    middle = out[:, 0, 16, 15:17] - 1
    mirrored = middle[:, 0] > middle[:, 1]
    row, column = middle.div(32, rounding_mode="floor")[:, 0], middle.min(dim=1).values % 32
    assert row.unique().tolist() == list(range(12, 21))
    assert column.unique().tolist() == list(range(11, 20))
    assert 0.45 < mirrored.float().mean() < 0.55
    assert (row[1:] != row[:-1]).float().mean() > 0.8


def test_only_pixels_of_the_image_or_zero():
    images = torch.full((16, 3, 32, 32), 77, dtype=torch.uint8)
    out = RandomCropFlip()(images)
    assert out.dtype == torch.uint8
    assert set(out.unique().tolist()) <= {0, 77}
    assert (out == 77).flatten(1).sum(1).min() >= 3 * 28 * 28


def test_the_global_seed_controls_it():
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    torch.manual_seed(5)
    first = RandomCropFlip()(images)
    second = RandomCropFlip()(images)
    torch.manual_seed(5)
    assert torch.equal(RandomCropFlip()(images), first)
    assert not torch.equal(first, second)


def test_negative_padding_is_refused():
    with pytest.raises(ValueError, match="padding=-1"):
        RandomCropFlip(padding=-1)
