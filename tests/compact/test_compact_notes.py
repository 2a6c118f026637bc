"""What `compact_` says about ranks that did not move, and about layers of which little is left."""

import pytest
import torch
from compact_kit import Particles, planted, with_lambda
from torch import nn

from bayestrain.compact import compact_
from bayestrain.nn import TensorLinear


def shrunk(factor: float = 1e-2) -> nn.Sequential:
    model = nn.Sequential(TensorLinear(144, 144, max_rank=4))
    with torch.no_grad():
        for core in model[0].cores:
            core *= factor
    return model


def test_no_rank_moved() -> None:
    model = shrunk(factor=1)
    assert "no rank moved. Train longer or with a larger prior weight, check that" in str(compact_(model, tol=1e-9))
    compact_(with_lambda(model), 0.9)
    assert compact_(model, tol=1e-9).notes == ()  # some fell before


@pytest.mark.parametrize("kind", ["tt", "cp"])
def test_a_layer_collapsed(kind: str) -> None:
    model = planted(kind)
    with torch.no_grad():
        for core in model[0].factorized.cores:
            core *= 1e-3
            core[tuple(0 if n == 6 else slice(None) for n in core.shape)] = 1.0
    (note,) = compact_(model).notes
    assert note == "layer '0' collapsed to rank 1 at every bond. If accuracy fell, lower the prior weight."


def test_a_weight_vanished_under_the_prior() -> None:
    model = shrunk()
    assert not any("almost nothing" in note for note in compact_(model, tol=1e-9).notes)  # no prior was there
    (note,) = compact_(with_lambda(shrunk()), tol=1e-9).notes
    assert note.startswith("the weight of '0' has shrunk to almost nothing. The prior probably outweighed the data")
    held = with_lambda(shrunk())
    held[0].factorized.rank_state.held_norm.fill_(1e-2)  # in front of a normalisation sizes mean nothing
    for fine in (with_lambda(shrunk(factor=0.5)), held):
        (note,) = compact_(fine, tol=1e-9).notes
        assert note.startswith("no rank moved. Train longer or with a larger prior weight, ")


def test_particles_are_counted_and_have_no_loop_of_their_own() -> None:
    particles = Particles([with_lambda(shrunk(factor=factor)) for factor in (1e-2, 0.5, 1e-2)])
    assert "'0' has shrunk to almost nothing in 2 of 3 particles. The prior" in str(compact_(particles, 1e-9))
    (note,) = compact_(Particles([with_lambda(shrunk(factor=0.5))]), 1e-9).notes
    assert note == "no rank moved. Train longer or with a larger prior weight, or raise tol."
