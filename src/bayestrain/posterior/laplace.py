"""A posterior for a network that is trained already: a Gaussian around its weights (MacKay 1992; Immer et al. 2021).

The curvature of the log likelihood is that of the linearised network, the generalised Gauss-Newton matrix of all chosen
parameters together: compact networks have few. With ``J_i`` the Jacobian of the outputs for datum i and ``H_i`` the
curvature of its log likelihood in the outputs::

    covariance = (G + delta)^-1,    G = sum_i J_i^T H_i J_i
    log p(data | delta) = log likelihood + D/2 log delta - delta/2 |theta|^2 - 1/2 log det(G + delta)

``delta``, the precision of the prior, is where the last line is largest. Predictions come from the linearised network
``f(x) + J(x) (theta' - theta)``. Drawn weights in the network itself are worse, above all in factorised layers, whose
cores can move far together without changing their product.
"""

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from bayestrain.errors import ConfigError, check_counts
from bayestrain.posterior.likelihoods import Likelihood, LogProb, as_likelihood, full_precision
from bayestrain.posterior.model import Joint, ParticleModel, outputs_of
from bayestrain.posterior.prediction import Prediction

LARGEST = 20_000  # parameters at once: their matrix takes 3.2 GB

Named = dict[str, Tensor]


class Laplace:
    """The Gaussian; `laplace` makes it.

    Attributes:
        precision: delta, that of the prior.
        log_evidence: the log marginal likelihood at it.
        effective: how many parameters the data determine.
    """

    def __init__(
        self, joint: Joint, theta: Named, values: Tensor, vectors: Tensor, log_density: float, precision: float | None
    ) -> None:
        self.joint, self.names, self._theta, self.values, self.vectors = joint, list(theta), theta, values, vectors
        square = float(sum(tensor.double().square().sum() for tensor in theta.values()))
        if precision is None:  # the evidence rises with delta while the data determine more than delta |theta|^2
            low, high = -20.0, 20.0  # of its logarithm
            while high - low > 1e-4:
                middle = (low + high) / 2
                rises = float((values / (values + math.exp(middle))).sum()) > math.exp(middle) * square
                low, high = (middle, high) if rises else (low, middle)
            precision = math.exp((low + high) / 2)
        self.precision = precision
        self.effective = float((values / (values + precision)).sum())
        determinant = float((values + precision).log().sum())
        self.log_evidence = log_density + 0.5 * (len(values) * math.log(precision) - precision * square - determinant)

    def draws(self, n: int, seed: int = 0) -> Named:
        """Draw n differences to the trained parameters, stacked."""
        check_counts(n=n)
        noise = torch.randn(n, len(self.values), generator=torch.Generator().manual_seed(seed), dtype=self.values.dtype)
        rows = (noise.to(self.values.device) * (self.values + self.precision).rsqrt()) @ self.vectors.mT
        parts = rows.split([tensor.numel() for tensor in self._theta.values()], dim=1)
        named = zip(self._theta.items(), parts, strict=True)
        return {name: part.reshape(n, *own.shape).to(own.dtype) for (name, own), part in named}

    @torch.no_grad()
    def predict(self, x: Tensor, n: int = 50, seed: int = 0, batch_size: int = 100) -> Prediction:
        """Return what n draws of the linearised network predict."""
        moved = torch.cat([tensor.flatten(1) for tensor in self.draws(n, seed).values()], 1).double()
        likelihood, parts = self.joint.likelihood, []
        with self.joint.lent() as joint:
            for batch in x.split(batch_size):
                outputs = _run(joint, self._theta, batch)
                away = torch.einsum("bcd,nd->nbc", _jacobian(joint, self._theta, batch), moved)
                parts.append(vmap(likelihood.describe)(outputs + away.reshape(n, *outputs.shape).to(outputs)))
        return likelihood.prediction({name: torch.cat([part[name] for part in parts], 1) for name in parts[0]})

    @torch.no_grad()
    def sample(self, n: int, seed: int = 0) -> ParticleModel:
        """Return n networks with drawn weights, to save or export; `predict` is better."""
        moved, own = self.draws(n, seed), dict(self.joint.named_parameters())
        particles = {k: p.detach() + moved[k] if k in moved else p.detach().expand(n, *p.shape) for k, p in own.items()}
        carried = {name: buffer.expand(n, *buffer.shape).clone() for name, buffer in self.joint.named_buffers()}
        return ParticleModel(self.joint, {name: tensor.clone() for name, tensor in particles.items()}, carried)

    def __repr__(self) -> str:
        about = f"{len(self.values):,} parameters, of which the data determine {self.effective:.1f}"
        return f"Laplace({about}; precision={self.precision:.4g}, log_evidence={self.log_evidence:.6g})"


def laplace(
    model: nn.Module,
    data: Iterable[tuple[Tensor, Tensor]],
    likelihood: Likelihood | LogProb | str = "classification",
    *,
    include: str | None = None,
    precision: float | None = None,
) -> Laplace:
    """Return a Gaussian posterior around the weights of a trained network, which is not changed::

        posterior = laplace(model, train.batches(128, shuffle=False))
        posterior.predict(x).epistemic

    Args:
        model: the network, at a maximum of its log posterior. Remove lambda first (`RankPrior.remove_`).
        data: all training data once, as batches.
        likelihood: as trained; for a regression with the noise found, such as ``Regression(noise=0.3)``.
        include: pattern of the names of the uncertain parameters, "*" for all; None takes the last layer, which
            predicted better.
        precision: of the prior; None finds it by the marginal likelihood.
    """
    joint = Joint(model, as_likelihood(likelihood))
    joint.likelihood = joint.likelihood.to(next(model.parameters(), torch.empty(())).device)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    if include is None:
        owner, factorised, _ = trainable[-1].partition(".factorized.") if trainable else ("", "", "")
        include = f"{owner if factorised else owner.rpartition('.')[0]}.*".removeprefix(".")
    names = [f"model.{name}" for name in trainable if fnmatchcase(name, include)]
    with joint.lent() as own:
        theta = {name: own.tensors()[name].detach() for name in names}
        size = sum(tensor.numel() for tensor in theta.values())
        if not 0 < size <= LARGEST:
            raise ConfigError(
                f"include={include!r} names {size:,} trainable parameters; it must be 1 to {LARGEST:,}. Name the last "
                'layer, as in include="head.*", or make the network smaller first (compress_, compact_).'
            )
        curvature, log_likelihood = torch.zeros(size, size, dtype=torch.float64), 0.0
        for x, y in data:
            rows, value = _roots(own, theta, x, y)
            curvature = curvature.to(rows) + rows.mT @ rows
            log_likelihood += value
    values, vectors = torch.linalg.eigh(curvature)
    return Laplace(joint, theta, values.clamp_min(0), vectors, log_likelihood, precision)


def _roots(joint: Joint, theta: Named, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Rows whose products with themselves make the curvature of a batch, and its log likelihood."""
    with torch.enable_grad():
        outputs = _run(joint, theta, x).detach().requires_grad_()
        value = joint.likelihood.log_prob(outputs, y).sum()
        (slope,) = torch.autograd.grad(value, outputs, create_graph=True)
        slopes = slope.reshape(len(x), -1).mT
        columns = [torch.autograd.grad(own.sum(), outputs, retain_graph=True)[0] for own in slopes]
    values, vectors = torch.linalg.eigh(-torch.stack([own.reshape(len(x), -1) for own in columns], 2).double())
    root = vectors * values.clamp_min(0).sqrt()[:, None]  # (B, C, C), its product with its transpose is H
    return (root.mT @ _jacobian(joint, theta, x)).flatten(0, 1).detach(), float(value.detach())


def _jacobian(joint: Joint, theta: Named, x: Tensor) -> Tensor:
    """The derivatives ``(B, C, D)`` of the outputs."""
    each = vmap(jacrev(lambda tensors, one: _run(joint, tensors, one[None]).flatten()), (None, 0))(theta, x)
    return torch.cat([own.flatten(2) for own in each.values()], 2).double()


def _run(joint: Joint, tensors: Named, x: Tensor) -> Tensor:
    return full_precision(functional_call(joint, tensors, (outputs_of, x), tie_weights=False)["outputs"])
