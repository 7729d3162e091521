r"""The tempered ELBO of a two-layer network, and what it becomes as the network gets wide.

The network of Huix et al. (2022) has N neurons, and a neuron's weights are w_j = (a_j, b_j):

    f_w(x) = (1/N) Σ_j a_j φ(⟨b_j, x⟩),      a_j ∈ R^K,  b_j ∈ R^D,  d = K + D

Prior N(0, s²) on every coordinate, posterior q = Π_j N(μ_j, diag σ_j²). With p examples,

    ELBO_η(θ) = −η Σ_j KL(q_j‖P₀) − Σ_i E_q ℓ(f_w(x_i), y_i)                     `elbo`
    F̃_η(ν)    = −η N ∫ KL(q_θ‖P₀) dν − Σ_i ℓ(∬ a φ(⟨b, x_i⟩) dq_θ dν, y_i)       `tempered_limit`
    F(ν)      = −τ ∫ KL(q_θ‖P₀) dν − (1/p) Σ_i ℓ(∬ a φ(⟨b, x_i⟩) dq_θ dν, y_i)   `limit`

where ν is the distribution of θ = (μ, σ) over neurons. In F the average over neurons and noise is
inside the loss. |ELBO_η(θ) − F̃_η(ν_θ)| ≤ C·p/N whatever η, and F̃ = p·F at η = τp/N: at that
temperature a wide network's optimum no longer depends on its width. At η = 1 the KL(q*‖P₀) of all
neurons together tends to 0 instead: the posterior forgets the data. The paper says no rate;
`collapse_constant` is the limit of N·KL, which we derived.

====== ========================= ====================================================
symbol argument                  meaning
====== ========================= ====================================================
μ, σ   ``Neurons.mean, .scale``  (M, d) each, a's K coordinates first
N      ``Neurons.width``         M·``copies``: each row stands for so many neurons
K      ``Neurons.outputs``
x, y   ``x``, ``y``              (p, D); targets that the loss understands
s²     ``prior_variance``        1/5 in the paper
η, τ   ``temperature``, ``tau``
====== ========================= ====================================================

A diagonal q makes ⟨b, x⟩ normal, so the moments of one neuron are exact for ReLU and a
one-dimensional quadrature for any other φ. Errata: they drop the ½ of the squared
loss, and write R^d where θ_j lies in R^{2d}.

>>> problem = MeanFieldProblem(torch.tensor([[0.5], [1.0]]), torch.tensor([1.0, 2.0]))
>>> q = Neurons.at_prior(inputs=1, copies=100)
>>> problem.elbo(q, temperature=1.0)               # the prior has no KL: the loss is all there is
tensor(-2.5001)
>>> problem.gap(q)                                 # ½ Σ_i Var f(x_i), which falls as 1/N
tensor(0.0001)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np
import torch
from scipy import optimize
from torch import Generator, Tensor
from torch.nn import functional as F

from credo.checks import positive
from credo.errors import ConvergenceError, DataError, UnsupportedError
from credo.rule.quadrature import expectation, gauss_hermite

PRIOR_VARIANCE = 0.2
QUADRATURE_ORDER = 64
CUBATURE_ORDER = 12
MAX_CUBATURE_OUTPUTS = 3
"""12³ = 1728 points for each example; a class more would take twelve times as many."""
MAX_DRAWN_NUMBERS = 2**22
MAX_NEWTON_STEPS = 50

Activation: TypeAlias = Callable[[Tensor], Tensor]


class OutputLoss(Protocol):
    """ℓ(f, y) of each example."""

    def at(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Outputs (..., B, K) → losses (..., B)."""
        ...

    def expected(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """E ℓ for outputs of mean (B, K) and covariance (B, K, K): (B,)."""
        ...


class SquaredLoss:
    """ℓ = ½‖y − f‖²; its expectation needs no more than two moments, so it is exact."""

    def at(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """½‖y − f‖²."""
        return 0.5 * (outputs - targets.reshape(outputs.shape[-2:])).square().sum(-1)

    def expected(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """½‖y − E f‖² + ½ tr Cov f."""
        return self.at(mean, targets) + 0.5 * covariance.diagonal(dim1=-2, dim2=-1).sum(-1)


class CrossEntropy:
    """ℓ = log Σ_k e^{f_k} − f_y with labels y; outputs are taken to be normal in expectations.

    A sum of N independent neurons has a third cumulant of order 1/N², so that costs O(1/N²), while
    the gap it is used for is O(1/N). `MeanFieldProblem.sampled_loss` has no such error.
    """

    def at(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log Σ_k e^{f_k} − f_y."""
        labels = targets.expand(outputs.shape[:-1]).unsqueeze(-1)
        return outputs.logsumexp(-1) - outputs.gather(-1, labels).squeeze(-1)

    def expected(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """E log Σ_k e^{f_k} − E f_y by Gauss–Hermite cubature of N(mean, covariance)."""
        size = mean.shape[-1]
        if size > MAX_CUBATURE_OUTPUTS:
            raise UnsupportedError(
                f"the cubature over {size} outputs would take {CUBATURE_ORDER}^{size} points for "
                f"each example: use at most {MAX_CUBATURE_OUTPUTS} classes, or `sampled_loss`"
            )
        nodes, weights = gauss_hermite(CUBATURE_ORDER, like=mean)
        points = torch.cartesian_prod(*[nodes] * size).reshape(-1, size)
        masses = torch.cartesian_prod(*[weights] * size).reshape(-1, size).prod(-1)
        # Where an input gives certain outputs the covariance is 0 and has no Cholesky factor.
        floor = 1e-14 * covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + 1e-30
        identity = torch.eye(size, dtype=mean.dtype, device=mean.device)
        root = torch.linalg.cholesky(covariance + floor[:, None, None] * identity)
        outputs = mean + torch.einsum("bkl,ql->qbk", root, points)
        return torch.tensordot(masses, self.at(outputs, targets), dims=1)


def relu_moments(mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """E relu(u) and E relu(u)² for u ~ N(mean, scale²): mΦ(r) + sφ(r), (m² + s²)Φ(r) + msφ(r).

    Here r = m/s, Φ and φ are the standard normal's distribution function and density.

    >>> first, second = relu_moments(torch.tensor(0.0), torch.tensor(1.0))
    >>> round(float(first * math.sqrt(2 * math.pi)), 6), float(second)
    (1.0, 0.5)
    """
    ratio = mean / scale.clamp_min(torch.finfo(scale.dtype).tiny)
    below = torch.special.ndtr(ratio)
    density = torch.exp(-0.5 * ratio.square()) / math.sqrt(2 * math.pi)
    # Far below zero both are differences of nearly equal numbers, which may round to less than 0.
    first = (mean * below + scale * density).clamp_min(0)
    second = (mean.square() + scale.square()) * below + mean * scale * density
    return first, torch.maximum(second, first.square())


def activation_moments(
    activation: Activation, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """E φ(u) and E φ(u)² for u ~ N(mean, scale²): closed for ``torch.relu``, else quadrature."""
    if activation is torch.relu or activation is F.relu:
        return relu_moments(mean, scale)
    first = expectation(activation, mean, scale, QUADRATURE_ORDER)
    return first, expectation(lambda u: activation(u).square(), mean, scale, QUADRATURE_ORDER)


@dataclass(frozen=True, eq=False)
class Neurons:
    """q over all neurons: ``copies`` of them are N(mean[m], diag scale[m]²) for each row m.

    Rows are the atoms of ν, of equal mass. One row with N copies is a θ that all neurons share.
    """

    mean: Tensor
    scale: Tensor
    outputs: int = 1
    copies: int = 1

    def __post_init__(self) -> None:
        if self.mean.dim() != 2 or self.mean.shape != self.scale.shape or not len(self.mean):
            raise DataError(
                f"mean and scale must both be (neurons, K + D), got {tuple(self.mean.shape)} "
                f"and {tuple(self.scale.shape)}"
            )
        if not 1 <= self.outputs < self.mean.shape[1] or self.copies < 1:
            raise DataError(
                f"outputs={self.outputs} of {self.mean.shape[1]} coordinates and "
                f"copies={self.copies}: a neuron needs at least one output, one input and one copy"
            )
        if not bool((self.scale > 0).all()):
            raise DataError(f"scale must be positive, its least value is {self.scale.min():.3g}")

    @classmethod
    def at_prior(
        cls,
        inputs: int,
        outputs: int = 1,
        copies: int = 1,
        prior_variance: float = PRIOR_VARIANCE,
        dtype: torch.dtype | None = None,
    ) -> Neurons:
        """Every neuron as before the data: N(0, s²) in each coordinate."""
        mean = torch.zeros(1, outputs + inputs, dtype=dtype)
        return cls(mean, torch.full_like(mean, math.sqrt(prior_variance)), outputs, copies)

    @property
    def width(self) -> int:
        """N, the number of neurons."""
        return len(self.mean) * self.copies

    def kl(self, prior_variance: float = PRIOR_VARIANCE) -> Tensor:
        """KL(q_m‖P₀) of one neuron for each row, (M,)."""
        ratio = self.scale.square() / prior_variance
        return 0.5 * (ratio + self.mean.square() / prior_variance - 1 - ratio.log()).sum(1)

    def moments(self, x: Tensor, activation: Activation = torch.relu) -> tuple[Tensor, Tensor]:
        """Mean (M, B, K) and covariance (M, B, K, K) of a·φ(⟨b, x⟩) for one neuron of each row.

        Cov = (μ_a μ_aᵀ + diag σ_a²) E φ² − μ_a μ_aᵀ (E φ)².
        """
        k = self.outputs
        (mean_a, mean_b), (scale_a, scale_b) = (
            t.tensor_split([k], dim=1) for t in (self.mean, self.scale)
        )
        first, second = activation_moments(
            activation, mean_b @ x.T, (scale_b.square() @ x.square().T).sqrt()
        )
        outer = torch.einsum("mk,ml->mkl", mean_a, mean_a)
        noise = torch.diag_embed(scale_a.square())
        covariance = (
            outer[:, None] * (second - first.square())[..., None, None]
            + noise[:, None] * second[..., None, None]
        )
        return mean_a[:, None] * first[..., None], covariance

    def output_moments(
        self, x: Tensor, activation: Activation = torch.relu
    ) -> tuple[Tensor, Tensor]:
        """Mean (B, K) and covariance (B, K, K) of the network's outputs f_w(x) under q."""
        mean, covariance = self.moments(x, activation)
        return mean.mean(0), covariance.mean(0) / self.width

    @torch.no_grad()
    def sample_outputs(
        self,
        x: Tensor,
        samples: int,
        generator: Generator | None = None,
        activation: Activation = torch.relu,
    ) -> Tensor:
        """Outputs f_w(x) of networks w ~ q, (samples, B, K): every neuron is drawn."""
        size = max(self.mean.shape[1], len(x)) * self.width
        chunk = max(1, MAX_DRAWN_NUMBERS // size)
        outputs = []
        for start in range(0, samples, chunk):
            shape = (min(chunk, samples - start), self.copies, *self.mean.shape)
            noise = torch.randn(shape, generator=generator, dtype=self.mean.dtype)
            w = self.mean + self.scale * noise
            a, b = w.tensor_split([self.outputs], dim=-1)
            outputs.append(torch.einsum("scmk,scmb->sbk", a, activation(b @ x.T)) / self.width)
        return torch.cat(outputs)


@dataclass(frozen=True, eq=False)
class MeanFieldProblem:
    """Data, loss, φ and prior of the network; q is handed to every quantity."""

    x: Tensor
    y: Tensor
    loss: OutputLoss = field(default_factory=SquaredLoss)
    activation: Activation = torch.relu
    prior_variance: float = PRIOR_VARIANCE

    def __post_init__(self) -> None:
        positive("prior_variance", self.prior_variance)
        if self.x.dim() != 2 or not len(self.x) or len(self.x) != len(self.y):
            raise DataError(
                f"x must be (p, D) and y have p targets, got {tuple(self.x.shape)} and "
                f"{tuple(self.y.shape)}; one-dimensional inputs are x[:, None]"
            )

    @property
    def num_data(self) -> int:
        """The number of examples, p."""
        return len(self.x)

    def balanced(self, tau: float, width: int) -> float:
        """η = τp/N, at which F̃ = p·F."""
        return tau * self.num_data / width

    def expected_loss(self, q: Neurons) -> Tensor:
        """E_q ℓ(f_w(x_i), y_i) of each example, (p,)."""
        return self.loss.expected(*q.output_moments(self.x, self.activation), self.y)

    def loss_of_mean(self, q: Neurons) -> Tensor:
        """ℓ(E_q f_w(x_i), y_i) of each example, (p,): the average is inside the loss."""
        return self.loss.at(q.output_moments(self.x, self.activation)[0], self.y)

    def sampled_loss(
        self, q: Neurons, samples: int, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """An unbiased estimate of Σ_i E_q ℓ(f_w(x_i), y_i) and its standard error."""
        outputs = q.sample_outputs(self.x, samples, generator, self.activation)
        totals = self.loss.at(outputs, self.y).sum(-1)
        return totals.mean(), totals.std() / math.sqrt(samples)

    def elbo(self, q: Neurons, temperature: float) -> Tensor:
        """ELBO_η: −η·KL(q‖P₀) of all neurons − Σ_i E_q ℓ(f_w(x_i), y_i)."""
        return -temperature * self.total_kl(q) - self.expected_loss(q).sum()

    def tempered_limit(self, q: Neurons, temperature: float) -> Tensor:
        """F̃_η of q's ν: the ELBO with the expectation inside the loss."""
        return -temperature * self.total_kl(q) - self.loss_of_mean(q).sum()

    def limit(self, q: Neurons, tau: float) -> Tensor:
        """F(ν) of q's ν; the number of neurons has no part in it."""
        return -tau * q.kl(self.prior_variance).mean() - self.loss_of_mean(q).mean()

    def gap(self, q: Neurons) -> Tensor:
        """F̃_η − ELBO_η ≥ 0, whatever η; for the squared loss ½ Σ_i tr Cov_q f(x_i)."""
        return (self.expected_loss(q) - self.loss_of_mean(q)).sum()

    def total_kl(self, q: Neurons) -> Tensor:
        """KL(q‖P₀) of all neurons together."""
        return q.width * q.kl(self.prior_variance).mean()

    def collapse_constant(self) -> float:
        """The limit of N·KL(q*‖P₀) at η = 1: (s²/2)·‖Σ_i ∇ℓ(0, y_i) E_{P₀} φ(⟨b, x_i⟩)‖².

        Ours. Around the prior only the means of a matter: N·‖μ_a‖²/2s² + ⟨μ_a, Σ_i ∇ℓ(0, y_i) Eφ⟩
        is least at μ_a = −(s²/N) Σ_i ∇ℓ(0, y_i) Eφ; all else moves by O(1/N²).
        """
        scale = math.sqrt(self.prior_variance) * self.x.norm(dim=1)
        features, _ = activation_moments(self.activation, torch.zeros_like(scale), scale)
        outputs = self.x.new_zeros(self.num_data, self._outputs()).requires_grad_()
        (slopes,) = torch.autograd.grad(self.loss.at(outputs, self.y).sum(), outputs)
        return 0.5 * self.prior_variance * float((features @ slopes).square().sum())

    def _outputs(self) -> int:
        if self.y.is_floating_point():
            return 1 if self.y.dim() == 1 else self.y.shape[1]
        return int(self.y.max()) + 1

    def start(self, mean: float = 0.1) -> Neurons:
        """One θ for all neurons near the prior; means of exactly 0 would be a stationary point."""
        prior = Neurons.at_prior(
            self.x.shape[1], self._outputs(), 1, self.prior_variance, self.x.dtype
        )
        return replace(prior, mean=prior.mean + mean)

    def best(self, temperature: float, width: int, start: Neurons | None = None) -> Neurons:
        """The q of ``width`` neurons with the highest ELBO_η near ``start``.

        Neurons share the rows of ``start`` equally; by default all have the same θ.
        """
        start = start or self.start()
        if width % len(start.mean):
            raise DataError(f"{width} neurons can't share {len(start.mean)} rows equally")
        start = replace(start, copies=width // len(start.mean))
        # Of size one at every width and temperature, so that one tolerance serves all.
        unit = max(1.0, temperature * width)
        return maximise(lambda q: self.elbo(q, temperature) / unit, start)

    def best_limit(self, tau: float, start: Neurons | None = None) -> Neurons:
        """The ν with the highest F near ``start``, with as many atoms as ``start`` has rows."""
        return maximise(lambda q: self.limit(q, tau), start or self.start())


def maximise(
    objective: Callable[[Neurons], Tensor], start: Neurons, tolerance: float = 1e-8
) -> Neurons:
    """A stationary point of ``objective`` in mean and log scale, uphill of ``start``.

    L-BFGS, then Newton steps for as long as they shrink the gradient: near the prior a KL is the
    square of what is solved for, and L-BFGS alone leaves it few digits. In float64.
    """
    rows, columns = start.mean.shape

    def unflatten(vector: Tensor) -> Neurons:
        mean, log_scale = vector.reshape(2, rows, columns)
        return replace(start, mean=mean, scale=log_scale.exp())

    def loss(vector: Tensor) -> Tensor:
        return -objective(unflatten(vector))

    def gradient(vector: Tensor) -> tuple[Tensor, Tensor]:
        leaf = vector.detach().requires_grad_()
        value = loss(leaf)
        (slope,) = torch.autograd.grad(value, leaf)
        return value.detach(), slope

    def for_scipy(vector: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = gradient(torch.from_numpy(vector))
        return float(value), slope.numpy()

    first = torch.stack([start.mean, start.scale.log()]).double().flatten()
    options = {"maxiter": 5000, "maxfun": 10_000, "ftol": 0.0, "gtol": 1e-9, "maxcor": 30}
    optimum = optimize.minimize(
        for_scipy, first.numpy(), jac=True, method="L-BFGS-B", options=options
    )
    vector = torch.from_numpy(optimum.x)
    slope = gradient(vector)[1]
    for _ in range(MAX_NEWTON_STEPS):
        hessian = torch.autograd.functional.hessian(loss, vector)
        trial = vector - torch.linalg.lstsq(hessian, slope[:, None]).solution[:, 0]
        trial_slope = gradient(trial)[1]
        if not trial_slope.norm() < slope.norm():
            break
        vector, slope = trial, trial_slope
    steepest = float(slope.abs().max())
    if not steepest < tolerance:
        raise ConvergenceError(
            f"the gradient is still {steepest:.1e} (more than {tolerance:.0e}) after "
            f"{optimum.nit} steps of L-BFGS ({optimum.message}): start nearer to the optimum"
        )
    return unflatten(vector)
