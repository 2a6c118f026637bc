"""`fit`: the same as a loop of one's own, for any network, data, likelihood, precision and optimiser."""

import copy
import io
import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fit_kit import HELD_OUT, TRAIN, Listener, assert_same, network, train
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bayestrain.compact import compact_
from bayestrain.errors import CollapseWarning, ConfigError, DecayWarning, TrainingError
from bayestrain.nn import TensorizeConfig, TensorLinear, count_parameters, dense_parameters, ranks, tensorize_
from bayestrain.posterior import Regression
from bayestrain.prior import RankPrior
from bayestrain.train import FitConfig, PriorConfig, ProgressPrinter, RunFolder, fit

LOADER = DataLoader(TensorDataset(*TRAIN), batch_size=100, shuffle=True)


def own_loop(model: nn.Module, epochs: int, cut_at: int, clip: float, half: bool) -> None:
    """The README's loop, with a schedule, clipping, cuts and, as in docs/how-to-choose.md, a GradScaler."""
    prior = RankPrior(model, num_data=600, warmup_steps=6, align_every=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    cosine = lambda step: 0.5 * (1 + math.cos(math.pi * (step // 6 + (step % 6) / 6) / epochs))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    torch.manual_seed(3)
    model.train()
    for epoch in range(epochs):
        if epoch == cut_at:
            compact_(model, 0.3, rule="contribution", optimizer=optimizer)
        for x, y in LOADER:
            with torch.autocast("cpu", torch.float16, enabled=half):
                outputs = model(x)
            loss = F.cross_entropy(outputs.float(), y) + prior.loss()
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            prior.step()
    compact_(model, 0.3)
    prior.remove_()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a GradScaler skips its first steps
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_fit_and_a_loop_of_your_own_give_the_same_weights_bit_for_bit(clip: float, half: bool) -> None:
    by_hand, fitted = network(), network()
    own_loop(by_hand, epochs=3, cut_at=2, clip=clip, half=half)
    options = {"epochs": 3, "finetune_epochs": 0, "compact_from": 2, "clip_norm": clip, "seed": 3}
    result = train(fitted, LOADER, precision="fp16" if half else "float32", **options)
    assert result.history[-1]["train_loss"] < 0.9 * result.history[1]["train_loss"]
    assert ranks(fitted) == ranks(by_hand)
    assert ranks(fitted) != {name: tuple(bonds) for name, bonds in result.history[0]["ranks"].items()}
    assert_same(fitted, by_hand)


def test_accumulated_batches_are_one_large_batch() -> None:
    """Means over the micro-batches, weighted by their sizes, and the prior once."""
    together, apart = network(dropout=0.0).double(), network(dropout=0.0).double()
    x, y = TRAIN[0][:500].double(), TRAIN[1][:500]
    small = [(x[i : i + 75], y[i : i + 75]) for i in range(0, 500, 75)]  # the last one has 50
    large = [(x[:150], y[:150]), (x[150:300], y[150:300]), (x[300:450], y[300:450]), (x[450:], y[450:])]
    options = {"epochs": 2, "finetune_epochs": 0, "compact_every": 0, "round_tol": 0.0}
    one = train(together, large, **options)
    other = train(apart, small, accumulate=2, **options)
    for key in ("train_loss", "prior_loss", "prior_weight"):
        assert [r[key] for r in one.history] == pytest.approx([r[key] for r in other.history])
    torch.testing.assert_close(together.state_dict(), apart.state_dict(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("changes", [
    {"precision": "bf16"}, {"precision": "fp16"}, {"clip_norm": 0.05}, {"optimizer": "adamw", "weight_decay": 0.1},
    {"optimizer": "adamw", "weight_decay": 0.1, "decay_cores": True}, {"optimizer": "sgd"}, {"optimizer": "muon"},
    {"lr_warmup_epochs": 2.0}, {"schedule": "step", "milestones": (0.3,)}, {"prior": False},
], ids=str)  # fmt: skip
def test_every_option_trains_and_makes_a_difference(changes: dict[str, Any]) -> None:
    plain, other = network(), network()
    short = {"epochs": 4, "finetune_epochs": 0, "compact_every": 0}
    train(plain, **short)
    result = train(other, **{**short, **changes})
    losses = [record["train_loss"] for record in result.history[1:]]
    assert losses[-1] < losses[0]
    assert not torch.equal(plain[0].cores[0], other[0].cores[0])


def test_training_gets_smaller_and_ends_without_lambda() -> None:
    heard = Listener()
    model = network()
    result = train(model, validation=HELD_OUT, epochs=8, lr=3e-2, callbacks=[heard])
    sizes = [record["parameters"] for record in result.history]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == count_parameters(model) < sizes[0]
    assert [record["phase"] for record in result.history] == ["search"] * 9 + ["finetune"] * 2
    assert result.history[-1]["validation"]["accuracy"] > 0.7
    assert result.validation == result.history[-1]["validation"]
    assert not any("lambda" in name for name in model.state_dict())
    assert result.model is model
    assert result.posterior is None
    assert heard.calls[:2] == ["start", "epoch 0"]
    assert heard.calls[-1] == "end"
    assert heard.calls.count("cut") == len(heard.cuts) == 8  # after epochs 1 to 7, and the final one
    assert heard.plan.num_data == 600
    assert heard.plan.steps_per_epoch == 6


def test_training_without_a_search() -> None:
    model = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))
    result = train(model, validation=HELD_OUT, epochs=6)
    assert [record["phase"] for record in result.history] == ["train"] * 7
    assert result.history[-1]["prior_weight"] == 1.0
    assert result.history[-1]["validation"]["accuracy"] > 0.7
    assert train(nn.Linear(24, 3), prior=False).history[-1]["prior_loss"] == 0.0
    model = network()
    before = ranks(model)
    result = train(model, search=False)
    assert ranks(model) == before
    assert len(result.history) == 5
    assert not any("lambda" in name for name in model.state_dict())


def test_the_generators_of_the_user_are_left_as_they_were() -> None:
    one, other = network(), network()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    train(one, LOADER, seed=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])
    torch.rand(7)
    train(other, LOADER, seed=1)
    assert_same(one, other)


def batches(size: int = 100) -> Iterator[tuple[Tensor, Tensor]]:
    return iter(zip(TRAIN[0].split(size), TRAIN[1].split(size), strict=True))


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(x, y) for x, y in zip(*TRAIN, strict=True)])


class Own:
    """As `bayestrain.data.Images` is."""

    def __len__(self) -> int:
        return 600

    def batches(self, batch_size: int, *, shuffle: bool, generator: torch.Generator, device: Any) -> Any:
        order = torch.randperm(600, generator=generator) if shuffle else torch.arange(600)
        return ((TRAIN[0][i].to(device), TRAIN[1][i].to(device)) for i in order.split(batch_size))


KINDS: dict[str, Any] = {
    "loader": LOADER, "dataset": TensorDataset(*TRAIN), "iterable dataset": Endless(), "tensors": TRAIN,
    "list of tensors": list(TRAIN), "batches": list(batches()), "function": batches, "own": Own(),
    "loader of own batches": DataLoader(list(batches()), batch_size=None, shuffle=True),
}  # fmt: skip


@pytest.mark.parametrize("data", KINDS.values(), ids=KINDS)
def test_all_kinds_of_data_train(data: Any) -> None:
    heard = Listener()
    result = train(network(), data, data, epochs=3, lr=3e-2, callbacks=[heard])
    assert result.history[-1]["train_loss"] < 0.8 * result.history[1]["train_loss"]
    assert result.history[-1]["train_accuracy"] > 0.5
    assert result.validation is not None
    assert (heard.plan.num_data, heard.plan.steps_per_epoch) == (600, 6)


@pytest.mark.parametrize(("data", "message"), [
    (batches(), "zip ends with the first. Pass the function that makes it"),
    (map(abs, [1]), "map ends with the first"),
    (3, "data must be a DataLoader, .* got a int"),
    ([], "data yielded no batch"),
    (lambda: iter(()), "yielded no batch"),
    ([{"x": TRAIN[0], "y": TRAIN[1]}], r"must be a pair \(inputs, targets\) .* got a dict"),
    ([(TRAIN[0], 3)], "got a tuple of Tensor, int"),
    ((TRAIN[0][:10], TRAIN[1]), r"as many rows as one another, got \[10, 600\]"),
])  # fmt: skip
def test_data_that_cannot_be_trained_on_say_what_to_pass(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(data=data)


def test_iterables_must_last_and_batches_of_one_datum_are_left_out() -> None:
    class Once:
        rest = batches()

        def __iter__(self) -> Iterator[Any]:
            return self.rest

    with pytest.raises(ConfigError, match="iterable once per epoch"):
        train(data=Once(), num_data=600)
    model = network(norm=True)
    heard = Listener()
    train(model, tuple(t[:301] for t in TRAIN), epochs=2, finetune_epochs=1, callbacks=[heard])
    assert heard.plan.steps_per_epoch == 3
    assert int(model[1].num_batches_tracked) == 3 * 3


def test_inputs_may_be_dicts_and_targets_real_numbers_in_double_precision() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.line = nn.Embedding(5, 8), TensorLinear(8 + 3, 1, max_rank=2)

        def forward(self, inputs: dict[str, Any]) -> Tensor:
            words = self.table(inputs["words"]).mean(1)
            return self.line(torch.cat([words, inputs["more"][0]], 1)).squeeze(1)

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(5, (300, 4), generator=generator)
    more = torch.randn(300, 3, generator=generator, dtype=torch.float64)
    y = more.sum(1) + (words == 2).sum(1)
    torch.manual_seed(0)
    model = Sum().double()
    data = ({"words": words, "more": (more, words)}, y)
    result = fit(model, data, data, likelihood="regression", epochs=30, lr=3e-2, batch_size=50, progress=False)
    assert result.validation["rmse"] < 0.2
    assert result.history[-1]["train_accuracy"] is None
    assert isinstance(result.likelihood, Regression)
    assert float(result.likelihood.log_variance.detach().exp().sqrt()) < 0.4
    assert model.line.cores[0].dtype == torch.float64


@pytest.mark.parametrize("particles", [1, 2])
def test_a_small_text_classifier_trains(particles: int) -> None:
    """Whether more words of one half of the vocabulary than of the other are in a sentence."""

    def build() -> nn.Module:
        mean = nn.AvgPool2d((9, 1)), nn.Flatten()
        model = nn.Sequential(nn.Embedding(50, 16), *mean, nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
        tensorize_(model, TensorizeConfig(max_rank=4))
        return model

    words = torch.randint(50, (800, 9), generator=torch.Generator().manual_seed(0))
    y = ((words < 25).sum(1) > 4).long()
    options: dict[str, Any] = {"epochs": 20, "lr": 2e-2, "target_ratio": 3.5, "batch_size": 50, "progress": False}
    result = fit(build, (words[:600], y[:600]), (words[600:], y[600:]), particles=particles, **options)
    assert result.validation["accuracy"] > 0.9
    assert 3.5 * count_parameters(result.model) <= dense_parameters(result.model)


def test_builders_configs_and_likelihoods() -> None:
    def laplace(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets).abs().sum(1)

    x = torch.randn(200, 24)
    result = train(network(), (x, x[:, :3]), (x, x[:, :3]), likelihood=laplace)
    assert result.validation.keys() == {"log_likelihood"}
    assert result.validation["log_likelihood"] > result.history[0]["validation"]["log_likelihood"]
    with pytest.raises(ConfigError, match="likelihood must be"):
        train(likelihood="poisson")
    result = fit(network, TRAIN, config=FitConfig(epochs=2, finetune_epochs=1, lr=1e-2), epochs=1, progress=False)
    assert {name: tuple(bonds) for name, bonds in result.history[0]["ranks"].items()} == ranks(network())
    assert len(result.history) == 3
    with pytest.raises(ConfigError, match="model must be a network, a function"):
        train(lambda: 3)
    with pytest.raises(ConfigError, match="model must be a network, a function"):
        train(3)


@pytest.mark.parametrize("decay_cores", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_weight_decay_spares_the_cores_unless_it_is_set(optimizer: str, decay_cores: bool, tmp_path: Path) -> None:
    model = network(norm=True)
    train(model, folder=tmp_path, epochs=1, optimizer=optimizer, weight_decay=0.1, decay_cores=decay_cores)
    with RunFolder(tmp_path, resume=True) as folder:
        groups = folder.load_checkpoint()[0]["subject"]["optimizer"]["param_groups"]
    decays = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
    spared = {name: ".cores." in name and not decay_cores for name, _ in model.named_parameters()}
    assert decays == {name: 0.0 if spared[name] else 0.1 for name in spared}


def test_an_optimiser_of_your_own_follows_the_schedule_in_proportion() -> None:
    made: list[torch.optim.Optimizer] = []

    def make(named: Any) -> torch.optim.Optimizer:
        few, many = named[:1], named[1:]
        made.append(torch.optim.SGD([{"params": few, "lr": 1e-3}, {"params": many}], lr=1e-2, momentum=0.9))
        return made[-1]

    result = train(optimizer=make, schedule="step", milestones=(0.5,), lr=1.0, finetune_epochs=0)
    assert result.history[-1]["lr"] == pytest.approx(0.1)
    assert [group["lr"] for group in made[0].param_groups] == pytest.approx([1e-4, 1e-3])
    with pytest.warns(DecayWarning, match="applies weight decay"):
        train(optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2))
    with pytest.raises(ConfigError, match="optimizer must be"):
        train(optimizer="adan")


def breaking(at: int, value: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A likelihood that is not finite at one step."""
    calls = itertools.count(1)

    def likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
        found = -F.cross_entropy(outputs, targets, reduction="none")
        return found * value if next(calls) == at else found

    return likelihood


def test_a_loss_that_is_not_finite_names_epoch_step_term_and_layer() -> None:
    with pytest.raises(TrainingError, match=r"epoch 3, step 2: the likelihood loss is nan.* are those of '\d") as error:
        train(likelihood=breaking(14, math.nan))
    assert "smaller lr" in str(error.value)
    with pytest.raises(TrainingError, match=r"epoch 1, step 1: the likelihood loss is inf"):
        train(likelihood=breaking(1, math.inf))

    model = network(dropout=0.0)
    with torch.no_grad():
        model[3].bias.fill_(1e25)  # its square is infinite
    with pytest.raises(TrainingError, match=r"weights have values that are not finite.* those of '3\.bias'"):
        train(model)


def test_what_is_not_finite_from_the_start_may_be_a_buffer_only() -> None:
    """Whatever comes first, the alignment, a cut or the final one: weights are checked before they are decomposed."""
    for options in ({"prior": PriorConfig(align_every=1, warmup_epochs=0)}, {"compact_every": 0}, {"epochs": 1}):
        with pytest.raises(TrainingError, match="diverged at epoch"):
            train(lr=1e30, optimizer="sgd", **options)
    model = network()
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    model.register_buffer("small", torch.ones(3).to(torch.float8_e4m3fn))
    assert len(train(model).history) == 7


@pytest.mark.parametrize(("changes", "message"), [
    ({"particles": 0}, r"posterior\.particles must be an integer at least 1, got 0"),
    ({"particles": -3}, "got -3"),
    ({"particles": 2}, "2 particles need as many networks, got 1: pass the function that builds one"),
    ({"epocs": 3}, 'no setting "fit.epocs". Did you mean "fit.epochs"'),
    ({"nonsense": 3}, 'no setting "fit.nonsense"'),
    ({"epochs": 0}, r"fit\.epochs must be an integer at least 1, got 0"),
    ({"resume": True}, "needs folder="),
    ({"target_ratio": 5.0, "search": False}, r"fit\.target_ratio needs factorised weights"),
    ({"target_ratio": 5.0, "target_parameters": 100}, "A run has one target"),
    ({"target_ratio": 1.2}, r"fit\.target_ratio 1\.2 is reached already: the network starts with [\d,]+ param"),
    ({"target_ratio": 1000.0}, r"fit\.target_ratio 1000 is out of reach: with every rank at 1"),
    ({"target_parameters": 20}, r"fit\.target_parameters 20 is out of reach: with every rank at 1"),
    ({"target_ratio": 0.5}, r"fit\.target_ratio must be above 1"),
    ({"target_ratio": 3.0, "rule": "lambda"}, r'rule "lambda" cannot cut to fit\.target_ratio'),
    ({"target_accuracy": 0.9}, "needs validation data"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_before_anything_changes(changes: dict[str, Any], message: str) -> None:
    model = network()
    with pytest.raises(ConfigError, match=message):
        train(model, **changes)
    assert_same(model, network())


def test_small_networks_take_one_thread_and_leave_the_others_as_they_were() -> None:
    seen: set[int] = set()

    class Look(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            return super().forward(x)

    small, large = Look(24, 3), nn.Sequential(Look(24, 50_000), nn.Linear(50_000, 3))
    convolves = nn.Sequential(Look(24, 9), nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 3, 3), nn.Flatten())
    wide = lambda: nn.Sequential(Look(24, 24), nn.Linear(24, 15_000), nn.Linear(15_000, 3))  # noqa: E731
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cases = (small, 0, 1, 1), (small, 2, 1, 2), (convolves, 0, 1, 2), (large, 0, 1, 2), (wide, 0, 4, 1)
        for model, threads, particles, wanted in cases:
            seen.clear()
            train(model, tuple(t[:50] for t in TRAIN), epochs=1, threads=threads, particles=particles)
            assert seen == {wanted}
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_progress_shows_likelihood_and_prior_apart_with_accuracy_size_and_time_left() -> None:
    out, now_and_then = io.StringIO(), io.StringIO()
    printers = [ProgressPrinter(every=0.0, file=out), ProgressPrinter(every=3600.0, file=now_and_then)]
    train(validation=HELD_OUT, callbacks=printers)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("training on 600 examples for 6 epochs: ")
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == [f"{k}/6" for k in range(7)]
    line = next(line for line in lines if line.startswith("epoch 3/6 (search)"))
    for part in ("likelihood loss ", "prior loss ", "train ", "validation ", " parameters (", "x smaller)", " left"):
        assert part in line
    assert "left" not in next(line for line in lines if line.startswith("epoch 6/6"))
    shown = [line.split()[1:3] for line in now_and_then.getvalue().splitlines() if line.startswith("epoch ")]
    assert shown == [["0/6", "(search)"], ["5/6", "(finetune)"], ["6/6", "(finetune)"]]  # phases and the end


def test_callbacks_may_have_any_of_the_methods_and_the_number_of_data_be_given() -> None:
    records: list[Any] = []
    train(callbacks=[SimpleNamespace(on_epoch=records.append), object()])
    assert len(records) == 7
    heard = Listener()
    train(data=batches, num_data=5000, callbacks=[heard])
    assert heard.plan.num_data == 5000


def test_teachers() -> None:
    """One step of plain gradient descent, compared with the loss written down."""
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    model, teacher = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3), nn.Dropout())
    twin = copy.deepcopy(model)
    taught = teacher[0](x).softmax(1).detach()
    logs = twin(x).log_softmax(1)
    loss = -0.5 * logs[torch.arange(32), y].mean() - 0.5 * (taught * logs).sum(1).mean()
    gradients = torch.autograd.grad(loss, list(twin.parameters()))
    options = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.1, "schedule": "constant", "epochs": 1}
    fit(model, [(x, y)], prior=False, teacher=teacher, progress=False, **options)
    for own, before, gradient in zip(model.parameters(), twin.parameters(), gradients, strict=True):
        assert_close(own, before - 0.1 * gradient)
    assert teacher.training
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    teacher, model = nn.Linear(4, 1), nn.Linear(4, 1)
    fit(model, (x, teacher(x).detach()), likelihood="regression", prior=False, teacher=teacher, epochs=200,
           lr=0.05, progress=False)  # fmt: skip
    assert_close(model.weight, teacher.weight, rtol=0, atol=0.05)
    with pytest.raises(ConfigError, match="cannot learn from a teacher"):
        fit(model, (x, y), likelihood=lambda o, t: -(o - t).square().sum(1), teacher=teacher, progress=False)
    with pytest.raises(ConfigError, match="teacher= is for one network, not for 2 particles"):
        fit(lambda: nn.Linear(4, 1), (x, y), particles=2, teacher=teacher, progress=False)


@pytest.mark.slow
def test_a_prior_that_undoes_the_training_of_held_layers_is_warned_of_once() -> None:
    """Their norms stay, so only the likelihood shows it."""
    layers = nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3), nn.BatchNorm1d(3)
    tensorize_(model := nn.Sequential(*layers), TensorizeConfig(max_rank=8))
    prior = PriorConfig(weight=3000.0, warmup_epochs=8)
    with pytest.warns(CollapseWarning, match=r"likelihood loss is 1\.\d+, after 0\.\d+ before the prior took") as told:
        train(model, epochs=12, finetune_epochs=0, lr=2e-2, prior=prior)
    assert len(told) == 1
