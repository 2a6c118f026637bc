"""Curves of error against size: never above truncated SVD, falling, exact where they claim to be."""

import math
from itertools import pairwise, product

import pytest
import torch
from compress_kit import SHAPES, moment, target, truncated
from torch.testing import assert_close

from bayestrain.compress.budget import front
from bayestrain.compress.candidates import KINDS, Candidate, candidates, checked_kinds, fold
from bayestrain.compress.curves import RIDGE, Curve, Target, conjugate_gradients, points
from bayestrain.errors import ConfigError
from bayestrain.formats import algebra, get

CALIBRATED = ("", "patches", "channels")


@pytest.mark.parametrize("calibrated", CALIBRATED)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_layer_is_worse_than_svd_and_points_keep_their_promise(shape: tuple[int, ...], calibrated: str) -> None:
    """Of both unfoldings, at every rank; with calibration of the weight as it is and whitened."""
    own, (outputs, inputs, *taps) = target(shape, calibrated), shape
    found, dense = front(points(own, candidates(shape, KINDS))), own.weight.numel()
    by_outputs, by_inputs = own.weight.flatten(1), own.weight.movedim(1, -1).reshape(-1, inputs)
    tried = 0
    for root in roots(own):
        for matrix in (by_outputs, by_inputs):
            if len(root) not in (1, matrix.shape[1]):
                continue
            for rank in range(1, min(matrix.shape) + 1):
                rival = truncated(matrix @ root if len(root) > 1 else matrix, rank)
                rival = rival @ torch.linalg.inv(root) if len(root) > 1 else rival
                back = rival.reshape(shape) if matrix is by_outputs else (
                    rival.reshape(outputs, *taps, inputs).movedim(-1, 1)
                )  # fmt: skip
                size, error = rank * sum(matrix.shape), float(own.loss(back - own.weight) / own.norm)
                if size < dense:
                    assert min(point.error for point in found if point.size <= size) <= error + 1e-9
                    tried += 1
    assert tried > 4
    assert len(found) > 5
    assert all(a.size < b.size and a.error > b.error for a, b in pairwise(found))
    for point in found[:: max(len(found) // 6, 1)]:
        curve = Curve(own, point.candidate)
        cores = curve.cut(point.ranks)
        plain = curve.plain_cores(cores)
        weight = point.candidate.layout.unfold(algebra.dense(curve.equation, plain))
        assert sum(core.numel() for core in plain) == point.size < own.weight.numel()
        assert_close(float(own.loss(weight - own.weight) / own.norm), point.error, rtol=1e-6, atol=1e-9)


def roots(own: Target) -> list[torch.Tensor]:
    """What a rival may whiten with: nothing (1x1), the moment, and the moment of the channels alone."""
    found = [torch.ones(1, 1, dtype=torch.float64)]
    if own.moment is not None:
        inputs, taps = own.weight.shape[1], own.weight[0, 0].numel()
        found.append(torch.linalg.cholesky(own.moment))
        if own.whole and taps > 1:
            channels = own.moment.reshape(inputs, taps, inputs, taps).diagonal(dim1=1, dim2=3).sum(-1)
            found.append(torch.linalg.cholesky(channels))
    return found


@pytest.mark.parametrize("calibrated", ["patches", "channels"])
@pytest.mark.parametrize("shape", ["kernel", "linear"])
def test_errors_read_off_a_bond_are_those_of_the_weight(shape: str, calibrated: str) -> None:
    """Also where the whitening is not exact, or off."""
    own, tried = target(SHAPES[shape], calibrated), 0
    for candidate in candidates(SHAPES[shape], ("svd",)):
        curve = Curve(own, candidate)
        for size, error, ranks in curve.path() if curve.known is not None else ():
            assert size < own.weight.numel()
            assert_close(curve.error(curve.cut(ranks)), error, rtol=1e-6, atol=1e-9)
            tried += 1
    assert tried >= 4


@pytest.mark.parametrize(("shape", "modes"), [((6, 4), "o1, o2, i1, i2 k"), ((4, 6, 3, 3), "i, h, w, o")])
@pytest.mark.parametrize("share", [0.25, 0.35, 0.5, 0.8])
def test_trains_in_a_budget_are_as_good_as_a_grid_of_all_ranks(
    shape: tuple[int, ...], modes: str, share: float
) -> None:
    own, train, layout = target(shape), get("tt"), fold(shape, modes)
    curve, tensor = Curve(own, Candidate("tt", modes, train, layout)), layout.fold(own.weight)
    errors, budget = [], int(share * tensor.numel())
    for ranks in product(*(range(1, most + 1) for most in train.max_ranks(layout.sizes))):
        cores = train.decompose(tensor, max_rank=ranks)
        if sum(core.numel() for core in cores) <= budget:
            errors.append(float((algebra.dense(curve.equation, cores) - tensor).norm() / tensor.norm()))
    if errors:
        assert math.sqrt(curve.error(curve.cut(curve.largest(budget)))) <= 1.02 * min(errors)
    assert errors or share < 0.5


@pytest.mark.parametrize("shape", [(6, 8), (4, 3, 3, 3)], ids=["linear", "kernel"])
def test_whitened_svd_is_the_optimum_that_a_search_finds(shape: tuple[int, ...]) -> None:
    """Alternating exact least squares in the metric, from ten starts."""
    own = target(shape, "patches")
    svd = next(each for each in candidates(shape, ("svd",)) if each.modes in ("o, i k", "o, ik"))
    ours = {point.ranks: point.error for point in points(own, [svd])}
    matrix = own.weight.flatten(1)
    for rank in (1, 2, 3):
        best = math.inf
        for _ in range(10):
            b = torch.randn(rank, matrix.shape[1], dtype=torch.float64)
            for _ in range(300):
                a = torch.linalg.solve(b @ own.moment @ b.mT, b @ own.moment @ matrix.mT).mT
                b = torch.linalg.solve(a.mT @ a, a.mT @ matrix)
            best = min(best, float(own.loss((a @ b - matrix).reshape(shape)) / own.norm))
        assert_close(ours[(rank,)], best, rtol=1e-6, atol=0)


@pytest.mark.parametrize("calibrated", CALIBRATED)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "svd"])
def test_refinement_never_loses_and_often_gains(kind: str, calibrated: str) -> None:
    own, gained = target(SHAPES["kernel"], calibrated), []
    for candidate in candidates(SHAPES["kernel"], (kind,)):
        curve = Curve(own, candidate)
        path = curve.path()
        cores = curve.cut(path[len(path) // 2][2])
        before, after = curve.error(cores), curve.error(curve.refined(cores))
        assert after <= before * (1 + 1e-9)
        gained.append(after < 0.999 * before)
    assert any(gained) or (curve.exact and not curve.equation.is_tree)  # a fit in the exact metric is at its end


def test_candidates_ridges_and_conjugate_gradients() -> None:
    for shape in SHAPES.values():
        weight, found = torch.randn(shape), candidates(shape, KINDS)
        assert {each.kind for each in found} == set(KINDS)
        for each in found:
            assert_close(each.layout.unfold(each.layout.fold(weight)), weight, rtol=0, atol=0)
            assert math.prod(each.layout.sizes) == weight.numel(), "no padding"
    assert {each.modes for each in candidates((8, 6, 3, 3), ("svd",))} == {"o, i k", "o k, i", "o h, i w", "o w, i h"}
    assert fold((7, 6), "o1 i1, o2 i2 k") is None  # 7 has no two factors
    assert get("tt") is candidates((8, 6), ("svd",))[0].format
    assert checked_kinds(None) == KINDS
    assert checked_kinds("svd") == ("svd",)
    for wrong in ((), ("svd", "qr"), "qr"):
        with pytest.raises(ConfigError, match="formats must be some of"):
            checked_kinds(wrong)
    own = Target(torch.eye(4, 6), torch.diag(torch.tensor([1.0, 1, 1, 0, 0, 0], dtype=torch.float64)))
    assert_close(own.moment.diagonal(), torch.tensor([2.0, 2, 2, 0, 0, 0], dtype=torch.float64) + RIDGE)
    matrix, right = moment(12) + 0.1 * torch.eye(12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    found = conjugate_gradients(lambda x: matrix @ x, right, torch.zeros(12, dtype=torch.float64), 60)
    assert_close(found, torch.linalg.solve(matrix, right))
