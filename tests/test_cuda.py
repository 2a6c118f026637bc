"""The same numbers on a GPU as on the CPU. Left out where there is none; needs nothing but torch and pytest."""

import copy
import math
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.errors import CaptureWarning
from bayestrain.formats import FORMATS, algebra
from bayestrain.nn import TensorConv2d, TensorLinear
from bayestrain.nn.fast import fast
from bayestrain.perf.capture import Capture, can_capture
from bayestrain.posterior import Posterior, independent

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(fast() is None, reason="perf is switched off"),
    pytest.mark.filterwarnings("ignore:The prior is erasing"),  # rightly so: the labels here are random
]

FORMAT = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


@pytest.fixture(autouse=True)
def _same_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Convolutions that add up in the same order each time, and no memory left by an earlier test."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-8, message: object = "") -> None:
    """Compare tensors of any device and dtype in double precision."""
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    scale = max(float(theirs.abs().max()), 1.0) if theirs.numel() else 1.0
    difference = float((ours - theirs).abs().max()) if theirs.numel() else 0.0
    assert difference <= tolerance * scale, f"{message}: {difference} of {scale}"


@FORMAT
def test_formats_compute_the_same(format: Any) -> None:
    sizes = (6, 5, 4)
    equation = format.equation(sizes)
    cores = algebra.random_cores(equation, sizes, format.max_ranks(sizes, 4), 1.0, dtype=torch.float64)
    there = [core.cuda() for core in cores]
    close(algebra.dense(equation, there), algebra.dense(equation, cores))
    close(algebra.norm(equation, there), algebra.norm(equation, cores))
    close(algebra.dense(equation, format.align(equation, there)), algebra.dense(equation, cores))
    for pair in zip(*(algebra.contributions(equation, own) for own in (there, cores)), strict=True):
        close(*pair)
    if format.rounds(equation):
        ours, theirs = (format.round(equation, own, 0.3) for own in (there, cores))
        assert [core.shape for core in ours] == [core.shape for core in theirs]
        close(algebra.dense(equation, ours), algebra.dense(equation, theirs))
    found = format.decompose(algebra.dense(equation, there), 0.3)
    assert all(core.is_cuda for core in found)


LAYERS = {
    "linear": (lambda: TensorLinear(48, 60, max_rank=5), (7, 48)),
    "few rows": (lambda: TensorLinear(48, 60, max_rank=2), (1, 48)),
    "padded": (lambda: TensorLinear(47, 59, in_modes=(6, 8), out_modes=(6, 10), max_rank=4), (3, 4, 47)),
    "split": (lambda: TensorLinear(48, 60, layout="split", max_rank=5), (40, 48)),
    "kernel": (lambda: TensorConv2d(16, 24, 3, padding=1, max_rank=30), (4, 16, 9, 9)),
    "two convolutions": (lambda: TensorConv2d(32, 48, 3, stride=2, padding=1, max_rank=5), (4, 32, 9, 9)),
}


def passes(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, that of evaluation, and all gradients."""
    x = x.clone().requires_grad_()
    y = layer.train()(x)
    gradients = torch.autograd.grad(y.to(x.dtype).square().mean(), [x, *layer.parameters()])
    with torch.no_grad():
        evaluated = layer.eval()(x)
    return [y, evaluated, *gradients]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layers_and_their_gradients(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1}[dtype]
    expected = passes(layer, x)
    there = copy.deepcopy(layer).to("cuda", dtype)
    for number, (ours, theirs) in enumerate(zip(passes(there, x.to("cuda", dtype)), expected, strict=True)):
        assert ours.is_cuda
        close(ours, theirs, tolerance, number)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_under_autocast(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    layer, x = make(), torch.randn(shape)
    expected = passes(layer, x)
    with torch.autocast("cuda", dtype):
        found = passes(copy.deepcopy(layer).cuda(), x.cuda())
    assert found[0].dtype == dtype
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        close(ours, theirs, 5e-2, number)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("rank", [5, 8, 13])
def test_two_convolutions_with_any_number_of_filters(rank: int, channels_last: bool) -> None:
    """In single precision: PyTorch itself does not keep channels_last for others. cuDNN may use TF32."""
    torch.manual_seed(0)
    layer, x = TensorConv2d(32, 48, 3, stride=2, padding=1, max_rank=rank), torch.randn(4, 32, 9, 9)
    expected = layer.to_dense()(x)
    x = x.cuda().contiguous(memory_format=torch.channels_last) if channels_last else x.cuda()
    y = layer.cuda()(x)
    close(y, expected, 1e-2)
    assert y.is_contiguous(memory_format=torch.channels_last) == channels_last


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A convolution before a batch norm, whose scale is held, and a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        TensorConv2d(4, 16, 3, padding=1, max_rank=6), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        TensorLinear(16 * 36, 10, max_rank=7),
    ).to(dtype)  # fmt: skip


def batches(number: int, device: str, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 8, 4, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 10, (number, 8), generator=generator)
    return list(zip(x.to(device, dtype), y.to(device), strict=True))


def test_an_own_loop_with_prior_and_compaction_in_the_middle() -> None:
    ours, theirs = network(), network().cuda()
    for net, device in ((ours, "cpu"), (theirs, "cuda")):
        prior = bt.RankPrior(net, num_data=100, warmup_steps=0, align_every=3)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        for step, (x, y) in enumerate(batches(7, device)):
            (F.cross_entropy(net(x), y) + prior.loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
            prior.step()
            if step == 4:
                bt.compact_(net, 0.2, rule="contribution", optimizer=optimizer)
    assert bt.ranks(ours) == bt.ranks(theirs)
    x = batches(1, "cpu")[0][0]
    close(theirs.eval()(x.cuda()), ours.eval()(x), 1e-6)
    assert all(u.is_cuda for u in theirs[0].factorized.rank_state.log_lambdas)


@FORMAT
def test_the_prior_of_every_format(format: Any) -> None:
    """Density, gradient, lambda's step, alignment and held scales, for a group of several weights."""
    torch.manual_seed(0)
    convolutions = [TensorConv2d(4, 4, 3, padding=1, format=format, max_rank=3) for _ in range(3)]
    blocks = [module for conv in convolutions for module in (conv, nn.BatchNorm2d(4), nn.ReLU())]
    ours = nn.Sequential(*blocks, nn.Flatten(), TensorLinear(64, 5, format=format, max_rank=3)).double()
    theirs = copy.deepcopy(ours).cuda()
    losses = []
    for net in (ours, theirs):
        prior = bt.RankPrior(net, 10, warmup_steps=0, align_every=2)
        for _ in range(4):
            loss = prior.loss()
            loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 1e-2 * parameter.grad if parameter.grad is not None else 0.0
                    parameter.grad = None
            prior.step()
        losses.append(loss)
    close(losses[1], losses[0])
    for (name, own), other in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        if not name.split(".")[-1].isdigit() or format.name == "tt":  # other gauges need not be unique
            close(own, other, 1e-5, name)


def adam(named: Any, rate: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=torch.tensor(rate, device="cuda"), capturable=True)


class Loop:
    """The steps of one network, captured or not."""

    def __init__(self, net: nn.Module, capturing: bool = True, bf16: bool = False) -> None:
        self.net, self.capture, self.bf16 = net.cuda(), Capture(), bf16
        self.capture.refused = not capturing
        self.prior = bt.RankPrior(net, 100, warmup_steps=5, align_every=20)
        self.optimizer = adam(net.parameters())
        assert can_capture(self.optimizer)
        dtype = next(net.parameters()).dtype
        self.weight = torch.zeros((), device="cuda", dtype=dtype)
        self.captured = 0

    def advance(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            outputs = self.net(x)
        loss = F.cross_entropy(outputs.to(self.weight.dtype), y) + self.prior.loss(self.weight)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.prior.step()
        return (loss.detach(),)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.weight.fill_(self.prior.current_weight)
        (loss,) = self.capture.step(self.advance, x, y, self.prior, self.optimizer)
        self.captured += self.capture.recorded is not None
        return loss.clone()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-2)])
def test_captured_steps_are_the_ordinary_steps(dtype: torch.dtype, tolerance: float) -> None:
    """Warm-up of the prior, alignments, another learning rate, a batch of another size, a cut."""
    ours, theirs = Loop(network(dtype)), Loop(network(dtype), capturing=False)
    for number, (x, y) in enumerate(batches(40, "cuda", dtype)):
        for loop in (ours, theirs):
            if number == 10:
                loop.optimizer.param_groups[0]["lr"].fill_(3e-3)
            if number == 20:
                bt.compact_(loop.net, 0.3, rule="contribution", optimizer=loop.optimizer)
                loop.capture.forget()
        x, y = (x[:5], y[:5]) if number == 15 else (x, y)
        close(ours.step(x, y), theirs.step(x, y), tolerance, number)
        assert bt.ranks(ours.net) == bt.ranks(theirs.net)
    for (name, own), other in zip(ours.net.state_dict().items(), theirs.net.state_dict().values(), strict=True):
        close(own, other, tolerance, name)
    assert (ours.captured > 20, theirs.captured) == (True, 0)
    assert ours.prior.steps == theirs.prior.steps == 40


def test_captured_steps_of_a_deep_network_make_their_weights_together() -> None:
    def deep() -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(TensorConv2d(16, 16, 3, padding=1, max_rank=20), nn.ReLU()) for _ in range(6)]
        return nn.Sequential(nn.Conv2d(4, 16, 1), *blocks, nn.Flatten(), nn.Linear(16 * 36, 10)).double()

    ours, theirs = Loop(deep()), Loop(deep(), capturing=False)
    for number, (x, y) in enumerate(batches(12, "cuda")):
        close(ours.step(x, y), theirs.step(x, y), 1e-7, number)
    assert ours.captured > 5
    assert ours.capture._together._stacks  # some were stacked


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precision_and_dropout_are_captured(precision: str) -> None:
    net = nn.Sequential(*network(torch.float32)[:4], nn.Dropout(0.3), network(torch.float32)[4])
    loop = Loop(net, bf16=precision == "bf16")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        losses = [float(loop.step(x, y)) for x, y in batches(1, "cuda", torch.float32) * 40]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert loop.captured > 20
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) > 30  # dropout draws another mask in each replay


class Looks(nn.Module):
    """Branches on a value, which a graph cannot."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) < 1e30 else -x


def test_a_step_that_cannot_be_captured_continues_with_a_warning() -> None:
    ours, theirs = (
        Loop(nn.Sequential(*network()[:4], Looks(), network()[4]), capturing=capturing) for capturing in (True, False)
    )
    for number, (x, y) in enumerate(batches(10, "cuda")):
        third = (
            pytest.warns(CaptureWarning, match="cannot be captured in a CUDA graph") if number == 2 else nullcontext()
        )
        with third:  # after two ordinary steps
            found = ours.step(x, y)
        close(found, theirs.step(x, y), 1e-7, number)
    assert ours.capture.refused
    assert ours.prior.steps == 10
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(3, device="cuda")  # the generator is free again


def test_capture_while_other_streams_and_threads_work() -> None:
    stop, busy = threading.Event(), torch.randn(512, 512, device="cuda")

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                float((busy @ busy).sum())  # waits for its own stream, which a global capture would forbid

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        ours, theirs = Loop(network()), Loop(network(), capturing=False)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # the user's own
            for number, (x, y) in enumerate(batches(15, "cuda")):
                close(ours.step(x, y), theirs.step(x, y), 1e-7, number)
        assert ours.captured > 5
    finally:
        stop.set()
        thread.join(timeout=60)


OTHER = """
import torch
a = torch.randn(1024, 1024, device="cuda")
for _ in range(2000):
    a = torch.nn.functional.normalize(a @ a)
print(float(a.sum()))
"""


def test_capture_beside_another_process() -> None:
    """It is captured, or it warns and continues with ordinary steps: never an error."""
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.DEVNULL)
    try:
        ours, theirs = Loop(network()), Loop(network(), capturing=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureWarning)
            for number, (x, y) in enumerate(batches(15, "cuda")):
                close(ours.step(x, y), theirs.step(x, y), 1e-7, number)
        assert (ours.captured > 5) != ours.capture.refused
    finally:
        other.wait(timeout=300)


def posterior(device: str, optimizer: Any, number: int = 4) -> Posterior:
    return Posterior(
        [net.to(device) for net in independent(network, number)], 100, optimizer=optimizer,
        prior=lambda net: bt.RankPrior(net, 100, warmup_steps=5, align_every=20),
    )  # fmt: skip


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-2, momentum=0.9)


def test_a_posterior_agrees_with_the_cpus() -> None:
    ours, theirs = posterior("cpu", sgd), posterior("cuda", sgd)
    for here, there in zip(batches(10, "cpu"), batches(10, "cuda"), strict=True):
        ours.step(*here)
        theirs.step(*there)
    for name, tensor in ours.particles.items():
        close(theirs.particles[name], tensor, 1e-6, name)
    assert ours.compact_(0.3).parameters == theirs.compact_(0.3).parameters
    x = batches(1, "cpu")[0][0]
    close(theirs.predict(x).mean, ours.predict(x).mean, 1e-5)


def test_a_captured_posterior_with_compaction_and_fixed_ranks() -> None:
    ours, theirs = posterior("cuda", adam), posterior("cuda", adam)
    theirs._capture.refused = True
    used = 0
    for number, (x, y) in enumerate(batches(40, "cuda")):
        for each in (ours, theirs):
            if number in (20, 30):
                each.compact_(0.3, rule="contribution" if number == 20 else None)
            if number == 30:
                each.fix_ranks_()
        x, y = (x[:5], y[:5]) if number == 15 else (x, y)
        close(ours.step(x, y).log_likelihood, theirs.step(x, y).log_likelihood, 1e-6, number)
        used += ours._capture.recorded is not None
    assert used > 18
    assert theirs._capture.recorded is None
    assert ours.prior.steps == theirs.prior.steps
    for name, tensor in theirs.particles.items():
        close(ours.particles[name], tensor, 1e-5, name)


def test_an_estimate_of_memory_keeps_nothing_and_is_about_right() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(144, 2000), nn.ReLU(), nn.Linear(2000, 10))

    own = Posterior([net.cuda() for net in independent(wide, 8)], 100)
    x, y = torch.randn(4096, 4, 6, 6, device="cuda"), torch.randint(0, 10, (4096,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    estimates = [own.estimate_memory(x, y) for _ in range(6)]
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert len({estimate.per_particle for estimate in estimates}) == 1
    torch.cuda.reset_peak_memory_stats()
    own._capture.refused = True  # graphs have memory of their own
    for _ in range(2):
        own.step(x, y)
    used, predicted = torch.cuda.max_memory_allocated() - before, estimates[0].chunk * estimates[0].per_particle
    assert predicted / 4 < used < predicted * 2 + estimates[0].held


def test_large_convolutions_of_particles_run_one_by_one() -> None:
    def build() -> nn.Module:
        layers = nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10)
        model = nn.Sequential(*layers)
        bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
        return model.double()

    x, y = (torch.cat(own) for own in zip(*batches(100, "cuda"), strict=True))
    alone, together = (
        Posterior([net.cuda() for net in independent(build, 3)], 640, chunk=chunk, optimizer=sgd) for chunk in (None, 3)
    )
    assert alone.estimate_memory(x, y).chunk == 1
    for _ in range(4):
        close(alone.step(x, y).log_likelihood, together.step(x, y).log_likelihood, 1e-6)
