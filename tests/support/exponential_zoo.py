"""One row for each exponential family of the library: members, references, what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor
from torch import distributions as td

from credo.families.diag_gaussian import DiagGaussian
from credo.families.eigen_kronecker_gaussian import EigenBlock, EigenKroneckerGaussian
from credo.families.fixed_gaussian import FixedGaussian
from credo.families.full_gaussian import FullGaussian
from credo.families.low_rank_gaussian import LowRankGaussian
from credo.rule.families.beta import Beta
from credo.rule.families.categorical import Categorical
from credo.rule.families.dirichlet import Dirichlet
from credo.rule.families.gamma import Gamma
from credo.rule.families.kronecker_gaussian import KroneckerGaussian
from credo.rule.families.normal_gamma import NormalGamma
from credo.rule.families.sign_bernoulli import SignBernoulli

Breakage = tuple[int, Tensor, str]
"""Which parameter to replace by what, and what the refusal must name."""


def t(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(*shape: int, seed: int) -> Tensor:
    return numbers(*shape, seed=seed).exp() + 0.5


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def definite(size: int, seed: int) -> Tensor:
    root = numbers(size, size, seed=seed)
    return root @ root.mT + eye(size)


BASES = [torch.linalg.eigh(definite(size, seed=90 + size)).eigenvectors for size in (2, 3, 2, 1)]
"""Of `EigenKroneckerGaussian`: its members share them."""


class SignReference:
    """Torch's Bernoulli on {0, 1}, moved to {−1, +1}: a relabelling, so there is no Jacobian."""

    def __init__(self, half_logit: Tensor) -> None:
        self.bits = td.Independent(td.Bernoulli(logits=2 * half_logit), 1)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.bits.log_prob((value + 1) / 2)

    def entropy(self) -> Tensor:
        return self.bits.entropy()


class NormalGammaReference:
    """p(τ) p(x | τ) of torch; what depends on τ is integrated."""

    def __init__(self, q: NormalGamma) -> None:
        self.q = q
        self.gamma = td.Gamma(q.shape, q.rate)

    def conditional(self, tau: Tensor) -> td.Normal:
        return td.Normal(self.q.mean, (self.q.count * tau).rsqrt())

    def log_prob(self, value: Tensor) -> Tensor:
        x, tau = value.unbind(-1)
        return (self.gamma.log_prob(tau) + self.conditional(tau).log_prob(x)).sum(-1)

    def average(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """E over τ, by the trapezoid rule in ln τ, which is exponentially accurate here."""
        log_tau = torch.linspace(-60, 20, 20001, dtype=torch.float64).unsqueeze(-1)
        mass = (self.gamma.log_prob(log_tau.exp()) + log_tau).exp() * (log_tau[1] - log_tau[0])
        return (mass * function(log_tau.exp())).sum(0)

    def entropy(self) -> Tensor:
        inside = self.average(lambda tau: self.conditional(tau).entropy())
        return (self.gamma.entropy() + inside).sum()

    def kl(self, other: NormalGammaReference) -> Tensor:
        def inside(tau: Tensor) -> Tensor:
            return td.kl_divergence(self.conditional(tau), other.conditional(tau))

        return (td.kl_divergence(self.gamma, other.gamma) + self.average(inside)).sum()


def together(distribution: td.Distribution) -> td.Independent:
    """Independent coordinates as one distribution, whose log_prob and entropy are sums."""
    return td.Independent(distribution, len(distribution.batch_shape))


def kl_by_torch(p: Any, q: Any) -> Tensor:
    if isinstance(p, NormalGammaReference):
        return p.kl(q)
    if isinstance(p, SignReference):
        return td.kl_divergence(p.bits, q.bits)
    return td.kl_divergence(p, q)


@dataclass(frozen=True)
class Row:
    """``make(seed)`` builds members; ``reference`` is the same distribution written by others.

    A curved family shows the parameters of a larger one; ``ambient`` is the same distribution as a
    member of that, where the theorems about λ and μ hold.
    """

    make: Callable[[int], Any]
    reference: Callable[[Any], Any]
    ambient: Callable[[Any], Any] = lambda q: q
    bad_natural: list[Breakage] = field(default_factory=list)
    bad_expectation: list[Breakage] = field(default_factory=list)
    bad_fields: list[tuple[str, Any]] = field(default_factory=list)
    extreme: st.SearchStrategy[Any] | None = None


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Ten to the power of low to high."""
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


def vectors(entries: st.SearchStrategy[float], size: int = 2) -> st.SearchStrategy[Tensor]:
    return st.lists(entries, min_size=size, max_size=size).map(lambda values: t(*values))


def correlated(mean: Tensor, scale: Tensor, correlation: float) -> FullGaussian:
    matrix = t([1.0, correlation], [correlation, 1.0])
    return FullGaussian(mean, scale[:, None] * matrix * scale)


SHAPES = vectors(powers(-2, 4))
SCALES = vectors(powers(-4, 4))
REALS = vectors(st.floats(-10, 10))

ROWS: dict[str, Row] = {
    "SignBernoulli": Row(
        make=lambda seed: SignBernoulli(numbers(4, seed=seed)),
        reference=lambda q: SignReference(q.half_logit),
        bad_expectation=[(0, t(0.0, 0.5, 1.0, 0.0), "mean"), (0, t(0.0, -2.0, 0.0, 0.0), "mean")],
        bad_fields=[("half_logit", t(0.0, float("inf"))), ("half_logit", t(0.0)[0])],
        extreme=vectors(st.floats(-15, 15)).map(SignBernoulli),
    ),
    "Categorical": Row(
        make=lambda seed: Categorical(numbers(2, 3, seed=seed)),
        reference=lambda q: together(td.Categorical(logits=q.all_logits)),
        bad_expectation=[
            (0, t([0.1, 0.2, 0.3], [0.1, 0.0, 0.3]), "probabilities of all but the last class"),
            (0, t([0.1, 0.2, 0.3], [0.1, 0.4, 0.5]), "sum of probabilities"),
        ],
        bad_fields=[("logits", t(0.0, float("nan"))), ("logits", t(0.0)[0])],
        extreme=vectors(st.floats(-15, 15), 3).map(Categorical),
    ),
    "Beta": Row(
        make=lambda seed: Beta(positive(3, seed=seed), positive(3, seed=seed + 1)),
        reference=lambda q: together(td.Beta(q.a, q.b)),
        bad_natural=[(0, t(0.0, -1.0, 0.0), "a minus"), (1, t(0.0, 0.0, -3.0), "b minus")],
        bad_expectation=[
            (0, t(-1.0, 0.0, -1.0), "mean of ln x"),
            (1, t(-1e-9, -1.0, -1.0), "mean of ln(1 − x)"),
        ],
        bad_fields=[("a", t(1.0, 0.0, 1.0)), ("b", t(1.0, 1.0, -1.0)), ("b", t(1.0))],
        extreme=st.builds(Beta, SHAPES, SHAPES),
    ),
    "Gamma": Row(
        make=lambda seed: Gamma(positive(3, seed=seed), positive(3, seed=seed + 1)),
        reference=lambda q: together(td.Gamma(q.shape, q.rate)),
        bad_natural=[(0, t(0.0, -1.0, 0.0), "shape"), (1, t(-1.0, 0.0, -1.0), "rate")],
        bad_expectation=[
            (0, t(0.0, 9.0, 0.0), "mean of ln x must be less than the log of the mean of x"),
            (1, t(1.0, -1.0, 1.0), "mean of x must be positive"),
        ],
        bad_fields=[("shape", t(1.0, 0.0, 1.0)), ("rate", t(1.0, -1.0, 1.0)), ("rate", t(1.0))],
        extreme=st.builds(Gamma, SHAPES, SCALES),
    ),
    "NormalGamma": Row(
        make=lambda seed: NormalGamma(
            numbers(2, seed=seed), *(positive(2, seed=seed + i) for i in (1, 2, 3))
        ),
        reference=NormalGammaReference,
        bad_natural=[
            (0, t(1.0, -0.5), "shape minus a half"),
            (1, t(-9.0, 0.0), "minus the rate"),
            (2, t(0.0, 99.0), "minus the rate"),
            (3, t(-1.0, 0.0), "minus half the count"),
        ],
        bad_expectation=[
            (0, t(9.0, 0.0), "mean of ln τ must be less than the log of the mean of τ"),
            (1, t(9.0, -1.0), "mean of τ must be positive"),
            (2, t(0.0, 99.0), "mean of τx²"),
            (3, t(0.0, 0.0), "mean of τx²"),
        ],
        bad_fields=[
            ("mean", t(0.0, float("nan"))),
            ("count", t(1.0, 0.0)),
            ("shape", t(1.0, -1.0)),
            ("rate", t(1.0, float("inf"))),
            ("mean", t(1.0)),
        ],
        extreme=st.builds(NormalGamma, REALS, SCALES, SHAPES, SCALES),
    ),
    "Dirichlet": Row(
        make=lambda seed: Dirichlet(positive(2, 3, seed=seed)),
        reference=lambda q: together(td.Dirichlet(q.concentration)),
        bad_natural=[(0, t([0.0, 0.0, 0.0], [0.0, -1.0, 0.0]), "concentration")],
        bad_expectation=[(0, t([-2.0, -2.0, -2.0], [-0.1, -2.0, -3.0]), "mean of ln θ")],
        bad_fields=[("concentration", t([1.0, 0.0])), ("concentration", t([1.0]))],
        extreme=st.integers(2, 50).flatmap(
            lambda size: vectors(powers(-2, 4), size).map(Dirichlet)
        ),
    ),
    "DiagGaussian": Row(
        make=lambda seed: DiagGaussian(numbers(4, seed=seed), positive(4, seed=seed + 1)),
        reference=lambda q: together(td.Normal(q.mean, q.scale)),
        bad_natural=[(1, t(-1.0, -1.0, 0.0, -1.0), "precision")],
        bad_expectation=[(1, t(99.0, 99.0, 99.0, -1.0), "second moment")],
        bad_fields=[("scale", t([1.0]))],
        extreme=st.builds(DiagGaussian, REALS, SCALES),
    ),
    "FullGaussian": Row(
        make=lambda seed: FullGaussian(numbers(3, seed=seed), definite(3, seed=seed + 1)),
        reference=lambda q: td.MultivariateNormal(q.mean, precision_matrix=q.precision),
        bad_natural=[(1, eye(3), "precision")],
        bad_expectation=[(1, -eye(3), "second moment")],
        bad_fields=[("precision", -eye(3)), ("precision", t(1.0))],
        extreme=st.builds(correlated, REALS, SCALES, st.floats(-0.99, 0.99)),
    ),
    "FixedGaussian": Row(
        make=lambda seed: FixedGaussian(numbers(3, seed=seed), definite(3, seed=99)),
        reference=lambda q: td.MultivariateNormal(q.mean, precision_matrix=q.precision),
        bad_fields=[("precision", -eye(3)), ("precision", t(1.0, 1.0))],
        extreme=st.builds(FixedGaussian, REALS, SCALES),
    ),
    "FixedGaussian, diagonal": Row(
        make=lambda seed: FixedGaussian(numbers(3, seed=seed), positive(3, seed=99)),
        reference=lambda q: together(td.Normal(q.mean, q.precision.rsqrt())),
        bad_fields=[("precision", t(1.0, 0.0, 1.0))],
    ),
    "KroneckerGaussian": Row(
        make=lambda seed: KroneckerGaussian(
            numbers(8, seed=seed),
            (
                (definite(2, seed=seed + 1), definite(3, seed=seed + 2)),
                (definite(2, seed=seed + 3), definite(1, seed=seed + 4)),
            ),
        ),
        reference=lambda q: td.MultivariateNormal(q.mean, precision_matrix=q.dense_precision()),
        ambient=lambda q: FullGaussian(q.mean, q.dense_precision()),
        bad_natural=[(1, eye(8), "precision")],
        bad_expectation=[(1, -eye(8), "second moment")],
        bad_fields=[("blocks", ((eye(2), eye(2)),))],
    ),
    "EigenKroneckerGaussian": Row(
        make=lambda seed: EigenKroneckerGaussian(
            numbers(8, seed=seed),
            (
                EigenBlock(*BASES[:2], positive(6, seed=seed + 1).reshape(2, 3)),
                EigenBlock(*BASES[2:], positive(2, seed=seed + 2).reshape(2, 1)),
            ),
        ),
        reference=lambda q: td.MultivariateNormal(q.mean, precision_matrix=q.dense_precision()),
        ambient=lambda q: FullGaussian(q.mean, q.dense_precision()),
        bad_natural=[(1, eye(8), "precision")],
        bad_expectation=[(1, -eye(8), "second moment")],
        bad_fields=[("blocks", (EigenBlock(None, None, t(1.0).reshape(1, 1)),))],
    ),
    "LowRankGaussian": Row(
        make=lambda seed: LowRankGaussian(
            numbers(6, seed=seed), numbers(6, 2, seed=seed + 1), positive(6, seed=seed + 2)
        ),
        reference=lambda q: td.MultivariateNormal(q.mean, precision_matrix=q.dense_precision()),
        ambient=lambda q: FullGaussian(q.mean, q.dense_precision()),
        bad_natural=[(1, eye(6), "precision")],
        bad_expectation=[(1, -eye(6), "second moment")],
        bad_fields=[
            ("diagonal", t(1.0, 1.0, 1.0, 1.0, 0.0, 1.0)),
            ("diagonal", t(1.0)),
            ("factor", t(1.0)),
        ],
    ),
}
