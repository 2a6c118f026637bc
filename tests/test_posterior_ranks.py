"""One set of ranks for all particles: what is promised, and what stays as it was."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import gauge, tt
from bayestrain.errors import ConfigError
from bayestrain.posterior import Posterior, independent, stacked_cores
from bayestrain.posterior.ranks import by_contribution, by_lambda, by_rounding, own_ranks, take
from bayestrain.sizes import tt_layers

SHAPES = [(3, 4), (4, 2), (3, 3)]


def trains(n: int, decay: float, seed: int = 0) -> list[Tensor]:
    """Stacked cores whose spectra fall, in every particle at another pace."""
    torch.manual_seed(seed)
    particles = []
    for i in range(n):
        cores = tt.random_cores(SHAPES, (6, 5), 1.0, dtype=torch.float64)
        for bond in (1, 2):
            scale = (decay * (1 + 0.3 * i / n)) ** -torch.arange(cores[bond].shape[0], dtype=torch.float64)
            cores[bond] = cores[bond] * scale[:, None, None, None]
        particles.append(cores)
    return [torch.stack(core) for core in zip(*particles, strict=True)]


def errors(before: list[Tensor], after: list[Tensor]) -> Tensor:
    """Relative change of every particle's full matrix."""
    dense = [
        [tt.matrix_to_dense([core[i] for core in cores]) for i in range(len(cores[0]))] for cores in (before, after)
    ]
    return torch.stack([(a - b).norm() / a.norm() for a, b in zip(*dense, strict=True)])


@pytest.mark.parametrize("tol", [0.0, 1e-3, 0.03, 0.2])
@pytest.mark.parametrize("rule", [by_rounding, by_contribution])
def test_the_mean_square_error_over_particles_is_within_the_tolerance(rule: Any, tol: float) -> None:
    cores = trains(7, 3.0)
    cut = rule(cores, tol)
    found = errors(cores, cut.cores).square().mean().sqrt()
    assert float(found) <= max(tol, 1e-12)
    ranks = tt.ranks([core[0] for core in cut.cores])
    assert all(tt.ranks([core[i] for core in cut.cores]) == ranks for i in range(7))
    if tol == 0.2:
        assert ranks[1] < 6


def test_rounding_cannot_go_one_rank_lower() -> None:
    """At each bond the next smaller rank would break the bond's share of the tolerance."""
    cores, tol = trains(5, 2.5), 0.1
    shared = tt.ranks([core[0] for core in by_rounding(cores, tol).cores])
    share = tol / math.sqrt(2)
    for bond in (1, 2):
        spectra = torch.stack([tt.bond_spectra([core[i] for core in cores])[bond - 1] for i in range(5)]).square()
        lower = spectra[:, shared[bond] - 1 :].sum(1) / spectra.sum(1)
        assert float(lower.mean().sqrt()) > share


def test_the_gauge_does_not_matter() -> None:
    cores = trains(4, 3.0)
    turned = [core.clone() for core in cores]
    for i in range(4):
        matrix = torch.randn(6, 6, dtype=torch.float64) + 3 * torch.eye(6, dtype=torch.float64)
        for k, core in enumerate(gauge.change_gauge([core[i] for core in cores], 1, matrix)):
            turned[k][i] = core
    one, other = by_rounding(cores, 0.05), by_rounding(turned, 0.05)
    assert [core.shape for core in one.cores] == [core.shape for core in other.cores]
    assert own_ranks(cores, 0.05) == own_ranks(turned, 0.05)


def test_a_particle_that_needs_less_is_filled_up_with_zeros() -> None:
    cores = trains(3, 1.5)
    for core in cores:
        core[1] = 0.0
    cores[0][1, :, 0, 0, 0] = cores[1][1, 0, 0, 0, 0] = cores[2][1, 0, 0, 0] = 1.0  # rank 1
    cut = by_rounding(cores, 1e-6)
    assert float(errors(cores, cut.cores).max()) < 1e-6
    assert own_ranks(cores, 1e-6)[0][1] == 1 < own_ranks(cores, 1e-6)[0][0]


def test_every_particle_keeps_its_own_most_important_indices() -> None:
    cores = trains(3, 4.0)
    for core, axis in ((cores[0], -1), (cores[1], 1)):  # other particles, other order
        for i in range(3):
            core[i] = core[i].roll(i, dims=axis if axis == -1 else 0)
    cut = by_contribution(cores, 0.1)
    assert cut.keep is not None
    assert len({tuple(row.tolist()) for row in cut.keep[0]}) > 1
    for k, core in enumerate(cores):
        torch.testing.assert_close(take(core, cut.keep, k), cut.cores[k])


def test_the_papers_rule_looks_at_the_mean_of_sorted_lambdas() -> None:
    cores = trains(2, 3.0)
    first = torch.tensor([[0.5, 0.001, 0.2, 0.001, 0.001, 0.001], [0.001, 0.4, 0.001, 0.3, 0.001, 0.001]])
    second = torch.full((2, 5), 1e-9)
    cut = by_lambda(cores, [first.log(), second.log()], 0.05)
    assert cut.keep is not None
    assert [kept.tolist() for kept in cut.keep] == [[[0, 2], [1, 3]], [[0], [0]]]  # never below 1
    assert cut.collapsed == [2]


def network() -> nn.Module:
    return nn.Sequential(
        bt.TTLinear(24, 12, in_modes=(4, 6), out_modes=(3, 4), max_rank=6), nn.ReLU(), bt.TTLinear(12, 3, max_rank=3)
    ).double()


def trained(rule: str = "contribution") -> tuple[Posterior, Tensor, Tensor]:
    posterior = Posterior(
        independent(network, 4), 60, optimizer=lambda tensors: torch.optim.Adam(tensors, lr=0.02),
        prior=lambda model: bt.RankPrior(model, 60, align_every=5, weight=1.0 if rule else 0.0),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 24, generator=generator).double()
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for _ in range(120):
        posterior.step(x, y)
    return posterior, x, y


def test_compaction_in_training_keeps_optimiser_lambda_and_function() -> None:
    posterior, x, y = trained()
    before = posterior.outputs(x)
    moments = posterior.method.optimizer.state[posterior.particles["model.0.cores.1"]]["exp_avg"].clone()
    weights = posterior.particles["model.0.cores.1"].detach().clone()
    identity = {name: id(tensor) for name, tensor in posterior.particles.items()}
    report = posterior.compact_(0.05, "contribution")
    assert report.changed
    assert posterior.parameters_each == report.parameters < report.parameters_before
    assert {name: id(tensor) for name, tensor in posterior.particles.items()} == identity
    assert posterior.ranks["0"] == tt.ranks(list(posterior.template.get_submodule("0").cores))  # type: ignore[arg-type]
    kept = posterior.particles["model.0.cores.1"].detach()
    sliced = posterior.method.optimizer.state[posterior.particles["model.0.cores.1"]]["exp_avg"]
    assert sliced.shape == kept.shape
    for i in range(4):  # the moments of exactly the slices that are left
        rows = [int((weights[i] == kept[i, r]).flatten(1).all(1).nonzero()) for r in range(kept.shape[1])]
        assert torch.equal(sliced[i], moments[i, rows])
    u = posterior.carried["model.0.rank_state.log_lambda_1"]
    assert u.shape == (4, posterior.ranks["0"][1])
    change = (posterior.outputs(x) - before).norm() / before.norm()
    assert float(change) < 0.15  # three layers of 5 % at the very most
    for _ in range(5):
        posterior.step(x, y)


@pytest.mark.parametrize("tol", [1e-3, 1e-2, 0.1])
def test_compaction_changes_outputs_less_than_promised(tol: float) -> None:
    """One linear layer: the change of its output is at most that of its weight times the size of the input."""

    def layer() -> nn.Module:
        return bt.TTLinear(24, 12, in_modes=(4, 6), out_modes=(3, 4), max_rank=6, bias=False).double()

    posterior = Posterior(independent(layer, 6), 10, likelihood=bt.Regression(noise=1.0))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 24, generator=generator).double()
    before = posterior.outputs(x)
    sizes = torch.stack([posterior.particle(i).weight.detach().norm() for i in range(6)])  # type: ignore[union-attr]
    posterior.compact_(tol)
    change = (posterior.outputs(x) - before).norm(dim=2) / x.norm(dim=1) / sizes[:, None]  # (n, N)
    assert float(change.amax(1).square().mean().sqrt()) <= tol


def test_compacting_twice_does_nothing_and_a_step_makes_it_possible_again() -> None:
    posterior, x, y = trained()
    posterior.compact_(0.05)
    before = {name: tensor.detach().clone() for name, tensor in posterior.particles.items()}
    assert not posterior.compact_(0.05).changed
    assert all(torch.equal(posterior.particles[name], tensor) for name, tensor in before.items())
    posterior.step(x, y)
    posterior.compact_(0.05)


def test_ranks_come_with_a_spread() -> None:
    posterior, _, _ = trained()
    spread = posterior.rank_spread(0.05)
    assert set(spread) == {"0", "2"}
    assert all(len(bond) == 4 for bonds in spread.values() for bond in bonds)
    shared = posterior.compact_(0.05)
    for row in shared.layers:
        for bond, rank in zip(spread[row.name], row.ranks[1:-1], strict=True):
            assert min(bond) <= rank <= max(bond)


def test_fixed_ranks_have_no_lambda_and_can_be_trained_on() -> None:
    posterior, x, y = trained()
    posterior.compact_(0.05)
    posterior.fix_ranks_(variance=4.0)
    assert not any("rank_state" in name for name in posterior.carried)
    assert all(layer.rank_state is None for layer in (posterior.template.get_submodule("0"),))
    value = posterior.step(x, y)
    flat = torch.cat([t.detach().flatten(1) for t in posterior.particles.values()], dim=1)
    assert value.log_prior.shape == (4,)
    expected = torch.distributions.Normal(flat.new_tensor(0.0), 2.0).log_prob(flat).sum(1)
    again = posterior.step(x, y).log_prior
    torch.testing.assert_close(again, expected, rtol=1e-9, atol=1e-9)
    assert not posterior.compact_(0.0).changed
    with pytest.raises(ConfigError, match="needs lambda"):
        posterior.compact_(0.1, "lambda")


def test_ranks_are_fixed_with_the_prior_and_the_learning_rate_of_before() -> None:
    posterior, x, y = trained()
    posterior.joint.prior.weight, posterior.joint.prior.other_variance = 0.3, 7.0  # type: ignore[union-attr]
    optimizer = posterior.method.optimizer
    posterior.method.set_lr(1e-6)
    posterior.fix_ranks_()
    prior = posterior.prior
    assert isinstance(prior, bt.NormalPrior)
    assert (prior.weight, prior.variance) == (0.3, 7.0)
    assert posterior.method.optimizer is optimizer  # a schedule of its learning rate goes on
    assert [group["lr"] for group in optimizer.param_groups] == [1e-6]
    assert not optimizer.state
    before = {name: tensor.detach().clone() for name, tensor in posterior.particles.items()}
    posterior.step(x, y)
    assert all(float((posterior.particles[n].detach() - t).abs().max()) <= 1.1e-6 for n, t in before.items())
    with pytest.raises(ConfigError, match="variance"):
        trained()[0].fix_ranks_(variance=-1.0)
    posterior.fix_ranks_(variance=2.0)
    assert (posterior.prior.weight, posterior.prior.variance) == (0.3, 2.0)  # type: ignore[union-attr]


def test_layers_that_vanished_in_some_particles_are_named() -> None:
    posterior, _, _ = trained()
    assert not any("nothing" in note for note in posterior.compact_(0.0).notes)
    name = next(iter(tt_layers(posterior.template)))
    with torch.no_grad():
        for i in (0, 2):
            for core in stacked_cores(posterior, name, tt_layers(posterior.template)[name]):
                core[i] *= 1e-2
    note, *others = posterior.compact_(1e-9).notes
    few = f"in 2 of {len(posterior)} particles (0, 2). Probably the prior outweighed the data"
    assert note.startswith(f"the weight of {name!r} has shrunk to almost nothing {few}")
    assert "larger prior weight" not in "".join(others)
    with torch.no_grad():
        for core in stacked_cores(posterior, name, tt_layers(posterior.template)[name]):
            core *= 1e-2
    assert f"in all {len(posterior)} particles." in posterior.compact_(1e-9).notes[0]


def test_a_threshold_that_empties_bonds_is_told_and_advice_given() -> None:
    posterior, _, _ = trained()
    spared = posterior.compact_(0.0)
    assert any("no rank moved" in note and "prior.loss()" not in note for note in spared.notes)
    report = posterior.compact_(1e6, "lambda")
    assert [row.ranks for row in report.layers] == [(1, 1, 1), (1, 1, 1)]
    assert [note.split(":")[0] for note in report.notes] == ["bond 1 of '0' collapsed", "bond 1 of '2' collapsed"]


def test_padded_modes_keep_the_promise_for_the_weight_itself() -> None:
    def layer() -> nn.Module:
        return bt.TTLinear(23, 11, in_modes=(4, 6), out_modes=(3, 4), max_rank=6, bias=False).double()

    posterior = Posterior(independent(layer, 5), 10, likelihood=bt.Regression(noise=1.0))
    before = [posterior.particle(i).weight.detach() for i in range(5)]
    (row,) = posterior.compact_(0.2).layers
    errors = [
        float((posterior.particle(i).weight.detach() - old).norm() / old.norm())  # type: ignore[operator]
        for i, old in enumerate(before)
    ]
    assert row.ranks[1] < 6
    assert row.error == pytest.approx(math.sqrt(sum(e**2 for e in errors) / 5), rel=1e-6)
    assert row.error <= 0.2


def test_bad_rules_are_refused_before_any_change() -> None:
    posterior, _, _ = trained()
    with pytest.raises(ConfigError, match="rule must be one of"):
        posterior.compact_(0.1, "magic")
    with pytest.raises(ConfigError, match=r"tol must lie in \[0, 1\)"):
        posterior.compact_(1.5)
    dense = Posterior(independent(lambda: nn.Linear(3, 2), 2), 10)
    with pytest.raises(ConfigError, match="no tensor-train layer to compact"):
        dense.compact_()
