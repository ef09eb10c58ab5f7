"""Residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015) and images to train them on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

NUM_CLASSES = 30


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image's size (for stride 1), normalised over the batch."""
    plain = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(plain, nn.BatchNorm2d(outputs))


def silent_convolution(inputs: int, outputs: int, size: int) -> nn.Sequential:
    """The last one of a branch. It begins as zero: a deep network begins as a shallow one, and learns at once."""
    layers = convolution(inputs, outputs, size)
    nn.init.zeros_(layers.get_submodule("1").get_parameter("weight"))
    return layers


class Residual(nn.Module):
    """``relu(branch(x) + shortcut(x))``; the shortcut is a 1x1 convolution where shapes differ."""

    def __init__(self, branch: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


def basic(inputs: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions, as in ResNet-18."""
    branch = nn.Sequential(convolution(inputs, width, 3, stride), nn.ReLU(), silent_convolution(width, width, 3))
    return Residual(branch, inputs, width, stride)


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """1x1 down, 3x3, 1x1 up to four times the width, as in ResNet-50."""
    branch = nn.Sequential(
        convolution(inputs, width, 1),
        nn.ReLU(),
        convolution(width, width, 3, stride),
        nn.ReLU(),
        silent_convolution(width, 4 * width, 1),
    )
    return Residual(branch, inputs, 4 * width, stride)


#: Model name: how a block is made, how much wider than its inner width its output is, and blocks in each stage.
MODELS = {"resnet18": (basic, 1, (2, 2, 2, 2)), "resnet50": (bottleneck, 4, (3, 4, 6, 3))}


def resnet(name: str, num_classes: int = NUM_CLASSES) -> nn.Sequential:
    """A network from images (N, 3, H, W) to scores (N, num_classes). name: a key of MODELS."""
    block, expansion, depths = MODELS[name]
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for index in range(depth):
            layers.append(block(channels, width, 2 if stage > 0 and index == 0 else 1))
            channels = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def images(seed: int, reader: int, batch_size: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of images (N, 3, size, size) and labels (N,): each class has a coarse pattern, under noise.

    seed: of the patterns, the same for all readers. reader: whose batches; each reader sees others.
    """
    common = torch.Generator().manual_seed(seed)
    coarse = torch.randn(NUM_CLASSES, 3, 8, 8, generator=common)
    patterns = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    own = torch.Generator().manual_seed(seed + 1 + reader)
    while True:
        labels = torch.randint(NUM_CLASSES, (batch_size,), generator=own)
        yield patterns[labels] + 0.5 * torch.randn(batch_size, 3, size, size, generator=own), labels


def parameter_count(parameters: Sequence[Tensor]) -> int:
    return sum(each.numel() for each in parameters)
