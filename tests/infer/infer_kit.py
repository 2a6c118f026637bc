"""The inference kit: what every method must do. A new method inherits `InferenceKit` and passes."""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ParticleWarning, ShapeError, TrainingError
from bayestrain.infer import METHODS, Method, StepInfo, value_and_grad

F64 = torch.float64

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.05),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
    "adam": lambda named: torch.optim.Adam(named, lr=0.05),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=0.05),
}


def batches_of(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 3, dtype=F64), torch.randn(4, 2, dtype=F64)) for _ in range(count)]


def density(p: dict[str, Tensor], batch: Any) -> Tensor:
    x, y = batch
    misfit: Tensor = (y - x @ p["w"] - p["b"][:, None, None]).square().sum((1, 2))
    return -0.5 * misfit + bowl(p, batch)


def bowl(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
    return -0.5 * sum(tensor.reshape(len(tensor), -1).square().sum(1) for tensor in p.values())


def cone(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
    """Finite at its tip, where its gradient is not."""
    return -p["x"].square().sum(1).sqrt() - 0.1 * p["x"].pow(4).sum(1)


BREAKS: dict[str, Callable[[Tensor], Any]] = {
    "gradient": lambda x: x.fill_(0.0),
    "nan": lambda x: x.fill_(math.nan),
    "one nan": lambda x: x[1].fill_(math.nan),
    "infinite": lambda x: x[0].fill_(math.inf),
}


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "particles": lambda state: state["particles"].pop("b"),
    "method": lambda state: state.update(method="another"),
    "optimizer": lambda state: state["optimizer"]["param_groups"][0].pop("lr"),
    "number": lambda state: state.update(broken=torch.zeros(9, dtype=torch.int64)),
    "missing": lambda state: state.pop("steps"),
}


def build(name: str, density: Any, start: dict[str, Tensor], optimizer: Any = "sgd", **options: Any) -> Any:
    """A method by its name, with an optimiser, perhaps by its name, if it takes one."""
    if "optimizer" in METHODS[name].options:
        options["optimizer"] = OPTIMIZERS.get(optimizer, optimizer)
    return METHODS[name](value_and_grad(density), start, **options)


def set_lr(method: Method, lr: float) -> None:
    for group in method.optimizer.param_groups:
        group["lr"] = lr


def points(n: int, size: int = 3) -> dict[str, Tensor]:
    return {"x": torch.randn(n, size, dtype=F64)}


def assert_same(method: Method, other: Method, **tolerance: float) -> None:
    """Bit for bit, unless a tolerance is given."""
    torch.testing.assert_close(dict(other.particles), dict(method.particles), **(tolerance or {"rtol": 0, "atol": 0}))


class InferenceKit:
    """Inherit, name the method, and set its options."""

    name: ClassVar[str]
    n: ClassVar[int] = 5
    options: ClassVar[dict[str, Any]] = {}

    def make(self, density: Any, start: dict[str, Tensor], optimizer: str = "adam", **options: Any) -> Method:
        return build(self.name, density, start, optimizer, **{**self.options, **options})

    def start(self, shift: float = 3.0) -> dict[str, Tensor]:
        return {"w": shift + torch.randn(self.n, 3, 2, dtype=F64), "b": shift + torch.randn(self.n, dtype=F64)}

    def optimizers(self) -> Sequence[str]:
        return tuple(OPTIMIZERS) if "optimizer" in METHODS[self.name].options else ("own",)

    def test_the_start_is_copied_and_a_step_returns_its_log_densities(self) -> None:
        start, (batch,) = self.start(), batches_of(1)
        before = {name: tensor.clone() for name, tensor in start.items()}
        turned = {"w": start["w"].mT.contiguous().mT.requires_grad_(), "b": start["b"]}
        method, other = self.make(density, start), self.make(density, turned)
        info = method.step(batch)
        assert isinstance(info, StepInfo)
        assert info.alive.tolist() == [True] * self.n
        assert not info.log_density.requires_grad
        torch.testing.assert_close(info.log_density, density(start, batch))  # from before the step
        other.step(batch)
        assert_same(method, other, rtol=1e-12, atol=1e-12)
        for name, tensor in before.items():
            assert torch.equal(start[name], tensor)
            assert not torch.equal(method.particles[name], tensor)

    def test_particles_move_uphill_with_every_optimiser(self) -> None:
        for optimizer in self.optimizers():
            method = self.make(bowl, self.start(), optimizer)
            first = method.step(None).log_density
            for _ in range(30):
                last = method.step(None).log_density
            assert float((last - first).mean()) > 3

    def test_a_tensor_the_density_ignores_has_no_gradient(self) -> None:
        method = self.make(lambda p, _: -0.5 * p["b"].square(), self.start(), "sgd")
        value, gradients = method.gradients(method.particles, None)
        assert value.shape == (self.n,)
        assert not gradients["w"].any()
        method.step(None)
        assert bool(method.particles["w"].isfinite().all())

    def test_a_learning_rate_of_zero_stops_all(self) -> None:
        method = self.make(bowl, self.start())
        method.step(None)
        before = copy.deepcopy(method.state_dict()["particles"])
        set_lr(method, 0.0)
        method.step(None)
        assert all(torch.equal(method.particles[name], tensor) for name, tensor in before.items())

    def test_tensors_of_several_types_keep_theirs(self) -> None:
        types = {"w": torch.bfloat16, "b": torch.float32}
        method = self.make(lambda p, _: bowl(p, None).float(), {k: t.to(types[k]) for k, t in self.start().items()})
        first = method.step(None).log_density
        for _ in range(20):
            last = method.step(None).log_density
        assert bool((last > first).all())
        assert {name: tensor.dtype for name, tensor in method.particles.items()} == types

    def test_clip_limits_how_far_a_particle_moves_but_not_where_to(self) -> None:
        if "clip" not in METHODS[self.name].options:
            return
        lengths = torch.tensor([50.0, 20.0, 0.02, 0.01, 3.0], dtype=F64)[: self.n]
        angle = torch.linspace(0, 3, self.n, dtype=F64)
        start = {"x": lengths * angle.cos(), "y": torch.stack([lengths * angle.sin()] * 2, dim=1)}
        cold = {"temperature": 0.0, "memory": 0.0} if "temperature" in METHODS[self.name].options else {}
        moved = {}
        for clip in (None, 0.25):
            method = self.make(bowl, start, "sgd", clip=clip, scale=0.1, **cold)
            set_lr(method, 1.0)
            method.step(None)
            steps = {name: tensor.detach() - start[name] for name, tensor in method.particles.items()}
            moved[clip] = torch.cat([steps["x"][:, None], steps["y"]], dim=1)
        length = moved[None].norm(dim=1, keepdim=True)
        assert bool((length > 0.25).any())
        torch.testing.assert_close(moved[0.25], moved[None] * (0.25 / length).clamp_max(1.0), rtol=1e-10, atol=1e-12)

    def test_a_state_from_a_file_resumes_bit_for_bit(self, tmp_path: Path) -> None:
        for optimizer in self.optimizers():
            batches, start = batches_of(9), self.start()
            whole, first = (self.make(density, start, optimizer) for _ in range(2))
            for batch in batches:
                whole.step(batch)
            for batch in batches[:5]:
                first.step(batch)
            torch.save(first.state_dict(), tmp_path / "state.pt")
            second = self.make(density, self.start(), optimizer)  # from another start
            second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            assert_same(second, first)
            for batch in batches[5:]:
                second.step(batch)
            assert_same(second, whole)
            assert second.steps == whole.steps == 9

    def test_a_loaded_state_is_a_copy(self) -> None:
        method, other, again = (self.make(density, self.start()) for _ in range(3))
        batch, after = batches_of(2)
        method.step(batch)
        kept = copy.deepcopy(method.state_dict())
        other.load_state_dict(method.state_dict())
        other.step(after)
        again.load_state_dict(kept)
        method.step(after)
        again.step(after)
        assert_same(method, again)
        assert_same(method, other)

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_state_that_does_not_fit_is_refused_before_any_change(self, damage: str) -> None:
        method, (batch,) = self.make(density, self.start()), batches_of(1)
        method.step(batch)
        before, state = (copy.deepcopy(method.state_dict()) for _ in range(2))
        for tensor in state["particles"].values():
            tensor.zero_()
        DAMAGES[damage](state)
        with pytest.raises((ShapeError, ConfigError)):
            method.load_state_dict(state)
        for name, tensor in before["particles"].items():
            assert torch.equal(method.particles[name], tensor)
        method.step(batch)

    def test_keep_continues_with_some_particles_and_their_optimiser_state(self) -> None:
        batches, chosen = batches_of(6), [0] if self.n == 1 else [3, 0]

        def only(value: Any) -> Any:
            """A state with only the chosen particles in it."""
            if isinstance(value, Tensor) and value.ndim and len(value) == self.n:
                return value[chosen]
            if isinstance(value, dict):
                return {key: only(entry) for key, entry in value.items()}
            return value

        for optimizer in ("momentum", "adam"):
            method = self.make(density, self.start(), optimizer)
            for batch in batches[:3]:
                method.step(batch)
            fewer = {name: tensor.detach()[chosen] for name, tensor in method.particles.items()}
            other = self.make(density, fewer, optimizer)
            other.load_state_dict(only(copy.deepcopy(method.state_dict())))
            method.keep_(chosen)
            assert len(method) == len(chosen)
            assert_same(method, other)
            for batch in batches[3:]:
                assert method.step(batch).alive.tolist() == [True] * len(chosen)
                other.step(batch)
            assert_same(method, other)
        for wrong in ([], [0, 0][: method.fewest] if method.fewest > 1 else []):
            with pytest.raises(ConfigError, match=rf"{self.name} needs at least {method.fewest} particle"):
                method.keep_(wrong)

    @pytest.mark.parametrize("how", BREAKS)
    def test_a_broken_particle_stays_where_it_is_and_the_others_move(self, how: str) -> None:
        if self.n == 1:
            return
        start = points(self.n)
        BREAKS[how](start["x"][2])
        method = self.make(cone, start, "sgd")
        with pytest.warns(ParticleWarning, match=f"Particle 2 of {self.n} has") as warned:
            info = method.step(None)
        method.step(None)  # a second warning would be an error
        others = [i for i in range(self.n) if i != 2]
        assert len(warned) == 1
        assert info.alive.nonzero().flatten().tolist() == others
        after = method.particles["x"].detach()
        torch.testing.assert_close(after[2], start["x"][2], rtol=0.0, atol=0.0, equal_nan=True)
        assert bool(((after - start["x"]).norm(dim=1)[others] > 1e-3).all())

    def test_a_particle_broken_by_one_batch_comes_back(self) -> None:
        if self.n == 1:
            return
        method = self.make(lambda p, batch: bowl(p, None) + batch, self.start())
        bad = torch.zeros(self.n, dtype=F64)
        bad[1] = math.nan
        with pytest.warns(ParticleWarning, match=f"Particle 1 of {self.n}"):
            assert method.step(bad).alive.tolist() == [i != 1 for i in range(self.n)]
        assert bool(method.step(torch.zeros(self.n, dtype=F64)).alive.all())

    @pytest.mark.parametrize("good_steps", [0, 3])
    def test_when_all_are_broken_training_ends_and_none_has_moved(self, good_steps: int) -> None:
        method = self.make(lambda p, batch: bowl(p, None) * batch, self.start(), "sgd")
        for _ in range(good_steps):
            method.step(1.0)
        before = copy.deepcopy(method.state_dict()["particles"])
        with pytest.raises(TrainingError, match="No particle has a finite log density and gradient"):
            method.step(math.nan)
        assert all(torch.equal(method.particles[name], tensor) for name, tensor in before.items())

    def test_bad_arguments_are_refused(self) -> None:
        for wrong, shape in ((lambda p, _: p["w"].sum(), "()"), (lambda p, _: p["w"].sum(2), f"({self.n}, 3)")):
            with pytest.raises(ShapeError) as caught:
                self.make(wrong, self.start()).step(None)
            assert f"shape ({self.n},), got {shape}" in str(caught.value)
        with pytest.raises(ConfigError, match="clip must be positive, got 0"):
            self.make(bowl, self.start(), clip=0.0)
        with pytest.raises(ShapeError, match="the same number of particles"):
            self.make(bowl, {**self.start(), "other": torch.zeros(self.n + 1, 1)})
