"""SVGD against loops over pairs of particles, and the size of what it allocates."""

from typing import Any

import pytest
import svgd_reference as slow
import torch
from infer_kit import batches_of, bowl, build, density
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bayestrain.infer import SVGD, Kernel, count, imq, rbf, stack
from bayestrain.infer.svgd import BLOCK

F64 = torch.float64


def svgd(density: Any, particles: dict[str, Tensor], lr: float, **options: Any) -> SVGD:
    """As it is printed: phi is a mean over the particles."""
    scale = options.pop("scale", 1.0) / count(particles)
    return build("svgd", density, particles, lambda named: torch.optim.SGD(named, lr=lr), scale=scale, **options)


def own_kernel(d2: Tensor) -> tuple[Tensor, Tensor]:
    """A user's kernel: two scales added, no bandwidth to adapt."""
    return torch.exp(-d2 / 8) + 0.5 / (1 + d2), -torch.exp(-d2 / 8) / 8 - 0.5 / (1 + d2) ** 2


KERNELS: dict[str, tuple[Kernel, slow.MakeKernel]] = {
    "rbf": (rbf, slow.rbf_of),
    "imq": (imq, slow.imq_of),
    "own": (own_kernel, lambda _: lambda d2: own_kernel(d2)[0]),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("n", [2, 3, 9])
def test_ten_steps_are_ten_steps_of_the_double_loop(n: int, name: str) -> None:
    kernel, make_kernel = KERNELS[name]
    expected = {"w": torch.randn(n, 3, 2, dtype=F64), "b": torch.randn(n, dtype=F64)}
    method = svgd(density, expected, 0.05, kernel=kernel, scale=0.3)
    for batch in batches_of(10):
        method.step(batch)
        moved = slow.direction(expected, density, batch, make_kernel)
        expected = {key: tensor + 0.05 * 0.3 * moved[key] for key, tensor in expected.items()}
    for key, tensor in method.particles.items():
        torch.testing.assert_close(tensor.detach(), expected[key], rtol=1e-10, atol=1e-10)


def test_particles_longer_than_a_block_of_columns_move_the_same_way() -> None:
    before = {"x": torch.randn(3, BLOCK + 11, dtype=F64)}
    expected = slow.direction(before, bowl, None)["x"]
    method = svgd(bowl, before, 1.0)
    method.step(None)
    torch.testing.assert_close(method.particles["x"].detach() - before["x"], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", [rbf, imq])
def test_one_particle_apart_from_many_copies_pushes_none_away(kernel: Kernel, dtype: torch.dtype) -> None:
    """The median distance is zero here; what rounding leaves of it must not become the bandwidth."""
    point, other = torch.randn(2, 1000, dtype=dtype)
    method = svgd(bowl, stack([{"x": point}] * 12 + [{"x": other}]), 1.0, kernel=kernel)
    method.step(None)
    moved = method.particles["x"].detach()
    assert float(moved.norm(dim=1).max()) < 2 * float(point.norm())
    torch.testing.assert_close(moved[:12], moved[:1].expand(12, -1), rtol=1e-3, atol=1e-3)


def test_a_step_under_autocast_computes_the_direction_in_full_precision() -> None:
    before = {"x": torch.randn(6, 40)}
    plain, autocast = svgd(bowl, before, 1.0), svgd(bowl, before, 1.0)
    plain.step(None)
    with torch.autocast("cpu", torch.bfloat16):
        autocast.step(None)
    assert torch.equal(plain.particles["x"], autocast.particles["x"])


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


@pytest.mark.parametrize("kernel", [rbf, imq])
def test_nothing_in_a_step_is_larger_than_the_particles_themselves(kernel: Kernel) -> None:
    n, size = 12, 5000
    method = svgd(bowl, {"x": torch.randn(n, size)}, 0.1, kernel=kernel)
    with Largest() as largest:
        method.step(None)
    assert n * size <= largest.elements <= 1.5 * n * size  # and not n * n * size
