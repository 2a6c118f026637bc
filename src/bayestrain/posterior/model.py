"""`ParticleModel`: n networks of one shape that predict together."""

import copy
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from operator import index

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain.errors import ConfigError
from bayestrain.layers.evaluation import evaluating
from bayestrain.posterior.joint import Joint
from bayestrain.posterior.memory import predicted_at_once
from bayestrain.predict import Classification, Prediction, checked_labels, fit_temperature
from bayestrain.sizes import count_parameters, ranks

FEWEST = 3
"""Inputs that go together, at least, when batch norm's statistics are estimated: less could leave one by itself."""


class ParticleModel:
    """Particles as stacked tensors, and the network and likelihood they belong to.

    Args:
        joint: the network and the likelihood; which values its own tensors have does not matter, frozen ones excepted.
        particles: stacked parameters ``{name in joint: (n, ..)}``.
        carried: stacked buffers, such as batch norm's statistics and lambda.
    """

    def __init__(self, joint: Joint, particles: dict[str, Tensor], carried: dict[str, Tensor]) -> None:
        self.joint = joint
        self.particles = particles
        self.carried = carried

    @property
    def template(self) -> nn.Module:
        """A network of the shape of all particles; its values are nobody's."""
        return self.joint.model

    def __len__(self) -> int:
        return len(next(iter(self.particles.values())))

    @property
    def device(self) -> torch.device:
        """Where the particles are."""
        return next(iter(self.particles.values())).device

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """``{layer name: (1, R_1, .., 1)}``, the same for all particles."""
        return ranks(self.template)

    @property
    def parameters_each(self) -> int:
        """Parameters of one particle, counted as `count_parameters` does."""
        return count_parameters(self.template)

    def particle(self, i: int) -> nn.Module:
        """Particle i as a network of its own, in evaluation mode."""
        if not -len(self) <= i < len(self):
            raise ConfigError(f"There are particles 0 to {len(self) - 1}, but no {i}.")
        model = copy.deepcopy(self.template)
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, tensor in {**self.particles, **self.carried}.items():
                if name.startswith("model."):
                    own[name.removeprefix("model.")].copy_(tensor[i])
        return model.eval()

    def outputs(self, x: Tensor, batch_size: int = 1000, chunk: int | None = None) -> Tensor:
        """What every particle's network returns for x, ``(n, N, ..)``, on x's device."""
        return self._all(x, batch_size, chunk, "outputs")["outputs"]

    def predict(self, x: Tensor, batch_size: int = 1000, chunk: int | None = None) -> Prediction:
        """The prediction for inputs x, with its uncertainty; `batch_size` and `chunk` change memory, not results.

        Args:
            x: inputs, on any device; what comes back is on that device too.
            batch_size: inputs at a time.
            chunk: particles at a time; if None, as many particles and inputs as make no tensor of more than 1 GiB.
        """
        return self.joint.likelihood.prediction(self._all(x, batch_size, chunk, "describe"))

    def calibrate_(self, x: Tensor, labels: Tensor, batch_size: int = 1000, chunk: int | None = None) -> float:
        """Find the temperature at which the particles together predict these held-out data best, and keep it.

        For classification only.
        """
        likelihood = self.joint.likelihood
        if not isinstance(likelihood, Classification):
            raise ConfigError(f"Only a Classification has a temperature, not {type(likelihood).__name__}.")
        probabilities = self._all(x, batch_size, chunk, "describe")["probabilities"]
        likelihood.temperature = fit_temperature(probabilities, checked_labels(labels, probabilities))
        return likelihood.temperature

    @torch.no_grad()
    def _all(self, x: Tensor, batch_size: int, chunk: int | None, what: str) -> dict[str, Tensor]:
        if not all(hasattr(size, "__index__") and size >= 1 for size in (batch_size, 1 if chunk is None else chunk)):
            raise ConfigError(f"batch_size and chunk must be integers of at least 1, got {batch_size} and {chunk}.")
        batch_size, size = index(batch_size), None if chunk is None else index(chunk)
        if not isinstance(x, Tensor):
            raise ConfigError(f"Inputs must be a tensor, got a {type(x).__name__}.")
        if len(x) == 0:
            raise ConfigError("There is no input to predict for.")
        tensors = {**self.particles, **self.carried}
        with evaluating(self.template):
            if size is None:
                size, batch_size = predicted_at_once(self.joint, tensors, self._brought(x[:batch_size]), batch_size)
            batches = [
                [
                    self.joint.batched({name: t.detach()[i : i + size] for name, t in tensors.items()}, what, part)
                    for i in range(0, len(self), size)
                ]
                for part in map(self._brought, x.split(batch_size))
            ]
        rows = [{key: torch.cat([c[key] for c in chunks]).to(x.device) for key in chunks[0]} for chunks in batches]
        return {key: torch.cat([row[key] for row in rows], dim=1) for key in rows[0]}

    def _brought(self, x: Tensor) -> Tensor:
        """Inputs on the particles' device; images channels last where convolutions of one particle keep it busy."""
        last = self.joint.alone and x.ndim == 4
        return x.to(self.device, memory_format=torch.channels_last if last else torch.preserve_format)

    @torch.no_grad()
    def refresh_statistics(self, batches: Iterable[Tensor]) -> None:
        """Estimate batch norm's means and variances anew, per particle, as means over these inputs, batch by batch.

        While particles train, each keeps running averages as PyTorch does; those lag behind and mix many past weights.
        """
        norms = {
            name: norm
            for name, norm in self.joint.named_modules()
            if isinstance(norm, _BatchNorm) and norm.track_running_stats
        }
        if not norms:
            return
        size = most = measured = seen = 0
        with evaluating(self.template), ExitStack() as afterwards:
            for norm in norms.values():
                afterwards.callback(setattr, norm, "momentum", norm.momentum)
            tensors = {name: tensor.detach() for name, tensor in {**self.particles, **self.carried}.items()}
            for x in (self._brought(batch) for batch in batches if len(batch)):
                for name in norms if not seen else ():  # what is not finite would stay so in an average
                    self.carried[f"{name}.running_mean"].zero_()
                    self.carried[f"{name}.running_var"].fill_(1.0)
                if len(x) > measured:
                    measured = len(x)
                    self.template.eval()  # a trial, of which nothing shall stay
                    size, most = predicted_at_once(self.joint, tensors, x, measured)
                    most = max(most, FEWEST)
                    for norm in norms.values():
                        norm.train()
                for part in x.tensor_split(-(-len(x) // most)):
                    seen += len(part)
                    for norm in norms.values():
                        norm.momentum = len(part) / seen  # the first ones replace, the others are averaged in
                    for i in range(0, len(self), size):  # statistics change in place
                        self.joint.batched({name: t[i : i + size] for name, t in tensors.items()}, "describe", part)

    def to(self, device: torch.device | str) -> "ParticleModel":
        """The same particles on another device, to predict with; a `Posterior` trains where its networks were."""
        moved = [{name: t.detach().to(device) for name, t in d.items()} for d in (self.particles, self.carried)]
        joint = copy.deepcopy(self.joint).to(device)
        joint.alone, joint.idle = False, nullcontext  # they were for training, and for the device here
        return ParticleModel(joint, moved[0], moved[1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} particles of {self.parameters_each:,} parameters)"
