"""The inference kit: what every method must do. A new method inherits `InferenceKit` and passes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ParticleWarning, ShapeError, TrainingError
from bayestrain.infer import METHODS, Method, StepInfo

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
    return -0.5 * p["w"].square().sum((1, 2)) - 0.5 * p["b"].square()


def running_density(p: dict[str, Tensor], batch: Any) -> Tensor:
    """A density with a memory of its own: a running mean of the data, as in batch norm."""
    with torch.no_grad():
        p["mean"].lerp_(batch[1].mean(0).expand_as(p["mean"]), 0.2)
    return density(p, batch) - (p["b"][:, None] - p["mean"]).square().sum(1)


def cone(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
    """Finite at its tip, where its gradient is not."""
    return -p["x"].square().sum(1).sqrt() - 0.1 * p["x"].pow(4).sum(1)


BREAKS: dict[str, Callable[[Tensor], Any]] = {
    "gradient": lambda x: x.fill_(0.0),
    "nan": lambda x: x.fill_(math.nan),
    "one nan": lambda x: x[1].fill_(math.nan),
    "infinite": lambda x: x[0].fill_(math.inf),
}


def assert_same(method: Method, other: Method, **tolerance: float) -> None:
    """Bit for bit, unless a tolerance is given."""
    for kind in ("particles", "carried"):
        for name, tensor in getattr(method, kind).items():
            torch.testing.assert_close(getattr(other, kind)[name], tensor, **(tolerance or {"rtol": 0.0, "atol": 0.0}))


class InferenceKit:
    """Inherit, name the method, and set its options."""

    name: ClassVar[str]
    n: ClassVar[int] = 5
    optimizers: ClassVar[Sequence[str]] = tuple(OPTIMIZERS)
    options: ClassVar[dict[str, Any]] = {}

    def make(self, density: Any, start: dict[str, Tensor], optimizer: str = "adam", **options: Any) -> Method:
        kind: Any = METHODS[self.name]
        if self.optimizers:
            options["optimizer"] = OPTIMIZERS[optimizer]
        return kind(density, start, **{**self.options, **options})  # type: ignore[no-any-return]

    def start(self, shift: float = 3.0) -> dict[str, Tensor]:
        return {"w": shift + torch.randn(self.n, 3, 2, dtype=F64), "b": shift + torch.randn(self.n, dtype=F64)}

    def with_memory(self, optimizer: str = "adam") -> Method:
        carried = {"mean": torch.zeros(self.n, 2, dtype=F64)}
        return self.make(running_density, self.start(), optimizer, carried=carried)

    # --- steps --------------------------------------------------------------------------------------------------------

    def test_the_start_is_copied_and_may_be_a_view(self) -> None:
        start, (batch,) = self.start(), batches_of(1)
        before = {name: tensor.clone() for name, tensor in start.items()}
        turned = {"w": start["w"].mT.contiguous().mT.requires_grad_(), "b": start["b"]}
        method, other = self.make(density, start), self.make(density, turned)
        method.step(batch)
        other.step(batch)
        assert_same(method, other, rtol=1e-12, atol=1e-12)
        for name, tensor in before.items():
            assert torch.equal(start[name], tensor)
            assert not torch.equal(method.particles[name], tensor)

    def test_a_step_returns_the_log_densities_from_before_it(self) -> None:
        start, (batch,) = self.start(), batches_of(1)
        info = self.make(density, start).step(batch)
        assert isinstance(info, StepInfo)
        assert info.alive.tolist() == [True] * self.n
        assert not info.log_density.requires_grad
        torch.testing.assert_close(info.log_density, density(start, batch))

    def test_particles_move_uphill_with_every_optimiser(self) -> None:
        for optimizer in self.optimizers or ("own",):
            method = self.make(bowl, self.start(), optimizer)
            first = method.step(None).log_density
            for _ in range(30):
                last = method.step(None).log_density
            assert float((last - first).mean()) > 3

    @pytest.mark.parametrize("chunk", [1, 2, 3, 5, 99])
    def test_chunks_change_nothing(self, chunk: int) -> None:
        start, batches = self.start(), batches_of(6)
        whole, parts = self.make(density, start), self.make(density, start, chunk=chunk)
        for batch in batches:
            torch.testing.assert_close(
                parts.step(batch).log_density, whole.step(batch).log_density, rtol=1e-12, atol=0.0
            )
        assert_same(whole, parts, rtol=0.0, atol=1e-12)

    @pytest.mark.parametrize("chunk", [None, 2])
    def test_a_log_prior_is_part_of_the_density_and_called_once_for_all(self, chunk: int | None) -> None:
        asked: list[int] = []

        def log_prior(p: dict[str, Tensor]) -> Tensor:
            asked.append(len(p["w"]))
            return -((p["w"][:, 0, 0] + p["b"] - p["offset"]) ** 2)

        def together(p: dict[str, Tensor], batch: Any) -> Tensor:
            return density(p, batch) - ((p["w"][:, 0, 0] + p["b"] - p["offset"]) ** 2)

        start, carried = self.start(), {"offset": torch.arange(self.n, dtype=F64)}
        apart = self.make(density, start, log_prior=log_prior, carried=carried, chunk=chunk)
        whole = self.make(together, start, carried=carried, chunk=chunk)
        for batch in batches_of(4):
            torch.testing.assert_close(apart.step(batch).log_density, whole.step(batch).log_density)
        assert_same(whole, apart, rtol=1e-9, atol=1e-9)
        assert asked == [self.n] * 4

    @pytest.mark.parametrize("chunk", [None, 1, 2])
    def test_carried_tensors_come_in_chunks_and_may_be_changed_in_place(self, chunk: int | None) -> None:
        sizes: list[int] = []

        def counting(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
            assert set(p) == {"x", "centre", "calls"}
            assert not p["centre"].requires_grad
            sizes.append(len(p["x"]))
            p["calls"] += 1
            return -0.5 * (p["x"] - p["centre"]).square().sum(1)

        n = self.n
        centre = 100.0 * torch.arange(n, dtype=F64)[:, None].expand(n, 2)
        carried = {"centre": centre.clone(), "calls": torch.zeros(n, dtype=torch.int64)}
        method = self.make(counting, {"x": torch.zeros(n, 2, dtype=F64)}, "sgd", carried=carried, chunk=chunk)
        torch.testing.assert_close(method.step(None).log_density, -0.5 * centre.square().sum(1))
        assert method.carried["calls"].tolist() == [1] * n
        assert torch.equal(method.carried["centre"], centre)
        assert sizes == [min(chunk or n, n - i) for i in range(0, n, chunk or n)]

    def test_a_tensor_the_density_ignores_has_no_gradient(self) -> None:
        method = self.make(lambda p, _: -0.5 * p["b"].square(), self.start(), "sgd")
        value, gradients = method.gradients(None)
        assert value.shape == (self.n,)
        assert not gradients["w"].any()
        method.step(None)
        assert bool(method.particles["w"].isfinite().all())

    def test_a_learning_rate_of_zero_stops_all(self) -> None:
        method = self.make(bowl, self.start())
        method.step(None)
        before = {name: tensor.detach().clone() for name, tensor in method.particles.items()}
        method.set_lr(0.0)
        method.step(None)
        for name, tensor in before.items():
            assert torch.equal(method.particles[name], tensor)

    # --- states -------------------------------------------------------------------------------------------------------

    def test_a_state_from_a_file_resumes_bit_for_bit(self, tmp_path: Path) -> None:
        for optimizer in self.optimizers or ("own",):
            batches = batches_of(9)
            torch.manual_seed(1)
            whole = self.with_memory(optimizer)
            torch.manual_seed(1)
            first = self.with_memory(optimizer)
            for batch in batches:
                whole.step(batch)
            for batch in batches[:5]:
                first.step(batch)
            torch.save(first.state_dict(), tmp_path / "state.pt")
            second = self.with_memory(optimizer)  # from another start
            second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            assert_same(second, first)
            for batch in batches[5:]:
                second.step(batch)
            assert_same(second, whole)
            assert second.steps == whole.steps == 9

    def test_a_loaded_state_is_a_copy(self) -> None:
        method, other, (batch,) = self.with_memory(), self.with_memory(), batches_of(1)
        method.step(batch)
        state = method.state_dict()
        kept = copy.deepcopy(state)
        other.load_state_dict(state)
        other.step(batch)
        method.load_state_dict(kept)
        again = self.with_memory()
        again.load_state_dict(kept)
        method.step(batch)
        again.step(batch)
        assert_same(method, again)
        assert_same(method, other)

    @pytest.mark.parametrize("damage", ["carried", "particles", "method", "optimizer", "number", "missing"])
    def test_a_state_that_does_not_fit_is_refused_before_any_change(self, damage: str) -> None:
        method, (batch,) = self.with_memory(), batches_of(1)
        method.step(batch)
        before = copy.deepcopy(method.state_dict())
        state = copy.deepcopy(method.state_dict())
        for tensor in state["particles"].values():
            tensor.zero_()
        if damage == "carried":
            state["carried"] = {"mean": torch.zeros(self.n, 3, dtype=F64)}
        elif damage == "particles":
            del state["particles"]["b"]
        elif damage == "method":
            state["method"] = "another"
        elif damage == "optimizer":
            del state["optimizer"]["param_groups"][0]["lr"]
        elif damage == "number":
            state["broken"] = torch.zeros(self.n + 1, dtype=torch.int64)
        else:
            del state["steps"]
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
                return {key: entry if key == "noise" else only(entry) for key, entry in value.items()}
            return value

        for optimizer in ("momentum", "adam"):
            method = self.with_memory(optimizer)
            for batch in batches[:3]:
                method.step(batch)
            state = only(copy.deepcopy(method.state_dict()))
            fewer = {name: tensor.detach()[chosen] for name, tensor in method.particles.items()}
            carried = {"mean": torch.zeros(len(chosen), 2, dtype=F64)}
            other = self.make(running_density, fewer, optimizer, carried=carried)
            other.load_state_dict(state)
            method.keep_(chosen)
            assert method.n == len(chosen)
            assert_same(method, other)
            for batch in batches[3:]:
                assert method.step(batch).alive.tolist() == [True] * len(chosen)
                other.step(batch)
            assert_same(method, other)
        for wrong in ([], [0, 0][: method.fewest] if method.fewest > 1 else []):
            with pytest.raises(ConfigError, match=rf"{self.name} needs at least {method.fewest} particle"):
                method.keep_(wrong)

    def test_a_restarted_optimiser_starts_fresh(self) -> None:
        batches = batches_of(4)
        method = self.make(density, self.start())
        method.step(batches[0])
        method.restart_optimizer()
        assert not method.optimizer.state
        if self.optimizers:
            fresh = self.make(density, {name: t.detach() for name, t in method.particles.items()})
            for batch in batches[1:]:
                method.step(batch)
                fresh.step(batch)
            assert_same(method, fresh)

    # --- trouble ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("how", BREAKS)
    def test_a_broken_particle_stays_where_it_is_and_the_others_move(self, how: str) -> None:
        if self.n == 1:
            return
        start = {"x": torch.randn(self.n, 3, dtype=F64)}
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
        before = {name: tensor.detach().clone() for name, tensor in method.particles.items()}
        with pytest.raises(TrainingError, match="No particle has a finite log density and gradient"):
            method.step(math.nan)
        for name, tensor in before.items():
            assert torch.equal(method.particles[name], tensor)

    def test_bad_arguments_are_refused(self) -> None:
        for wrong, shape in ((lambda p, _: p["w"].sum(), "()"), (lambda p, _: p["w"].sum(2), f"({self.n}, 3)")):
            with pytest.raises(ShapeError) as caught:
                self.make(wrong, self.start()).step(None)
            assert f"shape ({self.n},), got {shape}" in str(caught.value)
        with pytest.raises(ConfigError, match="chunk must be at least 1 particle, got 0"):
            self.make(bowl, self.start(), chunk=0)
        with pytest.raises(ConfigError, match="clip must be positive, got 0"):
            self.make(bowl, self.start(), clip=0.0)
        with pytest.raises(ShapeError, match=f"{self.n} particles, but carried tensors for {self.n + 1}"):
            self.make(bowl, self.start(), carried={"mean": torch.zeros(self.n + 1)})
        with pytest.raises(ShapeError, match="the same number of particles"):
            self.make(bowl, {**self.start(), "other": torch.zeros(self.n + 1, 1)})
