r"""Every penalty is the KL to a prior, or is not: solve for it.

After Wolinski, Charpiat & Ollivier (2020), "Interpreting a penalty as the influence of a Bayesian
prior".

A family of densities β_{μ,ν}(θ) = β_{0,ν}(θ − μ) is trained with a penalty r_ν(μ) in the loss. Then
r = KL(β‖α) + const for a prior α if and only if condition (★) holds:

    A_ν = −Ent(β_{0,ν}) − 𝓕⁻¹[𝓕r_ν / 𝓕β̌_{0,ν}]     doesn't depend on ν,  and  ∫e^A < ∞

and α = e^A/∫e^A. For Gaussians the division of Fourier transforms is the heat flow backwards
(`credo.priors.penalty.heat_flow`), for the Dirac family A = −r. Wolinski, Charpiat and Ollivier,
*An Equivalence between Bayesian Priors and Penalties in Variational Inference* (their A_ν lacks the
reflection β̌(θ) = β(−θ), which matters for asymmetric β; their corollary has a and b exchanged).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.polynomial import Polynomial

from credo.checks import Count, Positive, checked, positive
from credo.errors import DataError, UnsupportedError
from credo.families import Delta, DiagGaussian, Family, FixedGaussian, Gaussian
from credo.priors.penalty.conclusion import NoPrior, conclude, sigma_dependent
from credo.priors.penalty.deconvolution import Deconvolution, fitted_polynomial
from credo.priors.penalty.domain import Domain, find_domain
from credo.priors.penalty.exact import ExactLogDensity, as_numbers, read_expression, solve_exactly
from credo.priors.penalty.heat_flow import Array, polynomial_flow
from credo.priors.penalty.penalty_input import (
    Samples,
    as_function,
    check_deconvolvable,
    energy_of,
    is_expression,
    sample_function,
    sample_table,
)
from credo.priors.penalty.tabulated import RadialTabulated, Tabulated
from credo.types import Prior

FamilyName: TypeAlias = Literal["gaussian", "dirac"]

_BLUR = 1e-2

_GROWTH = 3.0
"""How much more than before A may change when the cut-off is doubled again, and still settle."""


@dataclass(frozen=True, eq=False)
class Solution:
    """What `from_penalty` found on its way: A_ν (m, n) for each of the ``sigmas`` at ``points``.

    ``outcome`` is the prior or a `NoPrior`. σ = 0 is the Dirac family. Points are radii where the
    penalty is one of the radius. There are none where the penalty has no finite integral.
    """

    outcome: Prior | NoPrior
    points: Array
    sigmas: tuple[float, ...]
    curves: Array


@checked
def from_penalty(
    r: Any,
    family: FamilyName | type[Family] | Family = "gaussian",
    *,
    sigma: Positive | None = None,
    sigmas: Sequence[float] | None = None,
    dim: Count = 1,
) -> Prior | NoPrior:
    """The prior whose KL the penalty is, up to a constant; or `NoPrior`, with the evidence.

    ``r`` is the penalty of ONE weight (the loss has its sum over weights), in nats and not divided
    by the number of data. Unless it is exact, it is solved as accurately as it is given: undoing an
    average multiplies rounding errors by up to e²⁰. It may be

    - a function r(mu, sigma), written for numpy or torch, or r(mu);
    - a sympy expression in the symbols mu and sigma: solved exactly, for all σ, where it is made of
      powers, exponentials, sines and cosines;
    - a pair (points, values) of an even grid, with a row of values for each of the ``sigmas``.

    ``family`` is what is trained: "gaussian" (or `DiagGaussian`) means N(μ, σ²) with σ trained too,
    and (★) is tested at ``sigmas``, chosen to fit if not given. With ``sigma=`` it is fixed.
    "dirac" (or `Delta`) is a point estimate. ``dim`` > 1 makes r a function of the radius ‖μ‖ of a
    group of ``dim`` weights: exact for polynomials in ‖μ‖², numerical in two and three dimensions.

    Weight decay on the means of Gaussians is not a prior's, unless the penalty has σ in it too:

    >>> print(from_penalty(lambda mu, sigma: 2 * mu**2, sigmas=[0.1**0.5, 0.5**0.5]))
    no prior: A depends on σ, which is trained (sigma = 0.3162, 0.7071; A_at_0 = -0.06765, -0.07236;
    spread = 0.004719)
    >>> import numpy as np
    >>> from_penalty(lambda mu, sigma: 2 * (mu**2 + sigma**2) - np.log(sigma))
    Normal(scale=0.5, mean=0.0)
    >>> from_penalty(lambda mu: 2 * mu**2, "dirac"), from_penalty(np.abs, "dirac")
    (Normal(scale=0.5, mean=0.0), Laplace(scale=1.414...))
    >>> from_penalty(np.abs).reason
    'the penalty is no average over the family: undoing one blows up'

    Args:
        r: The penalty of one weight: a function, a sympy expression, or points and values.
        family: The distribution that is trained: "gaussian", "dirac", or a family.
        sigma: The family's standard deviation, if it is fixed.
        sigmas: Standard deviations at which one that is trained is tested, two or more.
        dim: How many weights make a group whose radius r is a function of.
    """
    return solve_penalty(r, family, sigma=sigma, sigmas=sigmas, dim=dim).outcome


@checked
def solve_penalty(
    r: Any,
    family: FamilyName | type[Family] | Family = "gaussian",
    *,
    sigma: Positive | None = None,
    sigmas: Sequence[float] | None = None,
    dim: Count = 1,
) -> Solution:
    """`from_penalty` with its working: the A_ν that decide."""
    chosen = _chosen_sigmas(family, sigma, sigmas)
    if is_expression(r):
        expression, mu, symbol = read_expression(r)
        exact = solve_exactly(expression, mu, symbol, dim) if chosen != (0.0,) else None
        if exact is not None:
            return _solve_formula(exact, chosen, dim)
        r = as_numbers(expression, mu, symbol)
    if callable(r):
        samples, domain = sample_function(energy_of(as_function(r), dim), chosen, dim)
        return _solve_samples(samples) if samples else _not_normalisable(domain)
    if not isinstance(r, tuple | list) or len(r) != 2:
        raise DataError(
            "a penalty is a function r(mu, sigma), a sympy expression in mu and sigma, or a pair "
            f"(points, values), not {type(r).__name__}"
        )
    if chosen is None:
        raise DataError("a table of a penalty needs the sigmas= of its rows, or one fixed sigma=")
    points, values = r
    return _solve_samples(sample_table(points, values, chosen, dim))


def _chosen_sigmas(
    family: Any, sigma: float | None, sigmas: Sequence[float] | None
) -> tuple[float, ...] | None:
    """(0,) for Dirac, one for a fixed scale, several to test a trained one; None: to be chosen."""
    kind = family if isinstance(family, type) else type(family)
    name = family if isinstance(family, str) else kind.__name__
    if sigma is not None and sigmas is not None:
        raise DataError("give sigma= for a fixed scale or sigmas= to test a trained one, not both")
    if family == "dirac" or kind is Delta:
        if sigma is not None or sigmas is not None:
            raise DataError("the Dirac family has no σ: leave sigma= and sigmas= out")
        return (0.0,)
    if family != "gaussian" and kind is not DiagGaussian and kind is not FixedGaussian:
        if isinstance(kind, type) and issubclass(kind, Gaussian):
            why = "it correlates weights, and a penalty of one weight says nothing of that"
        else:
            why = "moving its members doesn't give members: it is not translation invariant"
        raise UnsupportedError(
            f"no prior is solved for with {name}: {why}. Families that serve are "
            '"gaussian" (DiagGaussian) and "dirac" (Delta)'
        )
    if sigma is not None:
        return (float(sigma),)
    if kind is FixedGaussian:
        raise DataError("FixedGaussian has a fixed σ: give it as sigma=")
    if sigmas is None:
        return None
    if len({positive("every sigma", float(s)) for s in sigmas}) < 2:
        raise DataError(
            f"whether A depends on σ takes at least two different sigmas, got {list(sigmas)}; "
            "for a fixed one say sigma="
        )
    return tuple(float(s) for s in sigmas)


def _not_normalisable(domain: Domain) -> Solution:
    evidence = {"rises_far_out": domain.rises}
    none = NoPrior("e^A has no finite integral: the penalty doesn't rise enough", evidence)
    return Solution(none, np.empty(0), (), np.empty((0, 0)))


def _solve_formula(exact: ExactLogDensity, chosen: tuple[float, ...] | None, dim: int) -> Solution:
    """(★) from a formula for A_ν."""
    finest = min(chosen) if chosen else 1 / 32
    domain = find_domain(lambda mu: -exact(mu, finest), dim)
    if chosen is None:
        chosen = tuple(domain.length * part for part in (1 / 32, 1 / 4, 1 / 2))
    trained = len(chosen) > 1
    if not domain.normalisable and not (trained and exact.depends_on_sigma):
        return _not_normalisable(domain)
    line = np.linspace(-domain.reach, domain.reach, 2049) + domain.centre
    points = line if dim == 1 else line[1024:]
    curves = np.stack([exact(points, sigma) for sigma in chosen])
    if trained and exact.depends_on_sigma:
        spread = float(np.ptp(curves, axis=0).max())
        outcome: Prior | NoPrior = sigma_dependent(points, chosen, curves, spread)
    else:
        outcome = conclude(points, curves[0], {0.0: -curves[0]}, dim, 1e-9, is_table=False)
    return Solution(outcome, points, chosen, curves)


def _solve_samples(samples: Samples) -> Solution:
    """(★) from numbers: the Dirac family at once, polynomials exactly, others by deconvolution."""
    if samples.sigmas == (0.0,):
        curves, keep = -np.stack(samples.lines), np.full(len(samples.x), True)
        return _finish(samples, curves, keep, 0.0)
    lines = samples.lines
    polynomials = [fitted_polynomial(samples.x, line, samples.dim) for line in lines]
    if all(polynomial is not None for polynomial in polynomials):
        margin = 0.0 if samples.is_table else samples.margin
        keep = np.abs(samples.x) <= np.abs(samples.x).max() - margin
        curves = np.stack(
            [
                -Polynomial(polynomial_flow(polynomial, -(sigma**2), samples.dim))(samples.x[keep])
                for polynomial, sigma in zip(polynomials, samples.sigmas, strict=True)
                if polynomial is not None
            ]
        )
        return _finish(samples, curves, keep, float(np.ptp(curves, axis=0).max()))
    check_deconvolvable(samples)
    return _solve_by_deconvolution(samples)


def _solve_by_deconvolution(samples: Samples) -> Solution:
    cutoff, tolerance = samples.precision
    undone = [
        Deconvolution.of(samples.x, energy, sigma, samples.margin, samples.dim)
        for energy, sigma in zip(samples.energies, samples.sigmas, strict=True)
    ]
    finest = undone[0]
    keep = finest.inside
    inside = [line[keep] for line in samples.lines]
    curves = -np.stack([each.at(0.0, cutoff) for each in undone])
    by_cutoff = [-finest.at(0.0, cutoff / 4), -finest.at(0.0, cutoff / 2), curves[0]]
    residual = float(np.abs(finest.at(finest.sigma**2, cutoff) - inside[0]).max())
    first, second = (float(np.abs(after - before).max()) for before, after in pairwise(by_cutoff))
    allowed = tolerance * max(1.0, float(np.ptp(inside[0])))
    if residual > allowed or second > max(allowed, _GROWTH * first):
        evidence: dict[str, float | tuple[float, ...]] = {
            "cutoff": (cutoff / 4, cutoff / 2, cutoff),
            "max_abs_A": tuple(float(np.abs(curve).max()) for curve in by_cutoff),
            "changes": (first, second),
            "residual": residual,
        }
        none = NoPrior("the penalty is no average over the family: undoing one blows up", evidence)
        return _solution(samples, keep, curves, none)
    # A_ν is known up to a highest frequency, another for every ν. Averaged over the ν-th Gaussian
    # all are equally sharp, so the A of the smallest ν must give back every other penalty.
    spread = max(
        float(np.abs(finest.at(sigma**2, cutoff) - line).max())
        for sigma, line in zip(samples.sigmas, inside, strict=True)
    )
    solution = _finish(samples, curves, keep, spread)
    if isinstance(solution.outcome, Tabulated | RadialTabulated):
        _warn_of_blur(samples, by_cutoff[1][_side(samples, keep)], solution)
    return solution


def _warn_of_blur(samples: Samples, blurred: Array, solution: Solution) -> None:
    """Say so if the prior is finer than the penalty can tell."""
    weight = np.abs(solution.points) ** (samples.dim - 1)
    sharp, blunt = (weight * np.exp(curve - curve.max()) for curve in (solution.curves[0], blurred))
    distance = 0.5 * float(np.abs(sharp / sharp.sum() - blunt / blunt.sum()).sum())
    if distance > _BLUR:
        warnings.warn(
            f"at σ = {samples.sigmas[0]:.4g} the penalty tells nothing of the prior below lengths "
            f"of about {samples.sigmas[0] / 6:.2g}, and the prior has such features: its table is "
            f"off by up to {distance:.2g} in total variation. Give the penalty at a smaller σ",
            stacklevel=6,
        )


def _finish(samples: Samples, curves: Array, keep: Array, spread: float) -> Solution:
    """Independence of ν, then the prior."""
    tolerance = samples.precision[1]
    inside = [line[keep] for line in samples.lines]
    if spread > tolerance * max(1.0, float(np.ptp(inside[0]))):
        points = samples.x[keep] + samples.centre
        return _solution(
            samples, keep, curves, sigma_dependent(points, samples.sigmas, curves, spread)
        )
    side = _side(samples, keep)
    points = samples.x[keep][side] + samples.centre
    averages: Mapping[float, Array] = {
        sigma: line[side] for sigma, line in zip(samples.sigmas, inside, strict=True)
    }
    outcome = conclude(points, curves[0][side], averages, samples.dim, tolerance, samples.is_table)
    return _solution(samples, keep, curves, outcome)


def _solution(samples: Samples, keep: Array, curves: Array, outcome: Prior | NoPrior) -> Solution:
    side = _side(samples, keep)
    points = samples.x[keep][side] + samples.centre
    return Solution(outcome, points, samples.sigmas, curves[:, side])


def _side(samples: Samples, keep: Array) -> slice:
    """Of the points kept, those that are radii; all of them on a line."""
    return slice(int((samples.x[keep] < 0).sum()) if samples.dim > 1 else 0, None)
