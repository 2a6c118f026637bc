"""A `Posterior`'s state: everything that its next step and its predictions depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.posterior.compaction import tensor_name
from bayestrain.predict import Classification
from bayestrain.prior import NormalPrior, RankPrior
from bayestrain.sizes import tt_layers

if TYPE_CHECKING:
    from bayestrain.posterior.posterior import Posterior


def state_of(posterior: Posterior) -> dict[str, Any]:
    """The state, for `load_state`."""
    prior, likelihood = posterior.prior, posterior.joint.likelihood
    return {
        "method": posterior.method.state_dict(),
        "prior": prior.state_dict(),
        "ranks_fixed": not isinstance(prior, RankPrior),
        "variance": prior.variance if isinstance(prior, NormalPrior) else None,
        "shared": _shared(posterior),
        "temperature": likelihood.temperature if isinstance(likelihood, Classification) else None,
    }


@torch.no_grad()
def load_state(posterior: Posterior, state: Mapping[str, Any]) -> None:
    """Go back to a saved state, perhaps one with other ranks; one that does not fit is refused before any change."""
    _check(posterior, state)
    saved, carried, shared = state["method"]["particles"], state["method"]["carried"], state["shared"]
    if state["ranks_fixed"]:
        posterior.fix_ranks_(state["variance"], state["prior"]["weight"])
    for name, layer in tt_layers(posterior.template).items():
        keys = [tensor_name(name, f"cores.{k}") for k in range(len(layer.cores))]
        layer.set_cores([shared[key] if key in shared else saved[key][0] for key in keys])
        for bond in range(1, len(keys)):
            if (u := carried.get(tensor_name(name, f"rank_state.log_lambda_{bond}"))) is not None:
                assert layer.rank_state is not None
                layer.rank_state.set_log_lambda(bond, u[0].to(posterior.device).clone())
    for name, tensor in posterior.particles.items():
        if saved[name].shape != tensor.shape:
            tensor.data = tensor.new_empty(saved[name].shape)
    for name, tensor in carried.items():
        posterior.carried[name] = tensor.to(posterior.device).clone()
    for name, tensor in shared.items():
        posterior.joint.get_parameter(name).copy_(tensor)
    posterior.method.load_state_dict(state["method"])
    posterior.prior.load_state_dict(state["prior"])
    temperature = state.get("temperature")
    if isinstance(posterior.joint.likelihood, Classification) and temperature is not None:
        posterior.joint.likelihood.temperature = temperature


def _shared(posterior: Posterior) -> dict[str, Tensor]:
    """Frozen parameters, common to all particles; compaction may have cut them."""
    return {n: p.detach() for n, p in posterior.joint.named_parameters() if n not in posterior.particles}


def _check(posterior: Posterior, state: Mapping[str, Any]) -> None:
    saved, carried, shared = state["method"]["particles"], state["method"]["carried"], state["shared"]
    here = _shared(posterior)
    left = {name for name in posterior.carried if not (state["ranks_fixed"] and ".rank_state." in name)}
    if (saved.keys(), carried.keys(), shared.keys()) != (posterior.particles.keys(), left, here.keys()):
        raise ShapeError("The saved posterior is one of another network or prior: its tensors have other names.")
    if (number := len(next(iter(saved.values())))) != len(posterior):
        raise ShapeError(f"The saved posterior has {number} particles, this one {len(posterior)}.")
    if state["method"]["method"] != posterior.method.name:
        raise ConfigError(f"This is a state of {state['method']['method']!r}, not of {posterior.method.name!r}.")
    layers = tt_layers(posterior.template)
    cores = {tensor_name(name, f"cores.{k}") for name, layer in layers.items() for k in range(len(layer.cores))}
    own = {**posterior.particles, **posterior.carried, **here}
    for name, tensor in {**saved, **carried, **shared}.items():
        first = 1 if name in shared else 2  # the ranks of a core are its outer dimensions, behind the particles
        apart = slice(first, -1) if name in cores else slice(None)
        if ".rank_state." not in name and tensor.shape[apart] != own[name].shape[apart]:
            raise ShapeError(f"The saved posterior is one of another network: {name!r} has another shape there.")
