"""A penalty as a setting, as a scalar for any training loop, and as a pull on a flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from credo.checks import NotNegative, Positive, checked, positive
from credo.errors import DataError, NonFiniteError
from credo.families.base import check_points
from credo.network import segments_of
from credo.packing import settings_of
from credo.penalties.factors import (
    GROUPS,
    Factors,
    Kind,
    Table,
    Weights,
    as_table,
    factor,
    penalised,
)
from credo.penalties.terms import Terms, differentiable
from credo.priors.elastic_net import Ratio
from credo.priors.group import GroupLayout
from credo.types import Json, Segment, Vector


@checked
@dataclass(frozen=True)
class Penalty:
    """λ Σ_ℓ λ_ℓ·r(θ_ℓ), added to a loss that is a MEAN over examples.

    Args:
        kind: r: "l2", "l1", "group_lasso", "group_lasso_transposed" or "elastic_net".
        lam: λ, a number, or "bayesian" for 1/num_data.
        factors: The λ_ℓ: "bayesian", "usual", or numbers by the names (or globs) of layers or
            weights.
        gain: Widens the prior that Bayesian factors stand for to the variance gain²/fan-in.
        l1_ratio: ρ, the elastic net's share of absolute values.
        weights: Names or globs of what is penalised; None for all matrices and kernels outside of
            norm layers.

    >>> Penalty("l1", lam=1e-4, factors={"*": 1.0}).config()["factors"]
    [['*', 1.0]]
    """

    kind: Kind
    lam: NotNegative | Literal["bayesian"] = "bayesian"
    factors: Factors | Table = "bayesian"
    gain: Positive = 1.0
    l1_ratio: Ratio = 0.5
    weights: Weights = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", as_table(self.factors))
        if self.weights is not None and not isinstance(self.weights, str):
            object.__setattr__(self, "weights", tuple(self.weights))

    def strength(self, num_data: int | None = None) -> float:
        """λ.

        Args:
            num_data: The number of training examples; needed for ``lam="bayesian"``.
        """
        if self.lam != "bayesian":
            return float(self.lam)
        if num_data is None:
            raise DataError(
                'lam="bayesian" is 1/num_data, and num_data is not given. It is the number of '
                "training examples, which can't be told from a batch or a network: pass num_data="
            )
        return 1 / positive("num_data", num_data)

    def coefficients(self, segments: Sequence[Segment]) -> list[float]:
        """λ_ℓ of each of these tensors.

        Args:
            segments: The tensors, as places in a flat vector.
        """
        rule = as_table(self.factors)
        return [factor(self.kind, s, rule, self.gain, self.l1_ratio) for s in segments]

    def terms(self, segments: Sequence[Segment], weight: float) -> Terms:
        """``weight`` Σ_ℓ λ_ℓ r(θ_ℓ) over these tensors.

        Args:
            segments: The tensors, as places in a flat vector.
            weight: What all of them are multiplied by.
        """
        scaled = tuple(weight * c for c in self.coefficients(segments))
        if self.kind == "l1":
            return Terms(absolute=scaled)
        if self.kind == "l2":
            return Terms(square=scaled)
        if self.kind == "elastic_net":
            rho = self.l1_ratio
            return Terms(tuple(rho * c for c in scaled), tuple((1 - rho) * c for c in scaled))
        layouts = tuple(GroupLayout.of(s, GROUPS[self.kind]) for s in segments)
        return Terms(norm=scaled, layouts=layouts)

    def value(self, net: nn.Module, num_data: int | None = None) -> Tensor:
        """The penalty of the network's weights: a scalar to add to a mean loss.

        Args:
            net: The network.
            num_data: The number of training examples; needed for ``lam="bayesian"``.

        >>> net = nn.Linear(2, 3)
        >>> _ = nn.init.ones_(net.weight)
        >>> Penalty("l2").value(net, num_data=100).item()         # (1/100)·(2/2)·6
        0.0600...
        """
        segments = penalised(segments_of(net), self.weights)
        weights: list[Tensor] = [net.get_parameter(s.name) for s in segments]
        total = differentiable(self.terms(segments, self.strength(num_data)), weights)
        if not bool(torch.isfinite(total.detach())):
            bad = [s.name for s, w in zip(segments, weights, strict=True) if not _finite(w)]
            where = f"the weights of {', '.join(bad[:5])} are not finite" if bad else "it overflows"
            raise NonFiniteError(
                f"the penalty {self.kind} is {float(total.detach())}: {where}. An earlier step "
                "diverged; lower the learning rate"
            )
        return total

    def on(self, segments: Sequence[Segment], like: Vector, num_data: int) -> FlatPenalty:
        """The penalty over a flat vector of these segments, in the order given.

        Those of them that are not penalised get no pull.

        Args:
            segments: The tensors that the vector is made of, one after the other.
            like: A vector whose dtype and device count.
            num_data: The number of training examples.
        """
        chosen = penalised(segments, self.weights)
        places, offset = {}, 0
        for segment in segments:
            places[segment.name] = slice(offset, offset + segment.size)
            offset += segment.size
        # −num_data·λ, like the logarithm of a prior.
        terms = self.terms(chosen, -num_data * self.strength(num_data))
        return FlatPenalty(terms, tuple((places[s.name], s.shape) for s in chosen), offset)

    def config(self) -> Json:
        """The settings, as JSON."""
        return settings_of(self)


@dataclass(frozen=True)
class FlatPenalty:
    """−num_data times a penalty of flat weights (P,): where a log-prior stands, this can too.

    It has no normaliser and no draws; where ``lam`` is 1/num_data and the factors are Bayesian,
    the priors of `credo.priors` have both.

    Args:
        terms: The penalty, times −num_data.
        places: Where in the vector each penalised tensor lies, and its shape.
        size: P, the number of weights.
    """

    terms: Terms
    places: tuple[tuple[slice, tuple[int, ...]], ...]
    size: int

    def log_prob(self, w: Vector) -> Tensor:
        """−num_data·λ Σ_ℓ λ_ℓ r(θ_ℓ): (P,) → ().

        Args:
            w: Weights, (P,).
        """
        return self.terms.value(self._tensors(w))

    def grad_log_prob(self, w: Vector) -> Tensor:
        """Its gradient, (P,).

        Args:
            w: Weights, (P,).
        """
        pull = torch.zeros_like(w)
        torch._foreach_copy_(self._tensors(pull), self.terms.gradients(self._tensors(w)))
        return pull

    def _tensors(self, w: Vector) -> list[Tensor]:
        check_points(w, self.size)
        return [w[place].view(shape) for place, shape in self.places]


def penalty(
    net: nn.Module,
    kind: Kind,
    lam: float | Literal["bayesian"] = "bayesian",
    *,
    num_data: int | None = None,
    factors: Factors = "bayesian",
    gain: float = 1.0,
    l1_ratio: float = 0.5,
    weights: Weights = None,
) -> Tensor:
    """λ Σ_ℓ λ_ℓ·r(θ_ℓ) of the network's weights, for a loss that is a mean over examples.

    A batch does not know ``num_data``, so ``lam="bayesian"`` needs to be told it. At a kink (a
    weight or group that is zero) the gradient is zero.

    Args:
        net: The network.
        kind: r: "l2", "l1", "group_lasso", "group_lasso_transposed" or "elastic_net".
        lam: λ, a number, or "bayesian" for 1/num_data.
        num_data: The number of training examples; needed for ``lam="bayesian"``.
        factors: The λ_ℓ: "bayesian", "usual", or numbers by the names (or globs) of layers or
            weights.
        gain: Widens the prior that Bayesian factors stand for to the variance gain²/fan-in.
        l1_ratio: ρ, the elastic net's share of absolute values.
        weights: Names or globs of what is penalised; None for all matrices and kernels outside of
            norm layers.

    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> penalty(net, "group_lasso", num_data=50_000).backward()
    >>> 50_000 * net[0].weight.grad[0].norm().item()               # √(8·9)
    8.485...
    """
    spec = Penalty(kind, lam, factors, gain, l1_ratio, weights)
    return spec.value(net, num_data)


def layer_factors(
    net: nn.Module,
    kind: Kind,
    factors: Factors = "bayesian",
    *,
    gain: float = 1.0,
    l1_ratio: float = 0.5,
    weights: Weights = None,
) -> dict[str, float]:
    """λ_ℓ of every penalised weight tensor by its name; the table is in `credo.penalties`.

    ``factors="bayesian"`` makes e^(−λ_ℓ r) a prior of variance gain²/fan-in; ``"usual"`` is what is
    common: 1, and for groups the root of their size. ``l1_ratio`` is for the elastic net alone.

    Args:
        net: The network.
        kind: r: "l2", "l1", "group_lasso", "group_lasso_transposed" or "elastic_net".
        factors: The λ_ℓ: "bayesian", "usual", or numbers by the names (or globs) of layers or
            weights.
        gain: Widens the prior that Bayesian factors stand for to the variance gain²/fan-in.
        l1_ratio: ρ, the elastic net's share of absolute values.
        weights: Names or globs of what is penalised; None for all matrices and kernels outside of
            norm layers.

    >>> net = nn.Sequential(nn.Conv2d(3, 16, 5), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16, 2))
    >>> layer_factors(net, "l2")
    {'0.weight': 37.5, '3.weight': 8.0}
    >>> layer_factors(net, "group_lasso_transposed", "usual")       # √(16·5²), √2
    {'0.weight': 20.0, '3.weight': 1.414...}
    """
    spec = Penalty(kind, factors=factors, gain=gain, l1_ratio=l1_ratio, weights=weights)
    segments = penalised(segments_of(net), weights)
    return {s.name: c for s, c in zip(segments, spec.coefficients(segments), strict=True)}


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
