"""The same numbers on a GPU as on the CPU. Left out where there is none."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fit_kit import StopAfter, jitter, settings
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import data, gauge, tt
from bayestrain.errors import CaptureWarning, Interrupted
from bayestrain.train import toml
from bayestrain.train.experiment import run_experiment
from bayestrain.train.metrics import evaluator
from bayestrain.train.point import Point
from bayestrain.train.progress import Silent

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def both(cores: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return cores, [core.cuda() for core in cores]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_maths_agrees(dtype: torch.dtype) -> None:
    cores, on_gpu = both(tt.random_cores([(3, 4), (4, 3), (2, 5)], (5, 6), 1.0, dtype=dtype))
    tol = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    dense = tt.to_dense(cores)
    torch.testing.assert_close(tt.to_dense(on_gpu).cpu(), dense, **tol)
    torch.testing.assert_close(tt.norm(on_gpu).cpu(), tt.norm(cores), **tol)
    torch.testing.assert_close(tt.to_dense(gauge.align(on_gpu)).cpu(), dense, **tol)
    rounded, rounded_gpu = tt.round_cores(cores, 0.3), tt.round_cores(on_gpu, 0.3)
    assert tt.ranks(rounded) == tt.ranks(rounded_gpu)
    torch.testing.assert_close(tt.to_dense(rounded_gpu).cpu(), tt.to_dense(rounded), **tol)
    svd = tt.tt_svd(dense.flatten(0, 1).cuda(), 0.3)
    assert all(core.is_cuda for core in svd)
    for a, b in zip(tt.contributions(on_gpu), tt.contributions(cores), strict=True):
        torch.testing.assert_close(a.cpu(), b, **tol)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        bt.TTConv2d(4, 16, 3, padding=1, max_rank=6), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        bt.TTLinear(16 * 36, 10, max_rank=(7,)),
    )  # fmt: skip


def test_layers_prior_and_compaction_agree_step_by_step() -> None:
    ours = model().double()
    theirs = copy.deepcopy(ours).cuda()
    x, y = torch.randn(8, 4, 6, 6).double(), torch.randint(0, 10, (8,))
    for net in (ours, theirs):
        place = next(net.parameters()).device
        prior = bt.RankPrior(net, num_data=100, align_every=3)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        for step in range(7):
            (F.cross_entropy(net(x.to(place)), y.to(place)) + prior.loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
            prior.step()
            if step == 4:
                bt.compact_(net, 0.2, "contribution", optimizer)
    assert bt.ranks(ours) == bt.ranks(theirs)
    torch.testing.assert_close(theirs(x.cuda()).cpu(), ours(x), rtol=1e-6, atol=1e-6)
    assert theirs[0].rank_state is not None
    assert theirs[0].rank_state.log_lambdas[0].is_cuda


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_fit_on_the_gpu_and_resume(precision: str, tmp_path: Path) -> None:
    splits = data.load("mnist-mini")
    train = splits.train.subset(range(2000))
    config = bt.FitConfig(
        epochs=4, batch_size=100, lr=1e-2, precision=precision, compact_every=1, compact_from=2, finetune_epochs=1
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, 10))
    bt.tensorize_(net)
    evaluate = evaluator(splits.test, lambda x: x, "cuda")
    result = bt.fit(net, train, evaluate, config, device="cuda", folder=tmp_path)
    assert result.history[-1]["validation"]["accuracy"] > 0.7
    again = nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, 10))
    bt.tensorize_(again)
    bt.fit(again, train, evaluate, config, device="cuda", folder=tmp_path, resume=True)
    x = splits.test.images[:10].float().cuda() / 255
    torch.testing.assert_close(again.eval()(x), net.eval()(x))


def posterior(device: str, capturable: bool) -> bt.Posterior:
    def build() -> nn.Module:
        return nn.Sequential(
            bt.TTConv2d(4, 16, 3, padding=1, max_rank=4), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
            bt.TTLinear(16 * 36, 10, max_rank=(5,)),
        ).double()  # fmt: skip

    def optimizer(tensors: Any) -> torch.optim.Optimizer:
        if not capturable:
            return torch.optim.SGD(tensors, lr=1e-2, momentum=0.9)
        return torch.optim.Adam(tensors, lr=torch.tensor(1e-2, dtype=torch.float64, device=device), capturable=True)

    return bt.Posterior(
        [net.to(device) for net in bt.independent(build, 4)], 100, optimizer=optimizer,
        prior=lambda net: bt.RankPrior(net, 100, warmup_steps=5, align_every=6),
    )  # fmt: skip


def batches(number: int, device: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(8, 4, 6, 6, generator=generator).double().to(device),
            torch.randint(0, 10, (8,), generator=generator).to(device),
        )
        for _ in range(number)
    ]


def test_a_posterior_agrees_with_the_cpus() -> None:
    ours, theirs = posterior("cpu", False), posterior("cuda", False)
    for (x, y), (on_gpu, labels) in zip(batches(10, "cpu"), batches(10, "cuda"), strict=True):
        ours.step(x, y)
        theirs.step(on_gpu, labels)
    for name, tensor in ours.particles.items():
        torch.testing.assert_close(theirs.particles[name].cpu(), tensor, rtol=1e-7, atol=1e-8, msg=name)
    assert ours.compact_(0.3).parameters == theirs.compact_(0.3).parameters
    torch.testing.assert_close(theirs.predict(x).mean, ours.predict(x).mean, rtol=1e-6, atol=1e-7)


def test_a_captured_step_is_the_ordinary_step_bit_for_bit() -> None:
    """Warm-up of the prior, alignments, another learning rate, a batch of another size, compaction, fixed ranks."""
    captured, ordinary = posterior("cuda", True), posterior("cuda", True)
    used = 0
    for number, (x, y) in enumerate(batches(40, "cuda")):
        if number == 10:
            captured.method.set_lr(3e-3)
            ordinary.method.set_lr(3e-3)
        if number == 15:
            x, y = x[:5], y[:5]
        if number in (20, 30):
            rule = "contribution" if number == 20 else "rounding"
            assert captured.compact_(0.3, rule).parameters == ordinary.compact_(0.3, rule).parameters
        if number == 30:
            captured.fix_ranks_()
            ordinary.fix_ranks_()
        ordinary.capture.refused = True
        ours, theirs = captured.step(x, y), ordinary.step(x, y)
        used += captured.capture.recorded is not None
        assert torch.equal(ours.log_likelihood, theirs.log_likelihood), number
        for group in ("particles", "carried"):
            for name, tensor in getattr(ordinary, group).items():
                assert torch.equal(getattr(captured, group)[name], tensor), (number, name)
    assert used > 25
    assert ordinary.capture.recorded is None
    assert captured.prior.steps == ordinary.prior.steps


# --- one network ------------------------------------------------------------------------------------------------------


@pytest.fixture
def same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions that add up in the same order each time."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def point(net: nn.Module, **changes: Any) -> Point:
    """A network on the GPU, in training; five steps are an epoch, the prior aligns every sixth."""
    prior = bt.PriorConfig(warmup_epochs=1, align_every=6)
    config = settings(batch_size=8, finetune_lr=1e-3, **changes)
    return Point(net, config, prior, F.cross_entropy, 40, torch.device("cuda"), search=True)


def both_ways(
    net: Callable[[], nn.Module], dtype: torch.dtype, between: Callable[[int, Point], None], **changes: Any
) -> Point:
    """Forty steps captured, forty as usual, compared bit for bit after each; the captured network."""
    seen: list[list[Tensor]] = []
    for capturing in (False, True):
        subject = point(net(), **changes)
        subject.capture.refused = not capturing
        torch.manual_seed(1)  # of dropout
        replayed = 0
        for number, (x, y) in enumerate(batches(40, "cuda")):
            between(number, subject)
            x, y = (x[:5], y[:5]) if number == 15 else (x, y)
            numbers = subject.step(x.to(dtype), y)
            replayed += subject.capture.recorded is not None
            state = [tensor.detach().clone() for tensor in subject.model.state_dict().values()]
            found = [numbers.clone(), *state]
            if not capturing:
                seen.append(found)
                continue
            for k, (ours, theirs) in enumerate(zip(found, seen[number], strict=True)):
                assert torch.equal(ours, theirs), (number, k)
        assert replayed > 25 if capturing else replayed == 0
    return subject


@pytest.mark.usefixtures("same_kernels")
@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 1e-2},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"optimizer": "sgd", "lr": 1e-3, "clip_norm": 1.0},
        {"optimizer": "muon", "lr": 1e-3, "weight_decay": 0.1},
    ],
    ids=["adam", "adamw", "sgd", "muon"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_captured_map_step_is_the_ordinary_step_bit_for_bit(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """Warm-up of the prior, alignments, another learning rate, a smaller batch, a cut, the end of the search."""

    def between(number: int, subject: Point) -> None:
        if number == 10:
            subject.set_rate(3e-4)
        if number == 20:
            capturing = subject.capture.recorded is not None
            assert subject.cut(0.5).changed
            assert subject.capture.recorded is None
            assert capturing != subject.capture.refused
        if number == 30:
            assert (subject.capture.recorded is not None) != subject.capture.refused  # anew after the cut
            subject.round(0.3)
            assert subject.capture.recorded is None

    subject = both_ways(lambda: model().to(dtype), dtype, between, **changes)
    assert subject.capture.recorded is not None
    assert subject.prior is None


@pytest.mark.usefixtures("same_kernels")
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_dropout_and_every_precision_are_captured(precision: str) -> None:
    def net() -> nn.Module:
        return nn.Sequential(*model()[:4], nn.Dropout(0.3), model()[4])

    subject = both_ways(net, torch.float32, lambda _, __: None, precision=precision)
    assert subject.prior is not None
    assert subject.prior.steps == 40
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("same_kernels")
def test_a_step_that_looks_at_a_value_goes_on_uncaptured() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.detach().sum()) < 1e30 else -x

    subject, twin = (point(nn.Sequential(*model()[:4], Looks(), model()[4])) for _ in range(2))
    twin.capture.refused = True
    for number, (x, y) in enumerate(batches(10, "cuda")):
        theirs = twin.step(x.float(), y)
        if number == 2:
            with pytest.warns(CaptureWarning, match="cannot be captured in a CUDA graph"):
                ours = subject.step(x.float(), y)
        else:
            ours = subject.step(x.float(), y)
        torch.testing.assert_close(ours, theirs)
    assert subject.prior is not None
    assert subject.prior.steps == 10


def images(number: int) -> data.Images:
    """Digits in three channels."""
    digits = data.load("mnist-mini").train.subset(range(number))
    return data.Images(digits.images.expand(-1, 3, -1, -1).contiguous(), digits.labels)


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 36, 10),
    )  # fmt: skip
    bt.tensorize_(net, bt.TensorizeConfig(max_rank=8), lambda _, name: name != "0")
    return net


@pytest.mark.usefixtures("same_kernels")
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_a_resumed_map_run_ends_as_the_uninterrupted_one(optimizer: str, tmp_path: Path) -> None:
    train, whole, again = images(1050), convolutions(), convolutions()
    config = settings(optimizer=optimizer, lr=1e-3 if optimizer == "sgd" else 1e-2)
    options: dict[str, Any] = {
        "prior": bt.PriorConfig(warmup_epochs=1, align_every=4), "augment": jitter, "device": "cuda"
    }  # fmt: skip
    bt.fit(whole, train, None, config, **options)
    with pytest.raises(Interrupted):
        bt.fit(convolutions(), train, None, config, **options, folder=tmp_path, progress=StopAfter(2))
    torch.rand(7, device="cuda")
    bt.fit(again, train, None, config, **options, folder=tmp_path, resume=True)
    assert bt.ranks(again) == bt.ranks(whole)
    for (name, ours), (_, theirs) in zip(again.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_goes_on_on_another_device(devices: tuple[str, str], optimizer: str, tmp_path: Path) -> None:
    train, config = images(1000), settings(optimizer=optimizer, lr=1e-3)
    with pytest.raises(Interrupted):
        bt.fit(
            convolutions(), train, None, config, augment=jitter, device=devices[0], folder=tmp_path,
            progress=StopAfter(2),
        )  # fmt: skip
    result = bt.fit(
        convolutions(), train, None, config, augment=jitter, device=devices[1], folder=tmp_path, resume=True
    )
    losses = [line["train_loss"] for line in result.history[1:]]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_convolutions_get_channels_last_images_and_learn(precision: str) -> None:
    net, train = convolutions(), images(2000)
    layouts = set()

    def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layouts.add(inputs[0].is_contiguous(memory_format=torch.channels_last))

    net[0].register_forward_pre_hook(look)
    evaluate = evaluator(train, lambda x: x, "cuda")
    result = bt.fit(net, train, evaluate, settings(precision=precision), augment=jitter, device="cuda")
    assert layouts == {True}
    assert result.history[-1]["validation"]["accuracy"] > 0.7
    assert torch.get_float32_matmul_precision() == "highest"


def test_blocks_of_batches_hold_every_image_once() -> None:
    train = data.load("mnist-mini").train.subset(range(1050)).to("cuda")
    generator, noise = torch.Generator().manual_seed(3), torch.Generator("cuda").manual_seed(3)
    found = list(train.batches(100, shuffle=True, generator=generator, augment=lambda x: data.flip(x, noise)))
    order = torch.randperm(1050, generator=torch.Generator().manual_seed(3))
    assert [len(y) for _, y in found] == [100] * 10 + [50]
    assert torch.equal(torch.cat([y for _, y in found]).cpu(), train.labels.cpu()[order])
    ours = torch.cat([x for x, _ in found]).cpu().sum((1, 3))  # over columns: a mirrored image has the same
    torch.testing.assert_close(ours, (train.images.cpu()[order].float() / 255).sum((1, 3)))


def test_a_posterior_run_on_the_gpu_resumes(tmp_path: Path) -> None:
    config = toml.named("mnist-mini", "default", [
        "fit.epochs=3", "fit.finetune_epochs=1", "fit.batch_size=500", "fit.compact_from=1", "posterior.particles=3",
        "posterior.compare_map=false",
    ])  # fmt: skip

    class Stop(Silent):
        def epoch(self, record: Any) -> None:
            if record["epoch"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run_experiment(config, tmp_path / "run", device="cuda", resume=False, progress=Stop(), command="")
    result = run_experiment(config, tmp_path / "run", device="cuda", resume=True, progress=Silent(), command="").summary
    assert result["accuracy"] > 0.9
    digits = data.load("mnist-mini").test.images[:50].float() / 255
    loaded = bt.load_posterior(tmp_path / "run")
    torch.testing.assert_close(
        loaded.predict(digits).mean, loaded.to("cuda").predict(digits).mean, rtol=1e-3, atol=1e-4
    )
