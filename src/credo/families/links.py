"""Links σ = link(ρ) from an unconstrained ρ to a standard deviation σ > 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from credo.errors import UnsupportedError

LinkName: TypeAlias = Literal["exp", "softplus"]


@dataclass(frozen=True)
class Link:
    """A smooth increasing map from the real line onto the positive numbers.

    ``forward`` is ρ ↦ σ, ``inverse`` is σ ↦ ρ, and ``derivative`` is ρ ↦ dσ/dρ; all elementwise.
    """

    name: LinkName
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _softplus(rho: Tensor) -> Tensor:
    # torch's default threshold of 20 drops e⁻ᵖ while it still shows in float64; at 40 it doesn't,
    # and e⁴⁰ is far from overflowing even float32.
    return functional.softplus(rho, threshold=40.0)


def _softplus_inverse(sigma: Tensor) -> Tensor:
    # ln(e^σ − 1) would overflow for large σ and cancel for small σ.
    return sigma + torch.log(-torch.expm1(-sigma))


EXP = Link("exp", forward=torch.exp, inverse=torch.log, derivative=torch.exp)
"""σ = e^ρ: the cheapest link, and ρ is log σ."""

SOFTPLUS = Link("softplus", forward=_softplus, inverse=_softplus_inverse, derivative=torch.sigmoid)
"""σ = ln(1 + e^ρ): like exp for small σ, linear for large."""

LINKS: dict[str, Link] = {link.name: link for link in (EXP, SOFTPLUS)}


def by_name(name: str) -> Link:
    """The link called ``name``.

    >>> by_name("softplus").forward(torch.tensor(-10.0))      # Book's initial σ
    tensor(4.5399e-05)
    """
    if name not in LINKS:
        raise UnsupportedError(f"no link is called {name!r}; choose one of {sorted(LINKS)}")
    return LINKS[name]
