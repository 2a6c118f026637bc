"""The same numbers on a GPU as on the CPU. Left out where there is none."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import data, tt
from bayestrain.train.metrics import evaluator

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
