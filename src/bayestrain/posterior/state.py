"""A `Posterior`'s state: everything that its next step and its predictions depend on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayestrain.errors import BayesTrainError, ConfigError, ShapeError
from bayestrain.nn.sizes import factorized_weights
from bayestrain.posterior.joint import Joint
from bayestrain.posterior.likelihoods import Classification
from bayestrain.prior import RankPrior

if TYPE_CHECKING:
    from bayestrain.posterior.posterior import Posterior


def state_of(posterior: Posterior) -> dict[str, Any]:
    """Return the state, for `load_state`."""
    prior, likelihood, own = posterior.prior, posterior.likelihood, posterior.particles
    return {
        "method": posterior.method.state_dict(),
        "carried": dict(posterior.carried),
        "shared": {name: p.detach() for name, p in posterior.joint.named_parameters() if name not in own},
        "prior": prior.state_dict(),
        "ranks_fixed": not isinstance(prior, RankPrior),
        "variance": prior.variance,
        "temperature": likelihood.temperature if isinstance(likelihood, Classification) else None,
    }


@torch.no_grad()
def load_state(posterior: Posterior, state: Mapping[str, Any]) -> None:
    """Restore a state, perhaps one with other ranks; it is tried on a copy of one particle before the first change."""
    try:
        stacked = {**state["method"]["particles"], **state["carried"]}
        one = {name: tensor[0] for name, tensor in stacked.items()} | state["shared"]
        _put(copy.deepcopy(posterior.joint), one, state["ranks_fixed"])
        if any(len(tensor) != len(posterior) for tensor in stacked.values()):
            raise ShapeError(f"it must hold {len(posterior)} particles")
        if state["shared"].keys() != state_of(posterior)["shared"].keys():
            raise ShapeError("other parameters are frozen")
        posterior.method.check_state(state["method"])
        copy.copy(posterior.prior).load_state_dict(state["prior"])
        temperature = Classification(state["temperature"] or 1.0).temperature
        variance, weight = float(state["variance"]), float(state["prior"]["weight"])
    except (BayesTrainError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"The saved state does not fit this posterior: {error}") from error
    if state["ranks_fixed"]:
        posterior.fix_ranks_(variance, weight)
    _put(posterior.joint, one, state["ranks_fixed"])
    for name, tensor in state["carried"].items():
        posterior.carried[name] = tensor.to(posterior.carried[name], copy=True)
    posterior.method.load_state_dict(state["method"])
    posterior.prior.load_state_dict(state["prior"])
    if isinstance(posterior.likelihood, Classification):
        posterior.likelihood.temperature = temperature


def _put(joint: Joint, one: Mapping[str, Tensor], ranks_fixed: bool) -> None:
    """Load the tensors of one particle, with the ranks they have."""
    if ranks_fixed:
        for weight in factorized_weights(joint).values():
            weight.rank_state = None
    own = dict(joint.named_parameters()) | dict(joint.named_buffers())
    if odd := own.keys() ^ one.keys():
        raise ShapeError(f"only one of the two has {sorted(odd)[0]!r}")
    joint.load_state_dict(one, strict=False)  # not strict: it lists tensors that have several names under all of them
