"""Which weights of a model can be factorised, and how the factorised ones are put in their places."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bayestrain.nn import parameters
from bayestrain.nn.conv import TensorConv1d, TensorConv2d, TensorConv3d, TensorConvTranspose2d
from bayestrain.nn.embedding import TensorEmbedding, TensorEmbeddingBag
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layer import TensorLayer, is_lazy
from bayestrain.nn.linear import TensorLinear
from bayestrain.nn.sizes import factorized_weights

KINDS: tuple[type[TensorLayer], ...] = (
    TensorLinear, TensorConv1d, TensorConv2d, TensorConv3d, TensorConvTranspose2d, TensorEmbedding, TensorEmbeddingBag
)  # fmt: skip
TWINS: dict[type[nn.Module], type[TensorLayer]] = {kind.dense_kind: kind for kind in KINDS}
"""The layers that are converted, and what they become."""
TWINS[NonDynamicallyQuantizableLinear] = TensorLinear  # attention's output projection

BY_PARAMETER = (nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN)
"""Modules that keep their class: their weights are factorised one by one, and made whole in each pass."""

POSITIONS = ("pos", "wpe", "relative")  # what the names of positional tables contain

STATE_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name and "state_dict" in name)
HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name and name not in STATE_HOOKS)
"""Where a module keeps its hooks on passes; those on its ``state_dict`` concern its own tensors."""


@dataclass(eq=False, frozen=True)
class Place:
    """A dense weight that can be factorised: that of a layer with a twin, or a parameter of another module."""

    layer: str
    """The name of the module in the model."""
    module: Any
    parameter: str
    kind: type[TensorLayer] | None = None
    """What the layer becomes; None if it stays and only its parameter is factorised."""
    reason: str = ""
    """Why it stays dense by default."""

    @property
    def path(self) -> str:
        """The name of the parameter in the model."""
        return f"{self.layer}.{self.parameter}".removeprefix(".")

    @property
    def name(self) -> str:
        """What a user calls it."""
        return self.layer if self.kind else self.path

    @property
    def weight(self) -> Any:
        """The dense weight, as the module has it."""
        return getattr(self.module, self.parameter, None)

    def plain(self) -> Any:
        """The layer as one of PyTorch's, with the same bias."""
        if not is_transposed(self.module):
            return self.module
        inputs, outputs = self.weight.shape
        linear: Any = nn.Linear(inputs, outputs, device="meta").train(self.module.training)
        linear.weight, linear.bias = nn.Parameter(self.weight.detach().mT, self.weight.requires_grad), self.module.bias
        return linear

    def oriented(self) -> Tensor:
        """The weight with its outputs first, as the factorised one has it."""
        return self.kind.oriented(self.plain().weight) if self.kind else self.weight


def is_transposed(module: nn.Module) -> bool:
    """Whether this is the ``Conv1D`` of GPT-2 in `transformers`: a linear layer with its weight transposed."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def find_places(model: nn.Module) -> Iterator[Place]:
    """All weights that can be factorised, in the order of the modules."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        kind = type(module)
        quantised = "quantized" in kind.__module__ and kind.__name__ in {dense.__name__ for dense in TWINS}
        if module in inside or isinstance(module, TensorLayer | FactorizedWeight):
            inside.update(module.modules())
        elif kind in TWINS or is_transposed(module):
            if getattr(module, "groups", 1) != 1:
                yield Place(name, module, "weight", None, "grouped: the kernel is small")
            else:
                positions = kind is nn.Embedding and any(word in name.rpartition(".")[2] for word in POSITIONS)
                yield Place(name, module, "weight", TWINS.get(kind, TensorLinear), "a table of positions" * positions)
        elif quantised or (is_lazy(module) and isinstance(module, tuple(TWINS))):  # `tensorize_` says what to do
            yield Place(name, module, "weight", TensorLinear)
        else:
            reason = f"no factorised layer stands for {kind.__name__}"
            if isinstance(module, tuple(TWINS)):
                reason = "a subclass, whose users may rely on .weight"
            elif isinstance(module, nn.RNNCellBase):
                reason = "its weights would be made whole at every time step"
            known = getattr(kind, "dense_kind", kind) in BY_PARAMETER
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1 and parameter.is_floating_point():
                    yield Place(name, module, key, None, "" if known and "weight" in key else reason)


def install(model: nn.Module, weights: Mapping[Place, FactorizedWeight]) -> None:
    """Put factorised weights in their places; the other parameters keep their identity."""
    layers, others = dict[nn.Module, nn.Module](), defaultdict[nn.Module, dict[str, FactorizedWeight]](dict)
    for place, weight in weights.items():
        if place.kind is None:
            others[place.module][place.parameter] = weight
        else:
            layer: Any = place.kind.of(place.plain(), weight)
            layers[place.module] = layer
            if layer.bias is not None:
                layer.bias = place.module.bias
    for module, own in others.items():
        parameters.put_(module, own)
    replace_layers(model, layers)


def replace_layers(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put each replacement wherever its original is used, with the original's hooks."""
    for original, replacement in replacements.items():
        bare = nn.Module()
        for kind in HOOKS:  # the very dictionaries, so that the handles of hooks still remove them
            setattr(replacement, kind, getattr(original, kind))
            setattr(original, kind, getattr(bare, kind))
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, replacements[module])
    for module in model.modules():  # PyTorch's encoder has a fast path in evaluation mode that reads whole weights
        if isinstance(module, nn.TransformerEncoderLayer) and factorized_weights(module):
            module.activation_relu_or_gelu = 0  # as for other activations: `activation` is called
        elif isinstance(module, nn.TransformerEncoder) and factorized_weights(module):
            module.use_nested_tensor = False  # only that path takes them
