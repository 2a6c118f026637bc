"""`ParticleModel`: n networks of one shape that predict together."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain.errors import ConfigError
from bayestrain.nn.fast import fast
from bayestrain.nn.sizes import count_parameters, ranks
from bayestrain.posterior.joint import Joint, Part
from bayestrain.posterior.likelihoods import Classification, one_tensor
from bayestrain.posterior.metrics import fit_temperature
from bayestrain.posterior.prediction import Prediction

FEW = 1024
"""So many networks times inputs predict at once without an estimate of memory."""


class ParticleModel:
    """Particles as stacked tensors, with the network and the likelihood they belong to.

    Any number of threads may predict with it at the same time.

    Args:
        joint: the network and the likelihood. The values of its own tensors do not matter, except frozen ones.
        particles: stacked parameters ``{name in joint: (n, ...)}``; names are "model.<name in the network>".
        carried: stacked buffers, such as batch norm's statistics and lambda.
    """

    chunk: int | None = None
    """Particles that run at once; None takes as many as memory suggests."""

    def __init__(self, joint: Joint, particles: dict[str, Tensor], carried: dict[str, Tensor]) -> None:
        self.joint, self.particles, self.carried = joint, particles, carried
        self.template, self.likelihood = joint.model, joint.likelihood

    def __len__(self) -> int:
        return len(next(iter(self.particles.values())))

    @property
    def device(self) -> torch.device:
        """Where the particles are."""
        return next(iter(self.particles.values())).device

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """``{layer name: rank of every bond}``, the same for all particles."""
        return ranks(self.template)

    @property
    def parameters_each(self) -> int:
        """Parameters of one particle, counted as `count_parameters` does."""
        return count_parameters(self.template)

    @torch.no_grad()
    def particle(self, i: int) -> nn.Module:
        """Return particle i as a network of its own, in evaluation mode."""
        if not -len(self) <= i < len(self):
            raise ConfigError(f"i must be a particle from 0 to {len(self) - 1}, got {i}.")
        with self.joint.lent() as joint:
            one = copy.deepcopy(joint)
        own = {**dict(one.named_parameters()), **dict(one.named_buffers())}
        for name, tensor in {**self.particles, **self.carried}.items():
            own[name].copy_(tensor[i])
        return one.model

    def outputs(self, x: Tensor, batch_size: int = 1000, chunk: int | None = None) -> Tensor:
        """Return what every particle's network returns for x, ``(n, N, ...)``, on x's device."""
        return self._predict(_outputs, x, batch_size, chunk)["outputs"]

    def predict(self, x: Tensor, batch_size: int = 1000, chunk: int | None = None) -> Prediction:
        """Return the prediction for x with its uncertainty, on x's device.

        Args:
            x: inputs, on any device.
            batch_size: inputs at a time. This and `chunk` change memory, not results.
            chunk: particles at a time.
        """
        return self.likelihood.prediction(self._predict(_described, x, batch_size, chunk))

    def calibrate_(self, x: Tensor, labels: Tensor, batch_size: int = 1000, chunk: int | None = None) -> float:
        """Find the temperature at which the particles together predict these held-out data best, and keep it.

        For classification only.
        """
        if not isinstance(self.likelihood, Classification):
            raise ConfigError(f"Only a Classification has a temperature, not {type(self.likelihood).__name__}.")
        probabilities = self._predict(_described, x, batch_size, chunk)["probabilities"]
        self.likelihood.temperature = fit_temperature(probabilities, labels)
        return self.likelihood.temperature

    @torch.no_grad()
    def refresh_statistics(self, batches: Iterable[Tensor]) -> None:
        """Estimate batch norm's means and variances again, per particle, as averages over these batches of inputs.

        During training each particle keeps running averages as PyTorch does; those lag behind the weights.
        """
        with self.joint.lent() as joint:
            self.joint.forget_copies()  # this one will have another momentum
            norms = {n: m for n, m in joint.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats}
            for name in norms:  # a value that is not finite would stay in an average
                self.carried[f"{name}.running_mean"].nan_to_num_()
                self.carried[f"{name}.running_var"].nan_to_num_()
            tensors, seen = self._tensors(), 0
            for x in (batch for batch in batches if len(batch)) if norms else ():
                size, _ = self._sizes(joint.eval(), tensors, _outputs, x, len(x), None)
                seen += len(x)
                for norm in norms.values():
                    norm.train().momentum = len(x) / seen  # the first batch replaces, others are averaged in
                joint.batched(tensors, _outputs, x.to(self.device), size=size)

    def to(self, device: torch.device | str) -> ParticleModel:
        """Return the same particles on another device, to predict with; a `Posterior` trains where it was made."""
        particles, carried = ({k: t.detach().to(device) for k, t in d.items()} for d in (self.particles, self.carried))
        with self.joint.lent() as joint:
            moved = ParticleModel(copy.deepcopy(joint).to(device), particles, carried)
        moved.chunk = self.chunk
        return moved

    def _tensors(self) -> dict[str, Tensor]:
        """What a network needs to predict, which lambda is not part of."""
        both = {**self.particles, **self.carried}
        return {name: tensor.detach() for name, tensor in both.items() if ".rank_state." not in name}

    @torch.no_grad()
    def _predict(self, part: Part, x: Tensor, batch_size: int, chunk: int | None) -> dict[str, Tensor]:
        check_counts(batch_size=batch_size, chunk=chunk)
        if not isinstance(x, Tensor) or len(x) == 0:
            shown = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ConfigError(f"Inputs must be a tensor of at least one input, got {shown}.")
        tensors = self._tensors()
        with self.joint.lent() as joint:
            size, inputs = self._sizes(joint, tensors, part, x, batch_size, chunk)
            found = [joint.batched(tensors, part, batch.to(self.device), size=size) for batch in x.split(inputs)]
        return {name: torch.cat([each[name].to(x.device) for each in found], dim=1) for name in found[0]}

    def _sizes(
        self, joint: Joint, tensors: dict[str, Tensor], part: Part, x: Tensor, batch: int, chunk: int | None
    ) -> tuple[int, int]:
        """How many particles, and how many inputs, run at once."""
        n, batch, chunk, perf = len(self), min(int(batch), len(x)), chunk or self.chunk, fast()
        if chunk is not None or perf is None or n * batch <= FEW:
            return int(chunk or n), batch
        one = {name: tensor[:1] for name, tensor in tensors.items()}
        found: tuple[int, int] = perf.memory.predicted_at_once(
            lambda k: joint.batched(one, part, x[:k].to(self.device)), n, batch
        )
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} particles of {self.parameters_each:,} parameters)"


def _outputs(joint: Joint, x: Tensor) -> dict[str, Tensor]:
    return {"outputs": one_tensor(joint.model(x))}


def _described(joint: Joint, x: Tensor) -> dict[str, Tensor]:
    return joint.likelihood.describe(one_tensor(joint.model(x)))


def check_counts(**counts: int | None) -> None:
    """Raise unless all numbers are integers of at least 1, or None."""
    for name, value in counts.items():
        if value is not None and (not hasattr(value, "__index__") or value < 1):
            raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
