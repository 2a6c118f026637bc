"""One network in training: a MAP point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain import tt
from bayestrain.batchnorm import IdleBiases
from bayestrain.capture import Capture
from bayestrain.compact import CompactReport, compact_
from bayestrain.errors import TrainingError
from bayestrain.forming import FormTogether
from bayestrain.infer.method import load_optimizer, set_lr
from bayestrain.posterior.joint import one_tensor
from bayestrain.prior import Prior, RankPrior
from bayestrain.sizes import count_parameters, ranks, tt_layers
from bayestrain.target import dense_parameters, sized
from bayestrain.train.arithmetic import channels_last, lowered, products, wants_channels_last
from bayestrain.train.config import FitConfig, PriorConfig
from bayestrain.train.schedule import steps_per_epoch
from bayestrain.train.subject import Spectra, Subject, few_digits, make_optimizer, make_prior

Loss = Callable[[Tensor, Tensor], Tensor]


class Point(Subject):
    """A network, its prior, and the optimiser. Where ranks were sought, the fine-tuning has no prior."""

    def __init__(
        self, model: nn.Module, config: FitConfig, prior: PriorConfig, loss: Loss, num_data: int, device: torch.device,
        search: bool,
    ) -> None:  # fmt: skip
        self.model = model.to(device)
        self.config, self.loss, self.device = config, loss, device
        steps = steps_per_epoch(num_data, config.batch_size)
        self.prior: Prior | None = make_prior(prior, model, num_data, steps, search=search)
        self.optimizer = self._new_optimizer(config.lr)
        self.idle = IdleBiases(model)
        self.capture = Capture()
        self.forming: Callable[[], AbstractContextManager[None]] = nullcontext
        if device.type == "cuda":  # where launching operations takes longer than computing on small cores
            self.forming = FormTogether(model)
        self.channels_last = wants_channels_last(model, device)
        self._weight: Tensor | None = torch.zeros((), device=device) if device.type == "cuda" else None
        """The prior's weight of this step, where a captured step reads it."""
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = {name for name, buffer in model.named_buffers() if _finite(buffer)}
        """Those that must stay finite; masks may have infinities from the start."""

    @property
    def searching(self) -> bool:  # type: ignore[override]
        return isinstance(self.prior, RankPrior)

    def _new_optimizer(self, lr: float) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return make_optimizer(self.config, named, lr, model=self.model, capturable=self.device.type == "cuda")

    def arrange(self, x: Tensor) -> Tensor:
        return channels_last(x) if self.channels_last else x

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        if self._weight is not None and self.prior is not None:
            self._weight.fill_(self.prior.current_weight)
        (numbers,) = self.capture.step(self._advance, x, y, self.prior, self.optimizer)
        return numbers

    def _advance(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        """The work of `step` and nothing that looks at a value: it can be captured in a CUDA graph.

        Lambda moves at the beginning, not at the end as in a loop of one's own, and scales are held by the norms of
        the beginning: the prior then needs nothing that the network computes, and the two run side by side on a GPU.
        """
        self.model.train()
        with self._beside():
            prior, scales = None, None
            if self.prior is not None:
                self.prior.move_lambdas_()
                prior, scales = self.prior.gradients(self._weight), self.prior.scales()
        with products(self.config.precision, self.device), self.forming(), self.idle():
            with lowered(self.config.precision, self.device):
                outputs = one_tensor(self.model(self.arrange(x)))
            data = self.loss(outputs.float(), y)
            data.backward()
        data = data.detach()
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        prior_loss = torch.zeros_like(data) if prior is None else prior.add_()
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.prior is not None:
            self.prior.step(move=False, scales=scales)
        with torch.no_grad():
            right = (outputs.argmax(1) == y).float().mean() if outputs.ndim == 2 else torch.zeros_like(data)
            return (torch.stack([data, prior_loss, right]),)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU, a stream of its own that begins where the step does."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def set_rate(self, lr: float) -> None:
        set_lr(self.optimizer, lr)

    def cut(self, tol: float) -> CompactReport:
        return self._forgotten(compact_(self.model, tol, "contribution", self.optimizer))

    def cut_to(self, ratio: float) -> CompactReport:
        return self._forgotten(compact_(self.model, optimizer=self.optimizer, parameters=self._parameters(ratio)))

    def _forgotten(self, report: CompactReport) -> CompactReport:
        if report.changed:
            self.capture.forget()
        return report

    def round(self, tol: float, ratio: float) -> CompactReport:
        first = compact_(self.model, parameters=self._parameters(ratio)) if ratio else None
        report = compact_(self.model, tol, self.config.rule)
        if first is not None:
            report = first.then(report)
        self._end_search()
        return report

    def _end_search(self) -> None:
        assert isinstance(self.prior, RankPrior)
        self.prior.remove_()
        self.prior = None
        self.optimizer = self._new_optimizer(self.config.finetune_lr)
        self.capture.forget()

    @property
    def ratio(self) -> float:
        return dense_parameters(self.model) / count_parameters(self.model)

    def change_for(self, ratio: float) -> float:
        return sized(self.model, self._parameters(ratio)).change

    def _parameters(self, ratio: float) -> int:
        return int(dense_parameters(self.model) / ratio)

    def spectra(self) -> Spectra:
        return {
            name: [s.tolist() for s in tt.bond_spectra([core.detach().double() for core in layer.cores])]
            for name, layer in tt_layers(self.model).items()
        }

    def describe(self) -> dict[str, Any]:
        lambdas = self.prior.lambdas() if self.prior is not None else {}
        return {
            "prior_weight": self.prior.current_weight if self.prior is not None else 0.0,
            "params": count_parameters(self.model),
            "ranks": {name: list(chain) for name, chain in ranks(self.model).items()},
            "lambdas": {name: [few_digits(u) for u in bonds] for name, bonds in lambdas.items()},
        }

    def evaluated(self) -> nn.Module:
        for layer in tt_layers(self.model).values():
            layer.train(layer.training)  # a replayed step leaves no trace by which layers know that cores have changed
        return self.model

    def mend(self) -> list[str]:
        # The prior is made of squares: weights so large that these are infinite are lost as well.
        weights = (_exact(parameter).square().sum() for parameter in self.model.parameters())
        buffers = (buffer for name, buffer in self.model.named_buffers() if name in self._buffers)
        if not all(_finite(value) for values in (weights, buffers) for value in values):
            raise TrainingError("a weight")
        return []

    def finish(self, inputs: Iterable[Tensor]) -> None:  # noqa: ARG002
        """Nothing to estimate: batch norm's running averages are those of one network, as its training left them."""
        self.evaluated()

    def largest_layer(self) -> str:
        return max(tt_layers(self.model).items(), key=lambda item: _size(item[1]), default=("", None))[0]

    def state(self) -> dict[str, Any]:
        return {
            "searching": self.searching,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "prior": self.prior.state_dict() if self.prior is not None else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        if self.searching and not state["searching"]:
            self._end_search()
        self.model.load_state_dict(state["model"])
        self.idle.empty()
        load_optimizer(self.optimizer, state["optimizer"])
        self.capture.forget()
        if self.prior is not None:
            self.prior.load_state_dict(state["prior"])


def _exact(parameter: Tensor) -> Tensor:
    """In single precision at least."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


def _finite(value: Tensor) -> bool:
    """Whether all of it is, as far as can be told; of sparse or quantised tensors, for example, it cannot."""
    try:
        return bool(torch.isfinite(value).all())
    except (NotImplementedError, RuntimeError):
        return False


def _size(layer: nn.Module) -> float:
    size = max(float(p.detach().abs().max()) for p in layer.parameters())
    return size if math.isfinite(size) else math.inf
