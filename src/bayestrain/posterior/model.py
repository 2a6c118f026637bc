"""`ParticleModel`: n networks of one shape as stacked tensors, and the module that runs with them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain.errors import ConfigError, check_counts
from bayestrain.infer import stack
from bayestrain.nn.fast import fast
from bayestrain.nn.sizes import count_parameters, ranks
from bayestrain.posterior.likelihoods import Classification, Likelihood, one_tensor
from bayestrain.posterior.prediction import Prediction, fit_temperature

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
        self._aliases: dict[str, str] = {}  # functional_call mixes up the names of a tensor in modules used twice
        first: dict[Tensor, str] = {}
        for path, module in self.named_modules():
            own = module.named_parameters(path, False, False), module.named_buffers(path, False, False)
            for name, tensor in (*own[0], *own[1]):
                if first.setdefault(tensor, name) != name:
                    self._aliases[name] = first[tensor]

    def forward(self, part: Part, *inputs: Tensor) -> dict[str, Tensor]:
        return part(self, *inputs)

    def batched(
        self, particles: Mapping[str, Tensor], part: Part, *inputs: Tensor, size: int | None = None
    ) -> dict[str, Tensor]:
        """Run a part for all particles on the same inputs, `size` at a time: under `torch.vmap`, or one by one."""
        n = len(next(iter(particles.values())))
        size = min(size or n, n)
        chunks = [{k: t[i : i + size] for k, t in particles.items()} for i in range(0, n, size)]
        if size == n:
            chunks = [dict(particles)]  # the gradient of a slice would be one more copy
        with self._lock:
            return joined([self._at_once(chunk, part, inputs) for chunk in chunks])

    def _at_once(self, particles: dict[str, Tensor], part: Part, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
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
                "The network cannot run for several particles at once, because of an LSTM, a branch on values or the "
                f"like: pass chunk=1 to run them one by one. PyTorch says: {str(error).split('. ')[0]}."
            ) from error

    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers, each under its first name."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    @contextmanager
    def lent(self) -> Iterator["Joint"]:
        """Lend a copy that shares the tensors, in evaluation mode, to one caller; it is kept for the next ones."""
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


class ParticleModel:
    """Particles as stacked tensors, with their network and likelihood; any number of threads may predict with it.

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} particles of {self.parameters_each:,} parameters)"

    @property
    def device(self) -> torch.device:
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
        own = one.tensors()
        for name, tensor in {**self.particles, **self.carried}.items():
            own[name].copy_(tensor[i])
        return one.model

    def to(self, device: torch.device | str) -> "ParticleModel":
        """Return the same particles on another device, to predict with; a `Posterior` trains where it was made."""
        return self._moved(device, lambda tensor: tensor)

    def _moved(self, device: torch.device | str, change: Callable[[Tensor], Tensor]) -> "ParticleModel":
        both = ({k: change(t.detach()).to(device) for k, t in d.items()} for d in (self.particles, self.carried))
        with self.joint.lent() as joint:
            moved = ParticleModel(copy.deepcopy(joint).to(device), *both)
        moved.chunk = self.chunk
        return moved

    def outputs(self, x: Tensor, batch_size: int = 1000, chunk: int | None = None) -> Tensor:
        """Return what every particle's network returns for x, ``(n, N, ...)``, on x's device."""
        return self._predict(outputs_of, x, batch_size, chunk)["outputs"]

    def predict(self, x: Tensor, batch_size: int = 1000, chunk: int | None = None) -> Prediction:
        """Return the prediction for x with its uncertainty, on x's device.

        `batch_size` inputs and `chunk` particles run at a time, which changes memory, not results.
        """
        return self.likelihood.prediction(self._predict(_described, x, batch_size, chunk))

    def calibrate_(self, x: Tensor, labels: Tensor, batch_size: int = 1000, chunk: int | None = None) -> float:
        """Find the temperature at which the particles together predict these held-out data best, and keep it."""
        if not isinstance(self.likelihood, Classification):
            raise ConfigError(f"Only a Classification has a temperature, not {type(self.likelihood).__name__}.")
        probabilities = self._predict(_described, x, batch_size, chunk)["probabilities"]
        self.likelihood.temperature = fit_temperature(probabilities, labels)
        return self.likelihood.temperature

    @torch.no_grad()
    def refresh_statistics(self, batches: Iterable[Tensor]) -> None:
        """Average batch norm's statistics over these batches of inputs, per particle; those of training lag behind."""
        with self.joint.lent() as joint:
            self.joint.forget_copies()  # this one will have another momentum
            norms = {n: m for n, m in joint.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats}
            for name in norms:  # a value that is not finite would stay in an average
                self.carried[f"{name}.running_mean"].nan_to_num_()
                self.carried[f"{name}.running_var"].nan_to_num_()
            seen = 0
            for x in (batch for batch in batches if len(batch)) if norms else ():
                size, _ = self._sizes(joint.eval(), outputs_of, x, len(x), None)
                seen += len(x)
                for norm in norms.values():
                    norm.train().momentum = len(x) / seen  # the first batch replaces, others are averaged in
                joint.batched(self._tensors(), outputs_of, x.to(self.device), size=size)

    def _tensors(self) -> dict[str, Tensor]:
        """What a network needs to predict, which lambda is not part of."""
        both = {**self.particles, **self.carried}
        return {name: tensor.detach() for name, tensor in both.items() if ".rank_state." not in name}

    @torch.no_grad()
    def _predict(self, part: Part, x: Tensor, batch_size: int, chunk: int | None) -> dict[str, Tensor]:
        check_counts(batch_size=batch_size, chunk=chunk)
        if not isinstance(x, Tensor) or len(x) == 0:
            found = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ConfigError(f"Inputs must be a tensor of at least one input, got {found}.")
        tensors = self._tensors()
        with self.joint.lent() as joint:
            size, inputs = self._sizes(joint, part, x, batch_size, chunk)
            seen = [joint.batched(tensors, part, batch.to(self.device), size=size) for batch in x.split(inputs)]
        return {name: torch.cat([each[name].to(x.device) for each in seen], dim=1) for name in seen[0]}

    def _sizes(self, joint: Joint, part: Part, x: Tensor, batch: int, chunk: int | None) -> tuple[int, int]:
        """How many particles, and how many inputs, run at once."""
        n, batch, chunk, perf = len(self), min(int(batch), len(x)), chunk or self.chunk, fast()
        if chunk is not None or perf is None or n * batch <= 1024:  # too little to estimate memory
            return int(chunk or n), batch
        one = {name: tensor[:1] for name, tensor in self._tensors().items()}
        return perf.memory.predicted_at_once(  # type: ignore[no-any-return]
            lambda inputs: joint.batched(one, part, x[:inputs].to(self.device)), n, batch
        )


def outputs_of(joint: Joint, x: Tensor) -> dict[str, Tensor]:
    return {"outputs": one_tensor(joint.model(x))}


def _described(joint: Joint, x: Tensor) -> dict[str, Tensor]:
    return joint.likelihood.describe(one_tensor(joint.model(x)))


def _twin(module: nn.Module) -> Any:
    """A copy of the modules that shares their tensors."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})


def joined(chunks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
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
        if odd := [i for i, own in enumerate(named) if not torch.equal(own[name], named[0][name])]:
            raise ConfigError(
                f"{name.removeprefix('model.')!r} is frozen, so all particles share it, but particle {odd[0]} has "
                "other values there than particle 0. Load the same values, or let it train."
            )
    return particles, stack([dict(joint.named_buffers()) for joint in joints])
