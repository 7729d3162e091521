r"""What the learning rule asks of every Gaussian N(m, S⁻¹), whatever the structure of S.

    λ = (Sm, −½S)        μ = (m, S⁻¹ + mmᵀ)

The rule in Gaussian form touches S in two ways only: it mixes curvature into it (`absorb`), and it
solves with it (``q.solve``). A structure that is not closed under addition projects the mixture
back onto itself, and says how beside its registration here.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from torch import Tensor

from credo.errors import DataError, UnsupportedError
from credo.families import Gaussian
from credo.rule.families.exponential import parameter_names

NATURAL_NAMES = ("precision times mean", "minus half the precision")
EXPECTATION_NAMES = ("mean", "second moment")


@parameter_names.register
def _(q: Gaussian) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return NATURAL_NAMES, EXPECTATION_NAMES


@singledispatch
def absorb(q: Gaussian, curvature: Any, keep: float, gain: float) -> Any:
    """The same mean with precision keep·S + gain·H, projected onto the structure of S.

    A precision that is not positive definite is refused with a `DataError`.

    Args:
        q: A Gaussian.
        curvature: H, as (P,) for its diagonal, (P, P) symmetric, or in the factors of a family.
        keep: How much of S stays.
        gain: How much of H comes.
    """
    raise UnsupportedError(f"the learning rule has no step for the precision of a {_name(q)}")


@singledispatch
def absorb_positive(q: Gaussian, curvature: Any, rate: float, temperature: float = 1.0) -> Any:
    """The same mean with precision S + ρG + ½ρ²GS⁻¹G, where G = H − temperature·S.

    The second-order term is the Riemannian retraction of Lin, Schmidt & Khan (2020,
    arXiv:2002.10060): with R = S^½, S⁺ = ½R[I + (I + ρR⁻¹GR⁻¹)²]R is positive definite for
    any symmetric H and any rate.

    Args:
        q: A Gaussian.
        curvature: H, as in `absorb`.
        rate: ρ.
        temperature: How much of S is forgotten next to H.
    """
    raise UnsupportedError(f"the learning rule has no step for the precision of a {_name(q)}")


def check_dense_or_diagonal(q: Gaussian, curvature: Tensor) -> None:
    """Raise `DataError` unless a curvature is (P,) or (P, P).

    Args:
        q: The Gaussian that is to take it.
        curvature: H.
    """
    if curvature.shape not in ((q.size,), (q.size, q.size)):
        raise DataError(
            f"{_name(q)}: the curvature must be ({q.size},) or ({q.size}, {q.size}), got shape "
            f"{tuple(curvature.shape)}"
        )


def _name(q: object) -> str:
    return type(q).__name__
