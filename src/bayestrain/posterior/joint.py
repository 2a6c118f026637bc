"""The joint density of data and weights as one module, with stacked particles in the place of its tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.infer import stack
from bayestrain.nn.sizes import factorized_weights
from bayestrain.posterior.likelihoods import Likelihood, full_precision, one_tensor
from bayestrain.prior import NormalPrior

Module = TypeVar("Module", bound=nn.Module)

Part = Callable[..., dict[str, Tensor]]
"""A method of `Joint` that `Joint.batched` runs for one particle or many."""


class Joint(nn.Module):
    """A network with its likelihood and prior, called with the tensors of particles in the place of its own.

    `torch.func.functional_call` swaps tensors inside the module while it runs, so a module serves one thread at a time.
    Training runs on this one, under a lock; predictions run on copies that are `lent`.
    """

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, prior: NormalPrior | None = None, num_data: int = 1
    ) -> None:
        super().__init__()
        self.model, self.likelihood, self.prior, self.num_data = model, likelihood, prior, num_data
        self.prior_weight = torch.ones(())
        """The prior's weight in this step, where a captured step sees it change."""
        self._aliases = _aliases(self)
        self._lock, self._idle = RLock(), list[Joint]()

    def forward(self, part: Part, *inputs: Tensor) -> dict[str, Tensor]:
        """Run one of the methods below, for one particle."""
        return part(self, *inputs)

    def log_likelihood(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """``N * mean log likelihood`` of a batch, that mean, and the outputs."""
        outputs = full_precision(one_tensor(self.model(x)))
        mean = self.likelihood.log_prob(outputs, y).mean()
        return {"density": self.num_data * mean, "mean": mean.detach(), "outputs": outputs.detach()}

    def log_prior(self) -> dict[str, Tensor]:
        """The log prior of all weights and lambdas, weighted and not."""
        assert self.prior is not None
        value = self.prior.log_prob()
        return {"density": self.prior_weight * value, "value": value.detach()}

    def move_lambda(self) -> dict[str, Tensor]:
        """The prior's own step, in place."""
        assert self.prior is not None
        self.prior.step()
        return {}

    def outputs(self, x: Tensor) -> dict[str, Tensor]:
        """What the network returns."""
        return {"outputs": one_tensor(self.model(x))}

    def describe(self, x: Tensor) -> dict[str, Tensor]:
        """What the likelihood predicts from the network's outputs."""
        return self.likelihood.describe(one_tensor(self.model(x)))

    def batched(self, particles: Mapping[str, Tensor], part: Part, *inputs: Tensor) -> dict[str, Tensor]:
        """Run a method for all particles on the same inputs: several under `torch.vmap`, a single one as it is."""

        def one(tensors: Mapping[str, Tensor]) -> Any:
            others = {alias: tensors[name] for alias, name in self._aliases.items() if name in tensors}
            return functional_call(self, {**tensors, **others}, (part, *inputs), tie_weights=False)

        with self._lock:
            if len(next(iter(particles.values()))) == 1:
                found = one({name: tensor.squeeze(0) for name, tensor in particles.items()})
                return {name: tensor[None] for name, tensor in found.items()}
            # Batch norm under vmap cannot ask for other memory formats, so a channel of one must not look like one.
            inputs = tuple(tensor.reshape(-1).view(tensor.shape) for tensor in inputs)
            try:
                return vmap(one, randomness="different")(dict(particles))  # type: ignore[no-any-return]
            except RuntimeError as error:
                if "vmap" not in str(error) and "Batching rule not implemented" not in str(error):
                    raise
                raise ConfigError(
                    "The network cannot run for several particles at once: it has an operation that torch.vmap does "
                    "not support, such as an LSTM, or branches on values. Pass chunk=1 to run particles one by one. "
                    f"PyTorch says: {str(error).split('. ')[0]}."
                ) from error

    def remove_lambda(self) -> None:
        """Keep the ranks as they are: remove lambda from all weights."""
        for weight in factorized_weights(self).values():
            weight.rank_state = None

    def take(self, one: Mapping[str, Tensor], ranks_fixed: bool) -> None:
        """Load the tensors of one particle, with the ranks they have."""
        if ranks_fixed:
            self.remove_lambda()
        if odd := (dict(self.named_parameters()) | dict(self.named_buffers())).keys() ^ one.keys():
            raise ShapeError(f"only one of the two has {sorted(odd)[0]!r}")
        self.load_state_dict(one, strict=False)  # not strict, because a tensor with several names is there under one

    @contextmanager
    def lent(self) -> Iterator[Joint]:
        """Lends a copy of the modules that shares the tensors, in evaluation mode, to one caller at a time.

        Making one takes as long as a small batch, so they are kept for the next callers.
        """
        with self._lock:
            idle = self._idle
            joint = idle.pop() if idle else Joint(_twin(self.model), self.likelihood)
            joint.likelihood = _twin(self.likelihood)  # always fresh, because its noise may be set at any time
        try:
            yield joint.eval()
        finally:
            idle.append(joint)

    def forget_copies(self) -> None:
        """Lend new copies from here on, because the modules have changed."""
        self._idle = []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_idle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=RLock(), _idle=[])


def _twin(module: Module) -> Module:
    """A copy of the modules that shares their tensors."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})


def _aliases(joint: nn.Module) -> dict[str, str]:
    """``{other place of a tensor: its first place}`` for tensors that appear in several modules.

    `functional_call` would look for them in every call, which takes as long as a small network's forward pass.
    """
    first: dict[Tensor, str] = {}
    found = {}
    for path, module in joint.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            place = f"{path}.{name}" if path else name
            if tensor is not None and first.setdefault(tensor, place) != place:
                found[place] = first[tensor]
    return found


def stack_joints(joints: Sequence[Joint]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stack the trainable parameters and the buffers of all; frozen parameters must be the same."""
    for name, module in joints[0].named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.momentum is None:
            raise ConfigError(
                f"{name.removeprefix('model.')!r} averages its statistics over all batches (momentum=None), which "
                "particles cannot. Give it a momentum such as 0.1; refresh_statistics averages at the end."
            )
    for name, frozen in joints[0].named_parameters():
        for i, other in enumerate(joints):
            if not frozen.requires_grad and not torch.equal(other.get_parameter(name), frozen):
                raise ConfigError(
                    f"{name.removeprefix('model.')!r} is frozen, so all particles share it, but particle {i} has other "
                    "values there than particle 0. Load the same values, or let it train."
                )
    particles = stack([{name: p for name, p in joint.named_parameters() if p.requires_grad} for joint in joints])
    if not particles:
        raise ConfigError("No parameter of the network is trainable, so there is nothing to have a posterior over.")
    return particles, stack([dict(joint.named_buffers()) for joint in joints])
