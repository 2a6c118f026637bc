"""The same numbers on a GPU as on the CPU. Left out where there is none."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import data, tt
from bayestrain.errors import Interrupted
from bayestrain.train import toml
from bayestrain.train.experiment import run_experiment
from bayestrain.train.metrics import evaluator
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
    torch.testing.assert_close(tt.to_dense(tt.align(on_gpu)).cpu(), dense, **tol)
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
        ordinary.capture.steady = -1_000_000  # never captured
        ours, theirs = captured.step(x, y), ordinary.step(x, y)
        used += captured.capture.recorded is not None
        assert torch.equal(ours.log_likelihood, theirs.log_likelihood), number
        for group in ("particles", "carried"):
            for name, tensor in getattr(ordinary, group).items():
                assert torch.equal(getattr(captured, group)[name], tensor), (number, name)
    assert used > 25
    assert ordinary.capture.recorded is None
    assert captured.prior.steps == ordinary.prior.steps


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
