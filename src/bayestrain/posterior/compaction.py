"""Compact all particles together: the same ranks for each, the optimiser's state along with them."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor
from torch.func import vmap

from bayestrain import shrinkage, tt
from bayestrain.compact import (
    CompactedLayer,
    CompactReport,
    advice,
    checked_tol,
    collapse,
    cut_before,
    fingerprint,
    relative_error,
    restart_state,
    vanished,
    vanished_note,
)
from bayestrain.errors import ConfigError
from bayestrain.layers import TTLayer
from bayestrain.posterior.model import ParticleModel
from bayestrain.posterior.ranks import (
    SharedCut,
    by_contribution,
    by_lambda,
    by_rounding,
    each_squares,
    own_ranks,
    take,
    to_ranks,
    unstack,
)
from bayestrain.sizes import tt_layers
from bayestrain.target import SizedRanks, cheapest_ranks, roundable, weight_share

NAMED = 5
"""So many particles are named in a note."""


@torch.no_grad()
def compact_particles(
    model: ParticleModel,
    tol: float | None,
    rule: str,
    optimizer: torch.optim.Optimizer | None,
    parameters: int | None = None,
) -> CompactReport:
    """Cut the ranks that the particles, on the whole, do not need; see `Posterior.compact_`."""
    tol = checked_tol(tol, rule, parameters)
    layers = tt_layers(model.template)
    if not layers:
        raise ConfigError("The network has no tensor-train layer to compact. Call bayestrain.tensorize_(model) first.")
    for name, layer in layers.items():
        _check(model, name, layer)
    if parameters is None:
        cuts = {name: _cut(model, name, layer, rule, tol) for name, layer in layers.items()}  # all, before any change
    else:
        ranks = sized_particles(model, parameters).ranks
        cuts = {name: _cut_to(model, name, layer, ranks[name]) for name, layer in layers.items()}
    errors = {name: _error(model, name, layers[name], cut) for name, cut in cuts.items() if cut is not None}
    before = model.parameters_each
    rows = []
    for name, layer in layers.items():
        ranks_before, size_before = layer.ranks, layer.parameters_left
        cut = cuts[name]
        if cut is not None:
            _apply(model, name, layer, cut, optimizer)
        if parameters is None:
            layer.compacted = (rule, tol, _seen(model, name, layer, rule))
        error = 0.0 if cut is None else errors[name]
        rows.append(CompactedLayer(name, ranks_before, layer.ranks, size_before, layer.parameters_left, error))
    collapsed = [collapse(name, bond, tol) for name, cut in cuts.items() if cut is not None for bond in cut.collapsed]
    gone = _vanished(model, layers)
    found = advice(rows, rule, cut_before(layers), gone, to_size=parameters is not None)
    notes = (*collapsed, *gone.values(), *found)
    return CompactReport(rule, tol, tuple(rows), before, model.parameters_each, notes)


def _vanished(model: ParticleModel, layers: Mapping[str, TTLayer]) -> dict[str, str]:
    """A note on each layer that has shrunk to nothing, with the particles in which it has."""
    cores = {name: [core.double() for core in stacked_cores(model, name, layer)] for name, layer in layers.items()}
    norms = {name: vmap(lambda *chain: tt.norm(chain))(*chains).tolist() for name, chains in cores.items()}
    notes = {}
    for name, which in vanished(model.template, norms).items():
        few = ", ".join(map(str, which[:NAMED])) + (", .." if len(which) > NAMED else "")
        some = f"{len(which)} of {len(model)} particles ({few})"
        notes[name] = vanished_note(name, f" in {some if len(which) < len(model) else f'all {len(model)} particles'}")
    return notes


def rank_spread(model: ParticleModel, tol: float) -> dict[str, list[list[int]]]:
    """Per layer and bond, the rank that each particle alone would be rounded to."""
    return {
        name: own_ranks(stacked_cores(model, name, layer), _inner_tol(model, name, layer, tol))
        for name, layer in tt_layers(model.template).items()
    }


def rank_spread_of_size(model: ParticleModel, parameters: int) -> dict[str, list[list[int]]]:
    """Per layer and bond, the rank that each particle alone would be cut to, to have at most so many parameters."""
    spectra = _squares(model)
    found = []
    for i in range(len(model)):
        own = {name: [bond[i] for bond in bonds] for name, bonds in spectra.items()}
        found.append(_sized(model, own, parameters).ranks)
    return {
        name: [list(bond) for bond in zip(*(ranks[name][1:-1] for ranks in found), strict=True)] for name in spectra
    }


def sized_particles(model: ParticleModel, parameters: int) -> SizedRanks:
    """One set of ranks with which every particle has at most so many parameters."""
    if model.parameters_each <= parameters:
        return SizedRanks({name: layer.ranks for name, layer in tt_layers(model.template).items()}, 0.0)
    mean = {name: [bond.mean(0) for bond in bonds] for name, bonds in _squares(model).items()}
    return _sized(model, mean, parameters)


def _squares(model: ParticleModel) -> dict[str, list[Tensor]]:
    """Per layer and bond ``(n, R)``: the squares of each particle's singular values, relative to its weight."""
    found = {}
    for name, layer in tt_layers(model.template).items():
        cores = stacked_cores(model, name, layer)
        shares = torch.tensor([weight_share(layer, own) for own in unstack(cores)], dtype=torch.float64)
        found[name] = each_squares(cores, shares)
    return found


def _sized(model: ParticleModel, squares: Mapping[str, Sequence[Tensor]], parameters: int) -> SizedRanks:
    layers = tt_layers(model.template)
    size = model.parameters_each - sum(core.numel() for layer in layers.values() for core in layer.cores)
    seen = {name: roundable(squares[name], layer.cores) for name, layer in layers.items()}
    return cheapest_ranks(seen, size, parameters)


def stacked_cores(model: ParticleModel, name: str, layer: TTLayer) -> list[Tensor]:
    """The cores of one layer, with the particles in front; frozen ones are the same for all."""
    return [
        model.particles.get(tensor_name(name, f"cores.{k}"), core.expand(len(model), *core.shape))
        for k, core in enumerate(layer.cores)
    ]


def tensor_name(name: str, rest: str) -> str:
    """What particles call a tensor of the layer `name`, which may be the whole network."""
    return ".".join(part for part in ("model", name, rest) if part)


def stacked_log_lambdas(model: ParticleModel, name: str, layer: TTLayer) -> list[Tensor]:
    """``log lambda`` of one layer's bonds, with the particles in front; none if it has no lambda."""
    if layer.rank_state is None:
        return []
    return [model.carried[tensor_name(name, f"rank_state.log_lambda_{bond}")] for bond in range(1, len(layer.cores))]


def _check(model: ParticleModel, name: str, layer: TTLayer) -> None:
    """Refuse a layer that particles cannot be cut in together."""
    cores = stacked_cores(model, name, layer)
    for i in range(len(model)):
        if not all(bool(core[i].isfinite().all()) for core in cores):
            raise ConfigError(
                f"Particle {i} has NaN or infinite weights in layer {name!r}: particles cannot be compacted together "
                "with it. Drop it with posterior.drop_([..]), or go back to an earlier state."
            )
    trained = [tensor_name(name, f"cores.{k}") in model.particles for k in range(len(layer.cores))]
    if any(trained) and not all(trained):
        raise ConfigError(
            f"Layer {name!r} has cores that train and cores that are frozen, hence common to all particles: no cut of "
            "it can suit each of them. Freeze all of its cores, or none."
        )


def _cut_to(model: ParticleModel, name: str, layer: TTLayer, ranks: Sequence[int]) -> SharedCut | None:
    """One layer with these ranks; None if it has them."""
    return None if tuple(ranks) == layer.ranks else to_ranks(stacked_cores(model, name, layer), ranks[1:-1])


def _cut(model: ParticleModel, name: str, layer: TTLayer, rule: str, tol: float) -> SharedCut | None:
    """What one layer would be cut to; None if nothing would change."""
    cores = stacked_cores(model, name, layer)
    if layer.compacted == (rule, tol, _seen(model, name, layer, rule)):
        return None
    if rule == "lambda":
        log_lambdas = stacked_log_lambdas(model, name, layer)
        if not log_lambdas:
            raise ConfigError(
                f"rule='lambda' needs lambda and layer {name!r} has none. Use rule='rounding', or a RankPrior."
            )
        cut = by_lambda(cores, log_lambdas, tol)
    else:
        inner = _inner_tol(model, name, layer, tol)
        cut = by_rounding(cores, inner) if rule == "rounding" else by_contribution(cores, inner)
    return None if tt.ranks([core[0] for core in cut.cores]) == layer.ranks else cut


def _inner_tol(model: ParticleModel, name: str, layer: TTLayer, tol: float) -> float:
    """The tolerance is one of the weight; with padded modes the trains hold more than that."""
    if not layer.is_padded:
        return tol
    return tol * min(weight_share(layer, cores) for cores in unstack(stacked_cores(model, name, layer)))


def _error(model: ParticleModel, name: str, layer: TTLayer, cut: SharedCut) -> float:
    """Root mean square, over particles, of the relative change of the weight."""
    pairs = zip(unstack(stacked_cores(model, name, layer)), unstack(cut.cores), strict=True)
    return math.sqrt(fmean(relative_error(layer, old, new) ** 2 for old, new in pairs))


def _apply(
    model: ParticleModel, name: str, layer: TTLayer, cut: SharedCut, optimizer: torch.optim.Optimizer | None
) -> None:
    tensors = [model.particles.get(tensor_name(name, f"cores.{k}")) for k in range(len(layer.cores))]
    layer.set_cores([core[0] for core in cut.cores])
    for k, (tensor, new) in enumerate(zip(tensors, cut.cores, strict=True)):
        if tensor is None:
            continue  # frozen: the same in all particles, and now in the template
        old_shape = tensor.shape
        tensor.data = new
        if optimizer is None:
            continue
        if cut.keep is None:
            restart_state(optimizer, tensor)
            continue
        own = optimizer.state.get(tensor, {})
        if any(isinstance(value, Tensor) and value.ndim and value.shape != old_shape for value in own.values()):
            optimizer.state.pop(tensor)  # kept in some other form, which cannot be cut
            continue
        for key, value in own.items():
            if isinstance(value, Tensor) and value.shape == old_shape:
                own[key] = take(value, [kept.to(value.device) for kept in cut.keep], k)
    _apply_to_lambda(model, name, layer, cut)


def _apply_to_lambda(model: ParticleModel, name: str, layer: TTLayer, cut: SharedCut) -> None:
    state = layer.rank_state
    if state is None:
        return
    if cut.keep is not None:
        pairs = zip(stacked_log_lambdas(model, name, layer), cut.keep, strict=True)
        moved: Sequence[Tensor] = [u.gather(1, kept.to(u.device)) for u, kept in pairs]
        for bond, u in enumerate(moved, start=1):
            state.set_log_lambda(bond, u[0].clone())
    else:
        starts = [core.new_zeros(core.shape[:2]) for core in cut.cores[1:]]
        for bond, u in enumerate(starts, start=1):
            state.set_log_lambda(bond, u[0])

        def mode(cores: list[Tensor], us: list[Tensor]) -> list[Tensor]:
            return shrinkage.conditional_mode(
                cores, us, state.a, state.b, state.floor, sweeps=50, dropped=state.dropped
            )

        moved = vmap(mode)(cut.cores, starts)
    for bond, u in enumerate(moved, start=1):
        model.carried[tensor_name(name, f"rank_state.log_lambda_{bond}")] = u.contiguous()


def _seen(model: ParticleModel, name: str, layer: TTLayer, rule: str) -> tuple[float, ...]:
    lambdas = stacked_log_lambdas(model, name, layer) if rule == "lambda" else []
    return fingerprint(tensor.cpu() for tensor in (*stacked_cores(model, name, layer), *lambdas))
