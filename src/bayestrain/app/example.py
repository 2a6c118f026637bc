"""The embedded example, which `bayestrain train` trains when it is given nothing else: 12,000 handwritten digits."""

from types import SimpleNamespace

from torch import nn

from bayestrain.app import data


def digits_network() -> nn.Sequential:
    """784-625-10 perceptron with ReLU, 496,885 parameters; the linear layers are called "1" and "3"."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, 10))


def digits() -> SimpleNamespace:
    """The digits of mnist-mini with pixels in [0, 1]: 9,000 to train with, 1,000 for validation and 2,000 to test."""
    splits = data.load("mnist-mini")
    train, validation = splits.train.split(0.1, seed=0)
    return SimpleNamespace(train=train, validation=validation, test=splits.test, classes=splits.classes)
