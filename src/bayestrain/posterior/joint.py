"""The joint density of data and weights as one module, so that stacked tensors can stand in for its parameters."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain.errors import ConfigError
from bayestrain.forming import FormTogether
from bayestrain.infer import stack
from bayestrain.layers.planned import transformed
from bayestrain.predict import Likelihood, Prediction, check_log_prob
from bayestrain.prior import Prior

PerDatum = Callable[[Tensor, Tensor], Tensor]


def one_tensor(outputs: object) -> Tensor:
    """What a network returned, or a `ConfigError` if that is no tensor."""
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"The network must return one tensor, got {type(outputs).__name__}. Wrap it in a module that picks one."
        )
    return outputs


class Joint(nn.Module):
    """A network with its likelihood and prior; only ever called with particles in the place of its parameters."""

    def __init__(self, model: nn.Module, likelihood: Likelihood, prior: Prior | None, num_data: int) -> None:
        super().__init__()
        self.model, self.likelihood, self.prior, self.num_data = model, likelihood, prior, num_data
        self.prior_weight: Tensor | float = 1.0
        """The prior's weight of this step. A tensor, so that a captured step sees it change."""
        self.alone = False
        """Whether a single particle goes without vmap, like a network by itself; dropout then draws other numbers."""
        self.forming, self.forming_to_predict = FormTogether(model), FormTogether(model)
        """Weights of equal layers, by the layers' plans for training and for predictions."""
        self.idle: Callable[[], AbstractContextManager[None]] = nullcontext
        """Leaves out of training what has no effect on it."""
        self.aliases = _aliases(self)
        """Other places of tensors that stand in several modules, and the names that particles have for them."""

    def forward(self, what: str, *inputs: Tensor) -> dict[str, Tensor]:
        """For one particle its "likelihood" or "prior", its "outputs", what these "describe", or lambda's "step"."""
        if what == "likelihood":
            return self._likelihood(*inputs)
        if what == "prior":
            assert self.prior is not None
            value = self.prior.log_prob()
            return {"density": self.prior_weight * value, "prior": value.detach()}
        if what == "outputs":
            return {"outputs": self._outputs(self.forming_to_predict, *inputs)}
        if what == "describe":
            return self.likelihood.describe(self._outputs(self.forming_to_predict, *inputs))
        assert self.prior is not None
        self.prior.step()
        return {}

    def _outputs(self, forming: Callable[[], AbstractContextManager[None]], *inputs: Tensor) -> Tensor:
        with forming() if self.alone and not transformed() else nullcontext():
            return self.model(*inputs)  # type: ignore[no-any-return]

    def _likelihood(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """``N * mean log likelihood``, that mean, and the outputs."""
        with self.idle():
            outputs = self._outputs(self.forming, x)
        outputs = one_tensor(outputs)
        if outputs.dtype in (torch.bfloat16, torch.half):
            outputs = outputs.float()
        log_probs = self.likelihood(outputs, y)
        check_log_prob(log_probs, len(y))
        data = log_probs.mean()
        return {"density": self.num_data * data, "data": data.detach(), "outputs": outputs.detach()}

    def batched(self, particles: Mapping[str, Tensor], what: str, *inputs: Tensor) -> dict[str, Tensor]:
        """`forward` for all particles at once, on the same inputs."""

        def one(tensors: dict[str, Tensor]) -> Any:
            others = {alias: tensors[name] for alias, name in self.aliases.items() if name in tensors}
            return functional_call(self, {**tensors, **others}, (what, *inputs), tie_weights=False)

        predicted = what in ("outputs", "describe")
        if (predicted or (what == "likelihood" and self.alone)) and len(next(iter(particles.values()))) == 1:
            found = one({name: tensor.squeeze(0) for name, tensor in particles.items()})  # its way back is a view
            return {name: tensor[None] for name, tensor in found.items()}
        # Dropout and the like draw anew for every particle. Batch norm cannot ask for other memory formats in there.
        inputs = tuple(tensor.reshape(-1).view(tensor.shape) for tensor in inputs)  # one channel: contiguous in both
        return vmap(one, randomness="different")(dict(particles))  # type: ignore[no-any-return]


def _aliases(joint: nn.Module) -> dict[str, str]:
    """``{name of a place: first name of the tensor in it}`` for all but the first; a module counts under one name."""
    first: dict[Tensor, str] = {}
    found = {}
    for path, module in joint.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            place = f"{path}.{name}" if path else name
            if tensor is not None and first.setdefault(tensor, place) != place:
                found[place] = first[tensor]
    return found


class CallableLikelihood(Likelihood):
    """A plain function ``(outputs, targets) -> (B,)`` as a likelihood: enough to train, not to predict."""

    def __init__(self, log_prob: PerDatum) -> None:
        super().__init__()
        self.log_prob = log_prob

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.log_prob(outputs, targets)

    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"outputs": outputs}

    def prediction(self, described: Mapping[str, Tensor]) -> Prediction:  # noqa: ARG002
        raise ConfigError(
            "A plain function as likelihood says nothing of predictions. Use posterior.outputs(x), or a Likelihood "
            "with describe() and prediction()."
        )


def stack_joints(joints: Sequence[Joint]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """``(particles, carried)``: trainable parameters and buffers of all, stacked. Frozen ones must be the same."""
    for name, module in joints[0].named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.momentum is None:
            raise ConfigError(
                f"{name.removeprefix('model.')!r} averages its statistics over all batches (momentum=None), which many "
                "networks at once cannot. Give it a momentum, as 0.1; refresh_statistics averages at the end."
            )
    for name, frozen in joints[0].named_parameters():
        if frozen.requires_grad:
            continue
        for i, other in enumerate(joints[1:], start=1):
            if not torch.equal(other.get_parameter(name), frozen):
                raise ConfigError(
                    f"{name.removeprefix('model.')!r} is frozen, which makes it common to all particles, but particle "
                    f"{i} has other values there than particle 0. Load the same ones, or let it train."
                )
    particles = stack([{name: p for name, p in joint.named_parameters() if p.requires_grad} for joint in joints])
    if not particles:
        raise ConfigError("No parameter of the network trains: there is nothing to have a posterior over.")
    return particles, stack([dict(joint.named_buffers()) for joint in joints])
