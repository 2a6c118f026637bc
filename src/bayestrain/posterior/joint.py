"""A network with its likelihood as one module that runs with the tensors of stacked particles."""

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
from bayestrain.posterior.likelihoods import Likelihood

Module = TypeVar("Module", bound=nn.Module)

Part = Callable[..., dict[str, Tensor]]
"""``part(joint, *inputs)`` computes something for one particle, whose tensors the joint has while it runs."""


class Joint(nn.Module):
    """A network and its likelihood, run with the tensors of particles in the place of their own.

    `torch.func.functional_call` swaps tensors inside the module while it runs, so a module serves one thread at a time.
    Training runs on this one, under a lock; predictions run on copies that are `lent`.
    """

    def __init__(self, model: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.model, self.likelihood = model, likelihood
        self._lock, self._idle = RLock(), list[Joint]()
        self._aliases: dict[str, str] = {}
        """The first name of every tensor, by its other names; functional_call would look for them in every call."""
        first: dict[Tensor, str] = {}
        for path, module in self.named_modules():
            own = module.named_parameters(path, False, False), module.named_buffers(path, False, False)
            for name, tensor in (*own[0], *own[1]):
                if first.setdefault(tensor, name) != name:
                    self._aliases[name] = first[tensor]

    def forward(self, part: Part, *inputs: Tensor) -> dict[str, Tensor]:
        """Run a part for one particle."""
        return part(self, *inputs)

    def batched(
        self, particles: Mapping[str, Tensor], part: Part, *inputs: Tensor, size: int | None = None
    ) -> dict[str, Tensor]:
        """Run a part for all particles, `size` of them at a time, on the same inputs."""
        n = len(next(iter(particles.values())))
        size = size or n
        with self._lock:
            return joined(
                [
                    self._at_once({k: t[i : i + size] for k, t in particles.items()}, part, inputs)
                    for i in range(0, n, size)
                ]
            )

    def _at_once(self, particles: dict[str, Tensor], part: Part, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Run several particles under `torch.vmap`, a single one as it is."""

        def one(tensors: Mapping[str, Tensor]) -> Any:
            others = {alias: tensors[name] for alias, name in self._aliases.items() if name in tensors}
            return functional_call(self, {**tensors, **others}, (part, *inputs), tie_weights=False)

        if len(next(iter(particles.values()))) == 1:
            found = one({name: tensor.squeeze(0) for name, tensor in particles.items()})
            return {name: tensor[None] for name, tensor in found.items()}
        # Batch norm under vmap cannot ask for other memory formats, so a channel of one must not look like one.
        inputs = tuple(tensor.reshape(-1).view(tensor.shape) for tensor in inputs)
        try:
            return vmap(one, randomness="different")(particles)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if "vmap" not in str(error) and "Batching rule not implemented" not in str(error):
                raise
            raise ConfigError(
                "The network cannot run for several particles at once: torch.vmap does not support an operation in it, "
                "such as an LSTM or a branch on values. Pass chunk=1 to run particles one by one. PyTorch says: "
                f"{str(error).split('. ')[0]}."
            ) from error

    def remove_lambda(self) -> None:
        """Keep the ranks as they are: remove lambda from all weights."""
        for weight in factorized_weights(self).values():
            weight.rank_state = None

    def take(self, one: Mapping[str, Tensor]) -> None:
        """Load the tensors of one particle, with the ranks they have."""
        if odd := (dict(self.named_parameters()) | dict(self.named_buffers())).keys() ^ one.keys():
            raise ShapeError(f"only one of the two has {sorted(odd)[0]!r}")
        self.load_state_dict(one, strict=False)  # not strict, because a tensor with several names is there under one

    @contextmanager
    def lent(self) -> Iterator[Joint]:
        """Lend a copy of the modules that shares the tensors, in evaluation mode, to one caller at a time.

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


def joined(chunks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate what chunks of particles returned."""
    return chunks[0] if len(chunks) == 1 else {k: torch.cat([chunk[k] for chunk in chunks]) for k in chunks[0]}


def stack_joints(joints: Sequence[Joint]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stack the trainable parameters and the buffers of all; frozen parameters must be the same."""
    for name, module in joints[0].named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.momentum is None:
            raise ConfigError(
                f"{name.removeprefix('model.')!r} averages its statistics over all batches (momentum=None), which "
                "particles cannot. Give it a momentum such as 0.1; refresh_statistics averages at the end."
            )
    named = [dict(joint.named_parameters()) for joint in joints]
    particles = stack([{name: p for name, p in own.items() if p.requires_grad} for own in named])
    if not particles:
        raise ConfigError("No parameter of the network is trainable, so there is nothing to have a posterior over.")
    for name in named[0].keys() - particles.keys():
        for i, own in enumerate(named):
            if not torch.equal(own[name], named[0][name]):
                raise ConfigError(
                    f"{name.removeprefix('model.')!r} is frozen, so all particles share it, but particle {i} has other "
                    "values there than particle 0. Load the same values, or let it train."
                )
    return particles, stack([dict(joint.named_buffers()) for joint in joints])
