"""One set of ranks for all particles: what is promised, and what stays."""

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from compact_kit import FORMATS, Layer, Particles, change, dense, planted, weight, with_lambda
from torch import nn

from bayestrain.compact import compact_
from bayestrain.errors import ConfigError
from bayestrain.posterior import Posterior


def networks(kind: str, n: int = 4, *, padded: bool = False, rank: int = 5) -> list[nn.Module]:
    """Networks whose spectra fall, in each at another pace."""
    return [nn.Sequential(Layer(weight(kind, rank, padded=padded, decay=0.5 - 0.05 * i))) for i in range(n)]


def changes(before: Sequence[nn.Module], after: Particles) -> list[float]:
    return [change(dense(old), dense(after.particle(i))) for i, old in enumerate(before)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rule", [None, "contribution"])
@pytest.mark.parametrize("tol", [0.03, 0.3])
def test_the_mean_square_error_is_within_the_tolerance(kind: str, padded: bool, rule: str | None, tol: float) -> None:
    models = networks(kind, padded=padded)
    particles = Particles(models)
    (row,) = compact_(particles, tol, rule=rule).layers
    found = math.sqrt(sum(each**2 for each in changes(models, particles)) / len(models))
    assert found <= tol
    assert row.error == pytest.approx(found, abs=1e-7)
    assert row.ranks == particles.template[0].factorized.ranks
    if tol == 0.3:
        assert row.ranks != row.ranks_before


def test_rounding_cannot_go_one_rank_lower() -> None:
    """At each bond the next smaller rank would break the bond's share of the tolerance."""
    models, tol = networks("tucker", 5), 0.2
    (row,) = compact_(Particles(models), tol).layers
    weights = [model[0].factorized for model in models]
    spectra = [own.format.spectra(own.equation, [core.detach() for core in own.cores]) for own in weights]
    for bond, rank in enumerate(row.ranks):
        squares = torch.stack([each[bond] for each in spectra]).square()
        lower = squares[:, rank - 1 :].sum(1) / squares.sum(1)
        assert float(lower.mean().sqrt()) > tol / math.sqrt(len(row.ranks))


@pytest.mark.parametrize("kind", FORMATS)
def test_one_particle_is_cut_like_a_network(kind: str) -> None:
    (model,) = networks(kind, 1)
    particles = Particles([model])
    for arguments in ({"tol": 0.1}, {"tol": 0.2, "rule": "contribution"}, {"parameters": 60}):
        alone, together = compact_(model, **arguments), compact_(particles, **arguments)
        assert alone.layers == together.layers
        torch.testing.assert_close(dense(particles.particle(0)), dense(model), rtol=1e-9, atol=1e-9)


def test_a_particle_that_needs_less_is_filled_up_with_zeros() -> None:
    models = [nn.Sequential(Layer(weight("tt", 3))) for _ in range(3)]
    with torch.no_grad():
        models[1][0].factorized.cores[0][:, 1:] = 0.0
        models[1][0].factorized.cores[2][1:] = 0.0
    particles = Particles(models)
    assert compact_(particles, 1e-6).layers[0].ranks == (3, 3)
    assert max(changes(models, particles)) < 1e-7
    assert not particles.particles["model.0.factorized.cores.0"][1, :, 1:].any()


def test_the_papers_rule_looks_at_the_mean_of_sorted_lambdas() -> None:
    models = [with_lambda(model) for model in networks("tt", 2, rank=4)]
    particles = Particles(models)
    name = "model.0.factorized.rank_state.log_lambda_{}"
    first = torch.tensor([[0.5, 0.001, 0.2, 0.001], [0.001, 0.4, 0.001, 0.3]], dtype=torch.float64).log()
    particles.carried[name.format(0)] = first
    particles.carried[name.format(1)] = torch.full((2, 4), -20.0, dtype=torch.float64)
    before = particles.particles["model.0.factorized.cores.0"].detach().clone()
    report = compact_(particles, 0.05, rule="lambda")
    assert report.layers[0].ranks == (2, 1)  # never below 1
    assert "r2 of '0' collapsed" in str(report)
    kept = [[0, 2], [1, 3]]
    for i, index in enumerate(kept):
        assert torch.equal(particles.particles["model.0.factorized.cores.0"][i].detach(), before[i][:, index])
        assert torch.equal(particles.carried[name.format(0)][i], first[i, index])


def test_compacting_twice_does_nothing_until_a_particle_moves() -> None:
    particles = Particles(networks("cp"))
    compact_(particles, 0.1)
    before = {name: tensor.detach().clone() for name, tensor in particles.particles.items()}
    assert not compact_(particles, 0.1).changed
    assert all(torch.equal(particles.particles[name], tensor) for name, tensor in before.items())
    with torch.no_grad():
        particles.particles["model.0.factorized.cores.0"][:, :, -1] = 0
    assert compact_(particles, 0.1).changed


def test_frozen_cores_are_common_to_all_particles() -> None:
    first = planted("tt").requires_grad_(False)
    models = [nn.Sequential(*copy.deepcopy(first), nn.Linear(2, 2).double()) for _ in range(2)]
    particles = Particles(models)
    assert set(particles.particles) == {"model.1.weight", "model.1.bias"}
    compact_(particles)
    assert particles.template[0].factorized.ranks == (3, 2)
    assert change(dense(models[1]), dense(particles.particle(1))) < 1e-2


def test_particles_that_cannot_be_cut_together_are_refused() -> None:
    models = networks("tt")
    broken = Particles(models)
    with torch.no_grad():
        broken.particles["model.0.factorized.cores.1"][2, 0, 0, 0] = math.nan
    for model in models:
        model[0].factorized.cores[1].requires_grad_(False)
    for particles, message in (
        (broken, r"Layer '0' has NaN or infinite weights in particle 2 \(see Posterior.drop_\)"),
        (Particles(models), "Layer '0' has cores that train and cores that are frozen"),
    ):
        with pytest.raises(ConfigError, match=message):
            compact_(particles)
        assert particles.template[0].factorized.ranks == (5, 5)


def test_a_posterior_hands_over_its_own_optimiser() -> None:
    posterior = Posterior([planted("tt") for _ in range(3)], 10, likelihood="regression")
    x, y = torch.randn(8, 20).double(), torch.randn(8, 12).double()
    for arguments in ({"rule": "contribution"}, {"tol": 0.3}, {"parameters": 60}):
        posterior.step(x, y)
        assert compact_(posterior, **arguments).parameters == posterior.parameters_each
    posterior.step(x, y)
    assert posterior.parameters_each <= 60
