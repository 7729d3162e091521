"""KL divergences between distributions over flat vectors: closed forms, and Monte Carlo.

A closed form is a function of (q, p) that returns the contribution of every weight, (P,); the total
is their sum. To add one, write that function and register it for the two types with `closed_form`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import torch
from torch import Generator, Tensor

from credo.checks import Range, checked
from credo.errors import DataError, UnsupportedError
from credo.families import Atomic, DiagGaussian, EigenKroneckerGaussian, Gaussian
from credo.priors import FlatLaplace
from credo.types import FlatDistribution, Vector

_MAX_SAMPLED_NUMBERS = 2**22
"""How many numbers `kl_monte_carlo` holds at once: 32 MB in float64."""

_LOG_2_LESS_UNIT_ENTROPY = math.log(2) - 0.5 * math.log(2 * math.pi * math.e)
"""ln 2b − ½ ln 2πeσ² without its ln(b/σ)."""

_MAX_TERMS = 2**18
"""How many weights `kl_per_segment` treats at once."""

_Terms = Callable[[Any, Any], Vector]
_AnyTerms = TypeVar("_AnyTerms", bound=_Terms)

_CLOSED_FORMS: dict[tuple[type, type], _Terms] = {}


def closed_form(q: type, p: type) -> Callable[[_AnyTerms], _AnyTerms]:
    """Register a function of (q, p) as KL(q‖p), weight by weight; for use as a decorator.

    Args:
        q: The type of the first distribution.
        p: The type of the second one.
    """

    def register(terms: _AnyTerms) -> _AnyTerms:
        _CLOSED_FORMS[q, p] = terms
        return terms

    return register


closed_form(DiagGaussian, DiagGaussian)(DiagGaussian.kl_terms)


@closed_form(DiagGaussian, FlatLaplace)
def _gaussian_laplace(q: DiagGaussian, p: FlatLaplace) -> Vector:
    """E|θ|/b + ln 2b − ½ ln 2πeσ², where E|θ| = σ√(2/π)·e^(−μ²/2σ²) + μ·erf(μ/(σ√2))."""
    z = q.mean / q.scale
    folded = math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square())
    mean_abs = q.scale * folded + q.mean * torch.erf(z / math.sqrt(2))
    return mean_abs / p.decay + (p.decay / q.scale).log() + _LOG_2_LESS_UNIT_ENTROPY


def has_closed_form(q: FlatDistribution, p: FlatDistribution) -> bool:
    """Whether `kl_terms` knows KL(q‖p) weight by weight."""
    return (type(q), type(p)) in _CLOSED_FORMS


def kl_terms(q: FlatDistribution, p: FlatDistribution) -> Vector:
    """Each weight's contribution to KL(q‖p) in closed form, (P,), in nats.

    Differentiable in the tensors of q and p.
    """
    _check_pair(q, p)
    if not has_closed_form(q, p):
        raise UnsupportedError(
            f"KL({type(q).__name__}‖{type(p).__name__}) has no closed form here; "
            "estimate it with kl_monte_carlo(q, p, samples, generator)"
        )
    _check_sizes(q, p)
    return _CLOSED_FORMS[type(q), type(p)](q, p)


def kl(q: FlatDistribution, p: FlatDistribution) -> Tensor:
    """KL(q‖p) = E_q[ln q(θ) − ln p(θ)] in closed form: a sum over weights, 0-dim, in nats.

    Gaussian q = N(μ, diag σ²) against p = N(m, diag s²):

        KL = ½ Σ [(σ² + (μ − m)²)/s² − 1 + ln(s²/σ²)]

    μ, σ are ``q.mean``, ``q.scale``; m, s are ``p.mean``, ``p.scale``. Against Laplace the
    expectation of |θ| is an error function. Two Gaussians of one structure know their own KL, and
    any Gaussian q has one to a diagonal p. Other pairs raise `UnsupportedError`, and
    `kl_monte_carlo` serves them; it is not called in secret, because an estimate needs a number
    of samples, a generator, and a standard error to be believed.

    >>> q = DiagGaussian(torch.tensor([1.0, 0.0]), torch.tensor(1.0))
    >>> p = DiagGaussian(torch.zeros(2), torch.tensor(1.0))
    >>> kl(q, p)
    tensor(0.5000)
    """
    if not has_closed_form(q, p):
        if isinstance(q, Gaussian) and type(q) is type(p):
            return q.kl(p)
        if isinstance(q, Gaussian) and isinstance(p, DiagGaussian):
            _check_sizes(q, p)
            return -q.entropy() - _expected_log_prob(q, p)
    return kl_terms(q, p).sum()


def _expected_log_prob(q: Gaussian, p: DiagGaussian) -> Tensor:
    """E_q ln p of a diagonal p: it asks of q the mean and the variances alone."""
    return p.log_prob(q.mean) - 0.5 * (q.variance / p.variance).sum()


def kl_per_segment(q: FlatDistribution, p: FlatDistribution, sizes: Sequence[int]) -> Tensor:
    """KL(q‖p) split over consecutive segments of these sizes, (len(sizes),).

    Weights of different segments have to be independent under both: q is one of the closed forms,
    or an `EigenKroneckerGaussian` whose blocks lie within segments.

    >>> q = DiagGaussian(torch.tensor([1.0, 0.0, 2.0]), torch.tensor(1.0))
    >>> p = DiagGaussian(torch.zeros(3), torch.tensor(1.0))
    >>> kl_per_segment(q, p, [2, 1])
    tensor([0.5000, 2.0000])
    """
    _check_sizes(q, p)
    total = q.scale.shape[-1]
    if sum(sizes) != total or min(sizes, default=0) < 0:
        raise DataError(
            f"the sizes {list(sizes)} sum to {sum(sizes)}, but q is over {total} weights"
        )
    sums, start = [], 0
    for size in sizes:
        # In pieces, because a closed form makes several temporaries of its length.
        most = size or 1 if isinstance(q, EigenKroneckerGaussian) else _MAX_TERMS
        pieces = range(start, start + size, most)
        parts = [slice(at, min(at + most, start + size)) for at in pieces]
        sums.append(
            sum((kl(_part(q, place), _part(p, place)) for place in parts), q.scale.new_zeros(()))
        )
        start += size
    return torch.stack(sums)


@checked
def kl_monte_carlo(
    q: FlatDistribution,
    p: FlatDistribution,
    samples: Annotated[int, Range(2)],
    generator: Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """An unbiased estimate of KL(q‖p) and its standard error, both 0-dim.

    The mean over θ ~ q of ln q(θ) − ln p(θ); the error vanishes where q = p. Memory stays bounded
    however many samples are asked for.
    """
    _check_pair(q, p)
    first = q.sample(1, generator)
    chunk = max(1, _MAX_SAMPLED_NUMBERS // first.shape[-1])
    values = [_log_ratio(q, p, first)]
    for start in range(1, samples, chunk):
        values.append(_log_ratio(q, p, q.sample(min(chunk, samples - start), generator)))
    log_ratios = torch.cat(values)
    return log_ratios.mean(), log_ratios.std() / math.sqrt(samples)


def _part(distribution: Any, place: slice) -> Any:
    """The same distribution over some of its weights; closed forms treat weights independently."""
    if isinstance(distribution, EigenKroneckerGaussian):
        return distribution.part(place)
    vectors = {f.name: getattr(distribution, f.name) for f in dataclasses.fields(distribution)}
    return type(distribution)(**{name: vector[place] for name, vector in vectors.items()})


def _log_ratio(q: FlatDistribution, p: FlatDistribution, w: Tensor) -> Tensor:
    return q.log_prob(w) - p.log_prob(w)


def _check_sizes(q: Any, p: Any) -> None:
    """Refuse sizes that differ: a prior over one weight would silently broadcast."""
    if q.size != p.size:
        raise DataError(f"q is over {q.size} weights but p over {p.size}")


def _check_pair(q: FlatDistribution, p: FlatDistribution) -> None:
    """Refuse a KL that is infinite."""
    if isinstance(q, Atomic):
        raise UnsupportedError(
            f"KL({type(q).__name__}‖{type(p).__name__}) is infinite: q has no density. A point "
            "estimate is scored by −prior.log_prob(w) instead; minimising that with the loss is MAP"
        )
    if isinstance(p, Atomic):
        raise UnsupportedError(
            f"KL({type(q).__name__}‖{type(p).__name__}) is infinite: p has no density, and puts no "
            "mass where q has its own. Choose a prior with a density"
        )
