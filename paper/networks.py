"""The dense networks of the three experiments, in plain PyTorch.

Nothing here knows about tensor formats: a builder returns an ordinary `nn.Module` with readable layer names, to be
tensorized or trained dense as a baseline. The parameter counts below are the paper's, which include batch norm's
running mean and variance.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


def mnist_mlp(num_classes: int = 10) -> nn.Sequential:
    """784-625-10 perceptron with ReLU for 1x28x28 images: 496,885 parameters.

    The two linear layers are named "1" and "3". The paper's dense network has no ReLU between them.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, num_classes))


def cifar10_cnn(num_classes: int = 10) -> nn.Sequential:
    """Four 3x3 convolutions and two linear layers for 3x32x32 images: 1,569,418 parameters.

    Every convolution keeps the side and is followed by batch norm and ReLU; max pooling over 3 and then 5 takes the
    side from 32 to 10 to 2.
    """
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(3, 128, 3, padding=1),
            bn1=nn.BatchNorm2d(128),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(128, 128, 3, padding=1),
            bn2=nn.BatchNorm2d(128),
            relu2=nn.ReLU(),
            pool1=nn.MaxPool2d(3),
            conv3=nn.Conv2d(128, 256, 3, padding=1),
            bn3=nn.BatchNorm2d(256),
            relu3=nn.ReLU(),
            conv4=nn.Conv2d(256, 256, 3, padding=1),
            bn4=nn.BatchNorm2d(256),
            relu4=nn.ReLU(),
            pool2=nn.MaxPool2d(5),
            flatten=nn.Flatten(),
            fc1=nn.Linear(256 * 2 * 2, 512),
            relu5=nn.ReLU(),
            fc2=nn.Linear(512, num_classes),
        )
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to their input (He et al. 2015, version 1).

    A block that halves the side and widens the channels passes its input through a 1x1 convolution of stride 2 without
    batch norm, as in the Keras example the paper used.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(in_channels, out_channels, 1, stride=stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu2(y + self.shortcut(x))
        return out


def resnet_cifar(depth: int, num_classes: int = 10, *, zero_start: bool = False) -> nn.Sequential:
    """Keras's ResNet v1 of `depth` = 6 n + 2 layers for 3x32x32 images.

    A 16-channel stem, three stacks of n residual blocks with 16, 32 and 64 channels on sides 32, 16 and 8, an average
    pool and one linear layer. Convolutions have biases, as in Keras, and He's normal initialisation. Layers are named
    "stem.conv", "stack2.0.conv1", "stack2.0.shortcut", "fc". With `zero_start` the last batch norm of every block
    starts with weights of zero (Goyal et al. 2017), so that a deep network starts as its shortcuts alone.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"A ResNet for CIFAR has depth 6 n + 2 (8, 14, 20, ..., 110), not {depth}.")
    blocks = (depth - 2) // 6
    stem = OrderedDict[str, nn.Module](conv=nn.Conv2d(3, 16, 3, padding=1), bn=nn.BatchNorm2d(16), relu=nn.ReLU())
    model = nn.Sequential(
        OrderedDict[str, nn.Module](
            stem=nn.Sequential(stem),
            stack1=_stack(16, 16, blocks, stride=1),
            stack2=_stack(16, 32, blocks, stride=2),
            stack3=_stack(32, 64, blocks, stride=2),
            pool=nn.AvgPool2d(8),
            flatten=nn.Flatten(),
            fc=nn.Linear(64, num_classes),
        )
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, ResidualBlock) and zero_start:
            nn.init.zeros_(module.bn2.weight)
    return model


def resnet110(num_classes: int = 10) -> nn.Sequential:
    """ResNet-110 with 1,742,762 parameters, whose blocks start at zero; the paper's (`resnet110_keras`) do not."""
    return resnet_cifar(110, num_classes, zero_start=True)


def resnet110_keras(num_classes: int = 10) -> nn.Sequential:
    """The paper's ResNet-110: the same network, initialised as Keras does."""
    return resnet_cifar(110, num_classes)


def _stack(in_channels: int, out_channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = ResidualBlock(in_channels, out_channels, stride)
    return nn.Sequential(first, *(ResidualBlock(out_channels, out_channels, 1) for _ in range(blocks - 1)))
