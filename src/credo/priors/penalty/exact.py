r"""Penalties given as sympy expressions, solved exactly where they are exponential polynomials.

    exp(−½σ²∂²)[μ^k e^{aμ}] = e^{aμ − σ²a²/2} · σ^k He_k((μ − σ²a)/σ)

covers polynomials, sines, cosines, hyperbolic functions and their products; a may be complex. So
A_ν is a formula, and whether it depends on σ is asked of the formula, for all σ at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from credo.errors import DataError
from credo.priors.penalty.heat_flow import Array


def _sympy() -> Any:
    """Imported when an expression is given: it comes with torch, and is slow to import."""
    import sympy  # type: ignore[import-untyped]

    return sympy


@dataclass(frozen=True)
class ExactLogDensity:
    """A_ν(μ) as a formula in the symbols ``mu`` and ``sigma``."""

    formula: Any
    mu: Any
    sigma: Any

    def __call__(self, mu: Array, sigma: float) -> Array:
        """A_σ at these points."""
        return as_numbers(self.formula, self.mu, self.sigma)(mu, sigma)

    @cached_property
    def depends_on_sigma(self) -> bool:
        """Whether ∂A/∂σ is anything but zero, to 40 digits at points nobody would choose."""
        number = _sympy().Float
        slope = self.formula.diff(self.sigma)
        places = [("0.3137", "0.4142"), ("-1.7321", "1.3103"), ("2.2361", "0.0917")]
        for mu, sigma in places:
            at = {self.mu: number(mu, 50), self.sigma: number(sigma, 50)}
            if abs(slope.evalf(40, subs=at)) > 1e-25:
                return True
        return False


def read_expression(r: Any) -> tuple[Any, Any, Any]:
    """The expression over a real μ and a positive σ, and those two symbols."""
    sympy = _sympy()

    mu, sigma = sympy.Symbol("mu", real=True), sympy.Symbol("sigma", positive=True)
    if not isinstance(r, sympy.Expr):
        raise DataError(f"the penalty must be an expression, but {r} is {type(r).__name__}")
    unknown = sorted(symbol.name for symbol in r.free_symbols if symbol.name not in ("mu", "sigma"))
    if unknown:
        raise DataError(
            f"the penalty {r} has the symbols {unknown}; only mu and sigma may be left open. "
            "Put in numbers for the others with .subs"
        )
    return r.subs({s: mu if s.name == "mu" else sigma for s in r.free_symbols}), mu, sigma


def as_numbers(expression: Any, mu: Any, sigma: Any) -> Any:
    """The expression as a function of (array, σ)."""
    sympy = _sympy()

    function = sympy.lambdify((mu, sigma), expression, ["scipy", "numpy"])
    return lambda points, at: np.broadcast_to(np.real(function(points, at)), np.shape(points))


def solve_exactly(expression: Any, mu: Any, sigma: Any, dim: int = 1) -> ExactLogDensity | None:
    """A_ν, or None if the expression is not an exponential polynomial in μ.

    In several dimensions, where mu is the radius, only even powers are exact.

    >>> import sympy
    >>> r, mu, sigma = read_expression(sympy.sympify("mu**4"))
    >>> sympy.expand(solve_exactly(r, mu, sigma).formula + sympy.log(sigma)).coeff(mu, 2)
    6*sigma**2
    """
    sympy = _sympy()

    entropy = dim * (sympy.log(2 * sympy.pi * sympy.E) / 2 + sympy.log(sigma))
    flown = sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(expression.rewrite(sympy.exp))):
        coefficient, powers = sympy.powsimp(term, force=True, combine="exp").as_independent(
            mu, as_Add=False
        )
        parts = _power_and_rate(powers, mu)
        if parts is None:
            return None
        power, rate, constant = parts
        if dim > 1 and (rate != 0 or power % 2):
            return None
        shifted = mu - sigma**2 * rate
        growth = sympy.exp(rate * mu + constant - sigma**2 * rate**2 / 2)
        flown += coefficient * growth * _flown_power(shifted, power, sigma**2, dim)
    return ExactLogDensity(-entropy - flown, mu, sigma)


def _power_and_rate(powers: Any, mu: Any) -> tuple[int, Any, Any] | None:
    """k, a and b of μ^k e^{aμ+b}, if that is what this is."""
    sympy = _sympy()

    power, rate, constant = 0, sympy.Integer(0), sympy.Integer(0)
    for factor in sympy.Mul.make_args(powers):
        if isinstance(factor, sympy.exp):
            exponent = sympy.Poly(factor.args[0], mu) if factor.args[0].is_polynomial(mu) else None
            if exponent is None or exponent.degree() > 1:
                return None
            rate += exponent.coeff_monomial(mu)
            constant += exponent.coeff_monomial(1)
            continue
        base, exponent = factor.as_base_exp()
        if factor == 1:
            continue
        if base != mu or not exponent.is_Integer or exponent < 0:
            return None
        power += int(exponent)
    return power, rate, constant


def _flown_power(base: Any, power: int, variance: Any, dim: int) -> Any:
    """exp(−½·variance·Δ) of base^power: σ^k He_k(base/σ) in one dimension."""
    sympy = _sympy()

    total, coefficient = sympy.Integer(0), sympy.Integer(1)
    for order, left in enumerate(range(power, -1, -2)):
        total += coefficient * base**left
        coefficient *= -variance * left * (left + dim - 2) / (2 * (order + 1))
    return total
