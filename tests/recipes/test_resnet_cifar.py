import pytest
import torch
from torch import nn

from recipes.vision.nets import build_net
from recipes.vision.resnet_cifar import BasicBlock, CifarResNet, OptionAShortcut, blocks_per_stage


def expected_parameters(n: int, num_classes: int = 10) -> int:
    """Weights of 6n + 1 convolutions without bias, two BatchNorm vectors each, and the classifier."""
    count = 3 * 16 * 9 + 2 * 16
    channels = 16
    for width in (16, 32, 64):
        for block in range(n):
            fan = channels if block == 0 else width
            count += 9 * fan * width + 9 * width * width + 4 * width
        channels = width
    return count + 64 * num_classes + num_classes


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)])
def test_parameter_counts_are_those_of_the_papers_table(depth, millions):
    count = sum(p.numel() for p in CifarResNet(depth).parameters())
    assert count == expected_parameters((depth - 2) // 6)
    digits = 1 if millions == 1.7 else 2
    assert round(count / 1e6, digits) == millions


@pytest.mark.parametrize("depth", [8, 20])
def test_depth_counts_weighted_layers(depth):
    weighted = [m for m in CifarResNet(depth).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(weighted) == depth


@pytest.mark.parametrize(
    ("depth", "nearest"), [(2, "is 8"), (7, "is 8"), (-3, "is 8"), (18, "are 14 and 20"), (112, "are 110 and 116")]
)
def test_invalid_depth_names_the_nearest(depth, nearest):
    with pytest.raises(ValueError, match=f"depth={depth} .* {nearest}"):
        CifarResNet(depth)


@pytest.mark.parametrize(("depth", "n"), [(8, 1), (20, 3), (50, 8), (110, 18)])
def test_valid_depths(depth, n):
    assert blocks_per_stage(depth) == n


def test_shapes_of_the_stages():
    net = CifarResNet(8, num_classes=7)
    shapes = []
    for stage in net.stages:
        stage.register_forward_hook(lambda _module, _args, output: shapes.append(tuple(output.shape[1:])))
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_option_a_shortcut_has_no_parameters_and_keeps_every_second_pixel():
    shortcut = OptionAShortcut(3)
    x = torch.randn(2, 4, 5, 6)
    y = shortcut(x)
    assert list(shortcut.parameters()) == []
    assert y.shape == (2, 7, 3, 3)
    assert torch.equal(y[:, :4], x[:, :, ::2, ::2])
    assert not y[:, 4:].any()


def test_block_with_silent_branch_is_relu_of_the_shortcut():
    block = BasicBlock(16, 32).eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.randn(1, 16, 8, 8)
    assert torch.equal(block(x), OptionAShortcut(16)(x).relu())


def test_he_initialisation():
    torch.manual_seed(0)
    net = CifarResNet(20)
    conv = net.stages[2][1].conv1
    assert conv.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert not net.fc.bias.any()


def test_memory_format_does_not_change_the_function():
    net = CifarResNet(8).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(net(x.contiguous(memory_format=torch.channels_last)), net(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape"), [("digits_mlp", (1, 8, 8)), ("digits_convnet", (1, 8, 8)), ("resnet14", (3, 32, 32))]
)
def test_build_net_by_name(name, shape):
    assert build_net(name, num_classes=5)(torch.randn(3, *shape)).shape == (3, 5)


def test_build_net_refuses_unknown_names():
    with pytest.raises(ValueError, match="net='vgg' is unknown"):
        build_net("vgg")


def test_digits_mlp_size():
    assert sum(p.numel() for p in build_net("digits_mlp").parameters()) == 85_002
