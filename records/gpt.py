"""A character GPT on Tiny Shakespeare, dense or factorised: validation loss against the number of parameters.

    python -m records.gpt --text input.txt --out runs/gpt-dense --dense --device cuda
    python -m records.gpt --text input.txt --out runs/gpt-8x --ratio 8 --device cuda
    python -m records.gpt --text input.txt --out runs/gpt-w1 --weight 1 --device cuda

The network and the data are nanoGPT's: 6 layers, 6 heads, width 384, context 256, 65 characters; the first 90 % of
the text train, the last 10 % validate. Settings and the checkpoint are chosen on the first 5 % of the training text,
because its end is from the play that the validation text continues. The validation text is read once, at the end. A
run that was stopped continues when it is started again.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import bayestrain as bt
from bayestrain.files import write_atomically, write_json
from bayestrain.train import FitConfig, PriorConfig
from bayestrain.train.environment import describe_environment

HELD_OUT = 0.05
"""The part of the training text on which settings and the checkpoint are chosen."""


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a layer norm and around a skip connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(*heads, dropout_p=rate, is_causal=True)
        y = self.project(y.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """Characters ``(B, T)`` to logits ``(B, T, symbols)``; embedding and head are tied."""

    def __init__(
        self, symbols: int, layers: int = 6, heads: int = 6, width: int = 384, context: int = 256, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.context, self.dropout = context, dropout
        self.embed, self.place = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, symbols, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        h = F.dropout(self.embed(x) + self.place(places), self.dropout, self.training)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

    @torch.no_grad()
    def sample(self, start: Tensor, length: int, generator: Generator) -> Tensor:
        """Continue ``(1, T)`` characters by so many."""
        for _ in range(length):
            probabilities = self(start[:, -self.context :])[:, -1].float().softmax(-1)
            start = torch.cat([start, torch.multinomial(probabilities.cpu(), 1, generator=generator).to(start)], 1)
        return start


@dataclass
class Windows:
    """A text as data for `fit`: a pass draws as many random windows as fit side by side into the text."""

    text: Tensor
    context: int

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def to(self, device: torch.device) -> Windows:
        return Windows(self.text.to(device), self.context)

    def batches(
        self, batch_size: int, *, shuffle: bool, generator: Generator | None = None, device: Any = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and the characters that follow; without `shuffle` windows side by side, which cover the text once."""
        starts = torch.arange(len(self)) * self.context
        if shuffle:
            starts = torch.randint(len(self.text) - self.context, (len(self),), generator=generator)
        for some in starts.to(self.text.device).split(batch_size):
            rows = self.text[some[:, None] + torch.arange(self.context + 1, device=self.text.device)].to(device)
            yield rows[:, :-1], rows[:, 1:]


def log_prob(logits: Tensor, targets: Tensor) -> Tensor:
    """The log probability of every window: a sum over its characters."""
    return -F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).sum(1)


@torch.no_grad()
def loss(model: nn.Module, data: Windows, precision: torch.dtype) -> float:
    """Mean negative log probability of a character."""
    was, total, device = model.training, 0.0, data.text.device
    model.eval()
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        for x, y in data.batches(64, shuffle=False, device=device):
            total -= float(log_prob(model(x), y).sum())
    model.train(was)
    return total / (len(data) * data.context)


class Best:
    """Keeps the best network at the final size, judged by the text held out from training, in a file."""

    def __init__(self, model: nn.Module, data: Windows, precision: torch.dtype, file: Path) -> None:
        self.model, self.data, self.precision, self.file = model, data, precision, file
        self.size, self.loss, self.state = torch.load(file) if file.exists() else (0, math.inf, {})

    def on_epoch(self, record: dict[str, Any]) -> None:
        if record["epoch"] == 0 or (record["epoch"] % 2 and record["phase"] == "search"):
            return
        found, size = loss(self.model, self.data, self.precision), bt.count_parameters(self.model)
        if size != self.size or found < self.loss:
            self.size, self.loss, self.state = size, found, deepcopy(self.model.state_dict())
            torch.save((self.size, self.loss, self.state), content := BytesIO())
            write_atomically(self.file, content.getvalue())
        print(f"epoch {record['epoch']}: {size:,} parameters, held-out loss {found:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="Tiny Shakespeare, 1,115,394 characters")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result, samples and the network")
    parser.add_argument("--dense", action="store_true", help="ordinary layers, with weight decay instead of the prior")
    parser.add_argument("--ratio", type=float, default=0.0, help="how many times smaller; 0: as the prior finds")
    parser.add_argument("--weight", type=float, default=0.1, help="weight of the prior")
    parser.add_argument("--rank", type=int, default=128, help="largest rank at the start")
    parser.add_argument("--format", default="tt")
    parser.add_argument("--layout", default="split")
    parser.add_argument("--whole", action="store_true", help="leave modes whole: every weight is two thin factors")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--finetune", type=float, default=0.3, help="the part of the steps at fixed ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", help="of the code, where there is no git to ask")
    given = parser.parse_args()

    text = given.text.read_text(encoding="utf-8")
    symbols = sorted(set(text))
    number = {symbol: n for n, symbol in enumerate(symbols)}
    codes = torch.tensor([number[symbol] for symbol in text], device=given.device)
    train, valid = codes.tensor_split([int(0.9 * len(codes))])
    held_out, train = train.tensor_split([int(HELD_OUT * len(train))])
    data, held_out, valid = (Windows(part, given.context) for part in (train, held_out, valid))

    torch.manual_seed(given.seed)
    size = {"layers": given.layers, "heads": given.heads, "width": given.width, "context": given.context}
    model = GPT(len(symbols), **size, dropout=given.dropout).to(given.device)
    dense_parameters = bt.count_parameters(model)
    if not given.dense:
        modes = {}
        if given.whole:
            linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
            modes = {n: ((m.in_features,), (m.out_features,)) for n, m in linear.items() if n != "head"}
        chosen = bt.TensorizeConfig(given.rank, given.format, given.layout, modes=modes)
        print(bt.tensorize_(model, chosen))

    cuda = given.device.startswith("cuda")
    epochs = max(round(given.steps / math.ceil(len(data) / given.batch)), 2)
    tuning = 0 if given.dense else round(given.finetune * epochs)
    config = FitConfig(
        epochs=epochs - tuning, finetune_epochs=tuning, finetune_lr=0.0, batch_size=given.batch, lr=given.lr,
        optimizer=given.optimizer, weight_decay=0.1, lr_warmup_epochs=2.0,
        clip_norm=given.context, checkpoint_every=5,  # nanoGPT clips the mean over characters to 1
        precision="bf16" if cuda else "float32", target_ratio=0.0 if given.dense else given.ratio,
        rule="auto" if given.format in ("tt", "tucker") else "contribution",
    )  # fmt: skip
    precision = torch.bfloat16 if cuda else torch.float32
    given.out.mkdir(parents=True, exist_ok=True)
    best, run = Best(model, held_out, precision, given.out / "best.pt"), given.out / "fit"
    prior = False if given.dense else PriorConfig(weight=given.weight)
    result = bt.fit(
        model, data, likelihood=log_prob, config=config, prior=prior, callbacks=[best], seed=given.seed,
        num_data=len(data), folder=run, resume=any(run.glob("checkpoint*.pt")),
    )  # fmt: skip
    model.load_state_dict(best.state)
    start = torch.tensor([[number["\n"]]], device=given.device)
    sampled = model.eval().sample(start, 500, Generator().manual_seed(given.seed))[0].tolist()
    sample = "".join(symbols[code] for code in sampled)
    bt.save(model, given.out / "model")
    (given.out / "sample.txt").write_text(sample)
    environment = describe_environment(torch.device(given.device))
    write_json(given.out / "result.json", {
        "command": "python -m records.gpt " + shlex.join(sys.argv[1:]),
        "parameters": bt.count_parameters(model), "dense_parameters": dense_parameters,
        "ratio": dense_parameters / bt.count_parameters(model), "held_out_loss": best.loss,
        "validation_loss": loss(model, valid, precision), "ranks": bt.ranks(model), "seconds": result.seconds,
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()},
        "environment": environment | ({"commit": given.commit} if given.commit else {}),
    })  # fmt: skip
    print(sample, json.loads((given.out / "result.json").read_text())["validation_loss"], sep="\n")


if __name__ == "__main__":
    main()
