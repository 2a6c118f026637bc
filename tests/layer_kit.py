"""A test kit for tensor-train layers: give it a layer, inherit every check against its dense twin.

`check_equals_dense_twin` compares one layer on one input, value and every gradient; property tests call it on whatever
they make up. `LayerKit` is a base class: a subclass named ``Test...`` says how to build its layer and inherits tests of
everything a PyTorch layer is expected to survive.

The reference is slow and obvious: one `torch.einsum` over all cores at once builds the dense weight, and autograd goes
through it. It shares no code with the layers' fast paths.
"""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from bayestrain.layers import TTConv2d, TTLayer, TTLinear


class Calls(TorchDispatchMode):
    """Counts the operations that are run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made[str(function)] += 1
        return function(*args, **(kwargs or {}))


def slow_dense(cores: Sequence[Tensor]) -> Tensor:
    """The full tensor of a train in a single einsum, all modes in order."""
    operands: list[Tensor | list[int]] = []
    modes: list[int] = []
    label = 0
    for core in cores:
        labels = list(range(label, label + core.ndim))
        operands += [core, labels]
        modes += labels[1:-1]
        label += core.ndim - 1  # the right rank is the next core's left rank
    full: Tensor = torch.einsum(*operands, [0, *modes, label])
    return full.squeeze(-1).squeeze(0)


def slow_weight(layer: TTLayer, cores: Sequence[Tensor]) -> Tensor:
    """The weight an `nn.Linear` or `nn.Conv2d` would hold, from the definition of the layer's modes."""
    full = slow_dense(cores)
    if isinstance(layer, TTLinear):
        d = len(cores)
        full = full.permute(*range(0, 2 * d, 2), *range(1, 2 * d, 2))  # m1 j1 m2 j2 .. -> m1 m2 .. j1 j2 ..
        rows, columns = torch.Size(layer.out_modes).numel(), torch.Size(layer.in_modes).numel()
        return full.reshape(rows, columns)[: layer.out_features, : layer.in_features]
    assert isinstance(layer, TTConv2d)
    channels, filters = torch.Size(layer.in_modes).numel(), torch.Size(layer.out_modes).numel()
    kernel = full.reshape(*layer.kernel_size, channels, filters).permute(3, 2, 0, 1)
    return kernel[: layer.out_channels, : layer.in_channels]


def _values_and_gradients(
    layer: TTLayer, x: Tensor, cotangent: Tensor | None, twin: nn.Module | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients for input, cores and bias; through the slow weight in `twin` if one is given."""
    leaves = {"input": x.detach().clone().requires_grad_()}
    leaves |= {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    parameters = {name: leaf for name, leaf in leaves.items() if name != "input"}
    if twin is None:
        y = functional_call(layer, parameters, leaves["input"])
    else:
        cores = [leaves[f"cores.{k}"] for k in range(len(layer.cores))]
        dense = {"weight": slow_weight(layer, cores)} | {k: v for k, v in parameters.items() if k == "bias"}
        y = functional_call(twin, dense, leaves["input"])
    cotangent = torch.ones_like(y) if cotangent is None else cotangent
    gradients = torch.autograd.grad(y, list(leaves.values()), cotangent)
    return y, dict(zip(leaves, gradients, strict=True))


def check_equals_dense_twin(layer: TTLayer, x: Tensor, tol: float = 1e-10) -> None:
    """Value and every gradient of `layer` on `x` equal those of its dense twin."""
    twin = layer.to_dense()
    assert type(twin) is (nn.Linear if isinstance(layer, TTLinear) else nn.Conv2d)
    assert_close(twin.weight, slow_weight(layer, list(layer.cores)), rtol=tol, atol=tol)
    assert_close(twin(x), layer(x), rtol=tol, atol=tol)
    cotangent = torch.randn_like(twin(x))
    value, gradients = _values_and_gradients(layer, x, cotangent, None)
    twin_value, twin_gradients = _values_and_gradients(layer, x, cotangent, twin)
    assert value.shape == twin_value.shape
    assert_close(value, twin_value, rtol=tol, atol=tol)
    assert gradients.keys() == {"input"} | dict(layer.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert_close(gradient, twin_gradients[name], rtol=tol, atol=tol, msg=lambda m, n=name: f"gradient of {n}: {m}")


class Recorder(TorchDispatchMode):
    """Notes the matrix products and convolutions that really run, with the dtype of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[torch.dtype] = []
        self.convolutions: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith(("aten.mm", "aten.bmm", "aten.addmm")):
            self.products.append(result.dtype)
        if name.startswith("aten.convolution.") or "mkldnn_convolution" in name:
            self.convolutions.append(result.dtype)
        return result


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in double precision."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


class LayerKit:
    """What every tensor-train layer must pass. A subclass gives `make_layer`, `event_shape` and `batch_shapes`."""

    event_shape: tuple[int, ...]
    """Shape of one input."""
    batch_shapes: tuple[tuple[int, ...], ...]
    """What may stand before it; the last one is used where a test needs just one."""

    def make_layer(self, *, max_rank: int | None = None, dtype: torch.dtype = torch.float64) -> TTLayer:
        """A fresh random layer; with the ranks of this case unless told otherwise."""
        raise NotImplementedError

    def make_input(self, batch_shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        batch_shape = self.batch_shapes[-1] if batch_shape is None else batch_shape
        return torch.randn(*batch_shape, *self.event_shape, dtype=dtype)

    # --- values and gradients -----------------------------------------------------------------------------------------

    def test_equals_its_dense_twin_for_every_batch_shape(self) -> None:
        layer = self.make_layer()
        for batch_shape in self.batch_shapes:
            check_equals_dense_twin(layer, self.make_input(batch_shape))

    def test_gradcheck(self) -> None:
        layer = self.make_layer()
        names = [name for name, _ in layer.named_parameters()]

        def forward(x: Tensor, *parameters: Tensor) -> Tensor:
            return functional_call(layer, dict(zip(names, parameters, strict=True)), x)

        x = self.make_input().requires_grad_()
        assert torch.autograd.gradcheck(forward, (x, *layer.parameters()), fast_mode=True)
        assert torch.autograd.gradgradcheck(forward, (x, *layer.parameters()), fast_mode=True)

    @pytest.mark.parametrize(
        ("dtype", "tol"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str
    )
    def test_dtypes(self, dtype: torch.dtype, tol: float) -> None:
        layer, x = self.make_layer(dtype=dtype), self.make_input(dtype=dtype)
        assert all(parameter.dtype == dtype for parameter in layer.parameters())
        y = layer(x)
        assert y.dtype == dtype
        exact = copy.deepcopy(layer).double().to_dense()
        assert relative_error(y, exact(x.double())) < tol

    def test_float_layer_moved_to_double_equals_its_twin(self) -> None:
        check_equals_dense_twin(self.make_layer(dtype=torch.float32).double(), self.make_input())

    def test_meta_device_gives_shapes(self) -> None:
        layer, x = self.make_layer(), self.make_input()
        assert layer.to("meta")(x.to("meta")).shape == self.make_layer()(x).shape

    # --- copies and files ---------------------------------------------------------------------------------------------

    def test_deepcopy_is_equal_and_independent(self) -> None:
        layer, x = self.make_layer(), self.make_input()
        layer.attach_rank_state()
        twin, before = copy.deepcopy(layer), layer(x)
        assert_close(twin(x), before, rtol=0, atol=0)
        assert twin.rank_state is not None
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1.0)
            twin.rank_state.log_lambdas[0].add_(1.0)
        assert_close(layer(x), before, rtol=0, atol=0)
        assert layer.rank_state is not None
        assert not layer.rank_state.log_lambdas[0].any()

    def test_whole_module_can_be_saved_and_loaded(self) -> None:
        layer, x = self.make_layer(), self.make_input()
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert type(loaded) is type(layer)
        assert loaded.ranks == layer.ranks
        assert_close(loaded(x), layer(x), rtol=0, atol=0)

    @pytest.mark.parametrize("assign", [False, True])
    def test_state_dict_round_trip(self, assign: bool) -> None:
        layer, x = self.make_layer(), self.make_input()
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert set(state) == dict(layer.named_parameters()).keys()
        other = self.make_layer()
        assert relative_error(other(x), layer(x)) > 1e-3
        other.load_state_dict(state, assign=assign)
        assert_close(other(x), layer(x), rtol=0, atol=0)

    @pytest.mark.parametrize("ranks", [("small", "large"), ("large", "small")], ids="-into-".join)
    def test_state_dict_with_other_ranks_loads_and_trains_on(self, ranks: tuple[str, str]) -> None:
        saved, fresh = (
            nn.Sequential(self.make_layer(max_rank=1 if size == "small" else None), nn.Identity()) for size in ranks
        )
        assert isinstance(saved[0], TTLayer)
        assert isinstance(fresh[0], TTLayer)
        assert saved[0].ranks != fresh[0].ranks
        x, parameters = self.make_input(), list(fresh.parameters())
        alive = fresh(x).sum()  # an old graph must not stand in the way
        fresh.load_state_dict(saved.state_dict())
        assert fresh[0].ranks == saved[0].ranks
        assert_close(fresh(x), saved(x), rtol=0, atol=0)
        assert all(new is old for new, old in zip(fresh.parameters(), parameters, strict=True))
        check_equals_dense_twin(fresh[0], x)
        fresh(x).square().sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in parameters)
        assert alive.isfinite()

    @pytest.mark.parametrize("has_its_own", [False, True])
    def test_lambda_travels_in_the_state_dict(self, has_its_own: bool) -> None:
        layer, fresh = self.make_layer(max_rank=1), self.make_layer()
        if has_its_own:
            fresh.attach_rank_state()
        state = layer.attach_rank_state()
        for k, values in enumerate(state.log_lambdas):
            values.copy_(torch.randn_like(values) + k)
        state.held_norm.fill_(3.5)
        fresh.load_state_dict(layer.state_dict())
        assert fresh.rank_state is not None
        assert fresh.rank_state.held_norm == 3.5
        for own, sent in zip(fresh.rank_state.log_lambdas, state.log_lambdas, strict=True):
            assert_close(own, sent, rtol=0, atol=0)
        assert not [name for name, _ in fresh.named_parameters() if "lambda" in name]

    def test_state_dict_of_other_modes_is_refused(self) -> None:
        layer, x = self.make_layer(), self.make_input()
        before = layer(x)
        state = layer.state_dict()
        state["cores.0"] = torch.zeros(1, *(size + 1 for size in layer.cores[0].shape[1:-1]), layer.ranks[1])
        with pytest.raises(RuntimeError, match=r"size mismatch for cores\.0"):
            layer.load_state_dict(state)
        assert_close(layer(x), before, rtol=0, atol=0)

    # --- PyTorch's machinery ------------------------------------------------------------------------------------------

    def test_functional_call_and_vmap_over_particles_with_gradients(self) -> None:
        particles = [self.make_layer() for _ in range(3)]
        parameters, buffers = stack_module_state(list[nn.Module](particles))
        skeleton, x = copy.deepcopy(particles[0]).to("meta"), self.make_input()

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(skeleton, parameters, x).square().sum()

        assert not buffers
        gradients = vmap(grad(loss), in_dims=(0, None))(parameters, x)
        for i, particle in enumerate(particles):
            particle(x).square().sum().backward()
            for name, parameter in particle.named_parameters():
                assert_close(gradients[name][i], parameter.grad, rtol=1e-10, atol=1e-10)

    def test_vmap_over_inputs_equals_a_batch(self) -> None:
        layer, x = self.make_layer(), self.make_input((3,))
        assert_close(vmap(layer)(x), layer(x), rtol=1e-10, atol=1e-10)

    def test_autocast(self) -> None:
        layer, x = self.make_layer(dtype=torch.float32), self.make_input(dtype=torch.float32).requires_grad_()
        twin = layer.to_dense()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            twin_dtype = twin(x).dtype
        assert y.dtype == twin_dtype == torch.bfloat16
        cotangent = torch.randn_like(y, dtype=torch.float32)
        leaves = [x, *layer.parameters()]
        low = torch.autograd.grad(y, leaves, cotangent.bfloat16())
        exact = torch.autograd.grad(layer(x), leaves, cotangent)
        assert relative_error(y, layer(x)) < 2e-2
        for a, b in zip(low, exact, strict=True):
            assert a.dtype == torch.float32
            assert relative_error(a, b) < 3e-2

    def test_compiles_without_a_graph_break(self) -> None:
        layer, x = self.make_layer(), self.make_input()
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        y = compiled(x)
        assert_close(y, layer(x), rtol=1e-12, atol=1e-12)
        y.square().sum().backward()
        compiled_gradients = [parameter.grad for parameter in layer.parameters()]
        layer.zero_grad()
        layer(x).square().sum().backward()
        for a, b in zip(compiled_gradients, [parameter.grad for parameter in layer.parameters()], strict=True):
            assert_close(a, b, rtol=1e-10, atol=1e-10)

    @pytest.mark.usefixtures("process_group")
    def test_distributed_data_parallel(self) -> None:
        layer, x = self.make_layer(), self.make_input()
        plain, parallel = copy.deepcopy(layer), DistributedDataParallel(layer)
        for _ in range(2):  # the second round runs through the rebuilt buckets
            for model in (plain, parallel):
                model(x).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter -= 0.01 * parameter.grad
            for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
                assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
                assert_close(a, b, rtol=1e-12, atol=1e-12)
            parallel.zero_grad()
            plain.zero_grad()

    # --- what the user reads ------------------------------------------------------------------------------------------

    def test_repr_shows_modes_ranks_and_what_is_saved(self) -> None:
        layer = self.make_layer()
        twin = layer.to_dense()
        left, dense = (sum(p.numel() for p in module.parameters()) for module in (layer, twin))
        text = repr(layer)
        assert text.startswith(f"{type(layer).__name__}(")
        assert f"in_modes={layer.in_modes}, out_modes={layer.out_modes}, ranks={layer.ranks}" in text
        assert f"parameters={left:,} of {dense:,} ({dense / left:.3g}x)" in text
        assert "\n" not in text
        layer.attach_rank_state()
        assert repr(layer) == text, "lambda is no part of what is deployed"

    def test_train_step_lowers_the_loss(self) -> None:
        layer, x = self.make_layer(), self.make_input()
        target = torch.randn_like(layer(x))
        optimizer = torch.optim.SGD(layer.parameters(), 1e-3)
        first = last = F.mse_loss(layer(x), target)
        for _ in range(5):
            optimizer.zero_grad()
            last = F.mse_loss(layer(x), target)
            last.backward()
            optimizer.step()
        assert last < first
