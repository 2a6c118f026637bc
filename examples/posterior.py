"""How sure is it? Five networks that find their ranks together, trained in a loop of your own.

Run it with ``python examples/posterior.py``: no download, under a minute on one core. The networks see digits only;
turned on their side, or with their quarters swapped, digits are no longer what was trained on, and the networks should
say so by differing. The last line it prints holds the figures as JSON.
"""

import json

import torch
from torch import nn

import bayestrain as bt
from bayestrain import data

SEED, PARTICLES, EPOCHS, FINETUNE, BATCH = 0, 5, 8, 3, 128
RATE, FINETUNE_RATE, WEIGHT, WARMUP = 2e-2, 5e-3, 0.5, 3  # WEIGHT of the prior, reached after WARMUP epochs


def build() -> nn.Module:
    """One particle's start: the paper's perceptron as tensor trains."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, 10))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=20))
    return model


def train(posterior: bt.Posterior, images: data.Images, epochs: int, rate: float, cut: bool) -> None:
    """All particles together, the learning rate falling to 0; `cut` ranks on the way."""
    order = torch.Generator().manual_seed(SEED)
    for epoch in range(epochs):
        posterior.method.set_lr(rate * (1 - epoch / epochs))
        for x, y in images.batches(BATCH, shuffle=True, generator=order):
            posterior.step(x, y)
        if cut:
            posterior.compact_(rule="contribution")  # the next epoch is cheaper


def main() -> dict[str, float]:
    """Train, print the tables, return the figures."""
    torch.set_num_threads(1)
    digits = data.load("mnist-mini")
    images, held_out = digits.train.split(0.1, seed=SEED)
    warmup = WARMUP * -(-len(images) // BATCH)
    posterior = bt.Posterior(
        bt.independent(build, PARTICLES, SEED), len(images), optimizer=lambda tensors: torch.optim.Adam(tensors, RATE),
        prior=lambda model: bt.RankPrior(model, len(images), weight=WEIGHT, warmup_steps=warmup),
    )  # fmt: skip
    print(f"{posterior}, {images} to train on, {held_out} to calibrate with\n")
    train(posterior, images, EPOCHS, RATE, cut=True)
    print(posterior.compact_())  # one set of ranks for all
    posterior.fix_ranks_()  # no prior on ranks from here on
    train(posterior, images, FINETUNE, FINETUNE_RATE, cut=False)
    temperature = posterior.calibrate_(held_out.images / 255, held_out.labels)
    x, labels = digits.test.images / 255, digits.test.labels
    shown = {"digits": x, "on their side": x.rot90(1, (2, 3)), "quarters swapped": x.roll((14, 14), (2, 3))}
    found = {name: posterior.predict(inputs) for name, inputs in shown.items()}
    figures = {"params": posterior.parameters_each, **found["digits"].metrics(labels)}
    print(f"\ntest accuracy {figures['accuracy']:.4f}, temperature {temperature:.2f}")
    print(f"log likelihood {figures['log_likelihood']:.3f}, a single particle's {figures['mean_log_likelihood']:.3f}\n")
    print(f"{'doubt, in nats':20}{'total':>8}{'of each network':>17}{'between them':>14}{'AUROC':>8}")
    for name, seen in found.items():
        parts = (float(part.mean()) for part in (seen.total, seen.aleatoric, seen.epistemic))
        figures[name] = bt.predict.auroc(found["digits"].epistemic, seen.epistemic)  # told from digits; 0.5: not at all
        print(f"{name:20}" + "{:>8.3f}{:>17.3f}{:>14.3f}".format(*parts) + f"{figures[name]:>8.3f}")
    return figures


if __name__ == "__main__":
    print("\n" + json.dumps(main()))
