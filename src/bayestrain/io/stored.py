"""Networks written to be exported: a posterior as one module, and weights stored in fewer bits."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayestrain.errors import ConfigError
from bayestrain.posterior import Classification, ParticleModel, Regression
from bayestrain.posterior.likelihoods import full_precision

BITS = {"int8": torch.int8, "bf16": torch.bfloat16}
SLICE = 32  # entries at an index of a weight's first axis, from which on each index has a scale of its own


class Mixture(nn.Module):
    """The particles of a posterior one after another, and what they predict together."""

    def __init__(self, posterior: ParticleModel) -> None:
        super().__init__()
        likelihood, n = posterior.likelihood, len(posterior)
        if type(likelihood) not in (Classification, Regression):
            own = f"A posterior with a {type(likelihood).__name__} does not say what its file should return."
            raise ConfigError(f"{own} Export its networks, posterior.particle(i), one by one.")
        self.particles = nn.ModuleList([posterior.particle(i) for i in range(n)])
        self.temperature = getattr(likelihood, "temperature", None)
        if isinstance(likelihood, Regression):
            learned = posterior.particles.get("likelihood.log_variance", torch.zeros(n)).detach().exp()
            noise = likelihood.noise
            self.variances = nn.Buffer(learned if noise is None else learned.new_tensor([noise**2]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = full_precision(torch.stack([particle(x) for particle in self.particles]))
        if self.temperature is None:
            mean = outputs.mean(0)
            aleatoric, epistemic = self.variances.mean().expand_as(mean), (outputs - mean).square().mean(0)
        else:  # in logarithms: probabilities of single precision underflow
            logs = outputs.log_softmax(-1)
            mixture = logs.logsumexp(0) - math.log(len(self.particles))
            mean, aleatoric = (mixture / self.temperature).softmax(-1), -(logs.exp() * logs).sum(-1).mean(0)
            epistemic = (-(mixture.exp() * mixture).sum(-1) - aleatoric).clamp_min(0.0)
        return {"mean": mean, "total": aleatoric + epistemic, "aleatoric": aleatoric, "epistemic": epistemic}


class Packed(nn.Module):
    """A network, which loses its weights to integers with scales or half precision; `kept` says which stay, and why."""

    def __init__(self, network: nn.Module, bits: str) -> None:
        super().__init__()
        self.network, self.kept, self.number = network, dict[str, str](), dict[str, int]()
        self.dtypes: list[torch.dtype] = []
        known: dict[Tensor, int] = {}
        for path, module in network.named_modules():
            for name, own in list(module.named_parameters(path, False, False)):
                if own.ndim < 2 or not own.is_floating_point():
                    self.kept[name] = f"with {own.ndim} axes, of {own.dtype}"
                elif isinstance(module, nn.RNNBase):
                    self.kept[name] = "of which a recurrent layer keeps a list of its own"
                else:
                    if own not in known:
                        known[own] = len(known)
                        self._pack(own.detach(), bits)
                    self.number[name] = known[own]
                    module._parameters[name.rpartition(".")[2]] = nn.Parameter(own.new_empty(0), False)
        if not known:
            raise ConfigError(f"No parameter of this network can be stored as {bits}: none has two axes.")

    def _pack(self, value: Tensor, bits: str) -> None:
        k = len(self.dtypes)
        self.dtypes.append(value.dtype)
        if bits == "int8":
            axes = tuple(range(int(value[0].numel() >= SLICE), value.ndim))
            scale = (value.abs().amax(axes, keepdim=True) / 127).clamp_min(torch.finfo(value.dtype).tiny)
            self.register_buffer(f"scale_{k}", scale)
            value = (value / scale).round()
        self.register_buffer(f"weight_{k}", value.to(BITS[bits]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = [self.get_buffer(f"weight_{k}").to(dtype) for k, dtype in enumerate(self.dtypes)]
        if hasattr(self, "scale_0"):
            made = [value * self.get_buffer(f"scale_{k}") for k, value in enumerate(made)]
        whole = {name: made[k] for name, k in self.number.items()}
        return functional_call(self.network, whole, args, kwargs, tie_weights=False)


def share_(network: nn.Module) -> None:
    """Let parameters of equal values be one, such as the frozen ones of particles."""
    known: dict[tuple[Any, ...], nn.Parameter] = {}
    for module in network.modules():
        for name, own in module.named_parameters("", False, False):
            data: Any = own.detach().reshape(-1).view(torch.uint8).numpy()
            key = own.shape, own.dtype, own.requires_grad, hashlib.sha256(data).digest()
            module._parameters[name] = known.setdefault(key, own)
