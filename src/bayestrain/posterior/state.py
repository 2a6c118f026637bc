"""A `Posterior`'s state: everything that its next step and its predictions depend on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.posterior.likelihoods import Classification
from bayestrain.prior import RankPrior

if TYPE_CHECKING:
    from bayestrain.posterior.posterior import Posterior


def state_of(posterior: Posterior) -> dict[str, Any]:
    """Return the state, for `load_state`."""
    prior, likelihood = posterior.prior, posterior.likelihood
    return {
        "method": posterior.method.state_dict(),
        "prior": prior.state_dict(),
        "ranks_fixed": not isinstance(prior, RankPrior),
        "variance": prior.variance,
        "shared": _shared(posterior),
        "temperature": likelihood.temperature if isinstance(likelihood, Classification) else None,
    }


@torch.no_grad()
def load_state(posterior: Posterior, state: Mapping[str, Any]) -> None:
    """Restore a state, perhaps one with other ranks; check all of it before the first change."""
    _check(posterior, state)
    saved, carried, shared = state["method"]["particles"], state["method"]["carried"], state["shared"]
    if state["ranks_fixed"]:
        posterior.fix_ranks_(state["variance"], state["prior"]["weight"])
    first = {name: tensor[0] for name, tensor in {**saved, **carried}.items()} | dict(shared)
    posterior.joint.load_state_dict(first)  # factorised weights take the ranks they find
    for name, tensor in posterior.particles.items():
        if saved[name].shape != tensor.shape:
            tensor.data = tensor.new_empty(saved[name].shape)
    for name, tensor in carried.items():
        posterior.carried[name] = tensor.to(posterior.device).clone()
    posterior.method.load_state_dict(state["method"])
    posterior.prior.load_state_dict(state["prior"])
    if isinstance(posterior.likelihood, Classification) and state["temperature"] is not None:
        posterior.likelihood.temperature = state["temperature"]


def _shared(posterior: Posterior) -> dict[str, Tensor]:
    """Frozen parameters, which all particles share."""
    return {n: p.detach() for n, p in posterior.joint.named_parameters() if n not in posterior.particles}


def _check(posterior: Posterior, state: Mapping[str, Any]) -> None:
    """Raise unless the state fits."""
    missing = {"method", "prior", "ranks_fixed", "variance", "shared", "temperature"} - state.keys()
    if missing:
        raise ConfigError(f"This is no state of a posterior: {sorted(missing)} is missing. Pass a state_dict().")
    posterior.method.check_state(state["method"])
    copy.copy(posterior.prior).load_state_dict(state["prior"])
    if state["temperature"] is not None:
        Classification(state["temperature"])
    shared, here = state["shared"], _shared(posterior)
    stacked = {**state["method"]["particles"], **state["method"]["carried"]}
    own = {**posterior.particles, **posterior.carried}
    left = {name for name in own if not (state["ranks_fixed"] and ".rank_state." in name)}
    if stacked.keys() != left or shared.keys() != here.keys():
        raise ShapeError("The saved posterior is of another network or prior: its tensors have other names.")
    ranked = _check_ranks(posterior, {**{name: tensor[0] for name, tensor in stacked.items()}, **shared})
    n = len(posterior)
    for name, tensor in {**stacked, **shared}.items():
        mine = own[name] if name in stacked else here[name]
        if (name in stacked and len(tensor) != n) or (name not in ranked and tensor.shape != mine.shape):
            raise ShapeError(
                f"The saved posterior is of another network: {name!r} has shape {tuple(tensor.shape)} there and "
                f"{tuple(mine.shape)} here."
            )


def _check_ranks(posterior: Posterior, one: Mapping[str, Tensor]) -> set[str]:
    """Check the tensors of one particle whose shapes depend on ranks; return their names."""
    names: set[str] = set()
    for place, weight in posterior.joint.named_modules():
        if not isinstance(weight, FactorizedWeight):
            continue
        cores = [f"{place}.cores.{k}" for k in range(len(weight.cores))]
        sizes = weight.equation.sizes([one[name].shape for name in cores])
        if tuple(sizes[mode] for mode in weight.equation.modes) != weight.layout.sizes:
            raise ShapeError(f"The saved posterior is of another network: {cores[0]!r} and its neighbours differ.")
        names |= set(cores)
        for bond, label in enumerate(weight.equation.bonds):
            name = f"{place}.rank_state.log_lambda_{bond}"
            if name in one and one[name].shape != (sizes[label],):
                raise ShapeError(f"The saved {name!r} must have {sizes[label]} entries, got {tuple(one[name].shape)}.")
            names.add(name)
    return names
