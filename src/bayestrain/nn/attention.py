"""Self-attention through the factors of its packed projection, which PyTorch's own code would make whole."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.linear import TensorLinear, traced_product
from bayestrain.nn.precision import traced, transformed

_PROJECTIONS: WeakKeyDictionary[nn.Module, TensorLinear] = WeakKeyDictionary()
"""The layer that projects for each module; no ``state_dict`` contains it."""


def attend(
    module: Any,
    weight: FactorizedWeight | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,  # noqa: ARG001
    is_causal: bool = False,
) -> tuple[Tensor, None] | None:
    """The forward pass of `nn.MultiheadAttention` whose ``in_proj_weight`` is this; None leaves it to PyTorch's."""
    alike = query is key is value and query.ndim == 3 and not query.is_nested
    if weight is None or need_weights or not alike or module.bias_k is not None or module.add_zero_attn:
        return None
    x = query if module.batch_first else query.transpose(0, 1)
    functional = traced() or transformed()  # then no module can be made
    packed = traced_product(weight, x, module.in_proj_bias) if functional else projection(module, weight)(x)
    q, k, v = packed.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    mask = None if is_causal and key_padding_mask is None else additive(attn_mask, x)
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (len(x), -1))
    if key_padding_mask is not None:
        padding = additive(key_padding_mask, x)[:, None, None]  # type: ignore[index]
        mask = padding if mask is None else mask + padding
    dropout = module.dropout if module.training else 0.0
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal and mask is None)
    y = module.out_proj(y.transpose(1, 2).flatten(2))
    return (y if module.batch_first else y.transpose(0, 1)), None


def projection(module: Any, weight: FactorizedWeight) -> TensorLinear:
    """The packed projection as a layer, which knows how to multiply."""
    layer = _PROJECTIONS.get(module)
    if layer is None or layer.factorized is not weight:
        outputs, inputs = weight.shape
        dense = nn.Linear(inputs, outputs, bias=False, device="meta").train(module.training)
        layer = TensorLinear.of(dense.requires_grad_(weight.cores[0].requires_grad), weight)
        _PROJECTIONS[module] = layer
    layer._parameters["bias"] = module.in_proj_bias
    return layer


def forget(module: nn.Module) -> None:
    """Drop the layer, and with it what `perf` keeps for inference."""
    _PROJECTIONS.pop(module, None)


def additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask to be added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
