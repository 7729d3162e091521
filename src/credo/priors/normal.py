"""Normal priors: isotropic, or with a scale read off each layer's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from credo.checks import Finite, checked
from credo.errors import UnsupportedError
from credo.families import DiagGaussian
from credo.network import Selection
from credo.priors.scales import (
    FanIn,
    Glorot,
    Kaiming,
    PerLayer,
    PriorRule,
    Scale,
    flat_scales,
)
from credo.types import FlatDistribution, Segment, Vector


@checked
@dataclass(frozen=True)
class Normal(PriorRule):
    """Independent N(mean, scale²) on every weight: ``scale`` is a standard deviation.

    ``scale`` is a number or a rule; the constructors below name the rules. A bias takes the fans of
    its layer. A scale shared by all weights takes no memory.

    Weight decay λ (a loss with ½λ‖w‖² per example, n examples) is Normal(scale=1/√(nλ)).

    Args:
        scale: The standard deviation: a number, or a rule of `credo.priors.scales`.
        mean: The mean of every weight.

    >>> import torch
    >>> layer = Segment("weight", (3, 4), 0, 12, fan_in=4, fan_out=3, layer="", layer_type="Linear")
    >>> Normal(scale=2.0).on([layer], like=torch.zeros(12)).variance[:2]
    tensor([4., 4.])
    >>> Normal.fan_in().on([layer], like=torch.zeros(12)).scale[:2]
    tensor([0.5000, 0.5000])
    """

    scale: Scale = 1.0
    mean: Finite = 0.0

    @classmethod
    def fan_in(cls, gain: float = 1.0) -> Self:
        """Variance gain²/fan_in.

        Args:
            gain: The standard deviation, times √fan_in.
        """
        return cls(FanIn(gain))

    @classmethod
    def glorot(cls) -> Self:
        """Variance 2/(fan_in + fan_out) (Glorot and Bengio, 2010)."""
        return cls(Glorot())

    @classmethod
    def kaiming(cls, a: float = 0.0) -> Self:
        """Variance 2/((1 + a²)·fan_in), ``a`` the negative slope of the activation (He, 2015).

        ReLU has a = 0. Book's thesis writes a = 1, which shrinks signals layer by layer.

        Args:
            a: The activation's slope below zero.
        """
        return cls(Kaiming(a))

    @classmethod
    def per_layer(cls, scales: Mapping[str, float], default: float | None = None) -> Self:
        """A scale for each layer name, parameter name or glob over parameter names.

        Exact names win over globs, earlier globs over later ones. Without a ``default``, a
        parameter that nothing matches is an error.

        Args:
            scales: Standard deviations by name or glob.
            default: That of parameters which no name or glob matches.

        >>> prior = Normal.per_layer({"head": 0.1, "*.bias": 10.0}, default=1.0)
        """
        return cls(PerLayer(tuple(scales.items()), default))

    def on(self, segments: Sequence[Segment], like: Vector) -> DiagGaussian:
        """The Gaussian over these segments, one after the other."""
        scale = flat_scales(self.scale, segments, like)
        return DiagGaussian(like.new_full((), self.mean), scale)


def gaussian_around_zero(prior: FlatDistribution, method: str) -> DiagGaussian:
    """The prior, if it is what methods that know its pull and curvature take."""
    if isinstance(prior, DiagGaussian) and not bool(prior.mean.any()):
        return prior
    raise UnsupportedError(
        f"{method} takes a Gaussian prior around zero, whose pull and curvature it knows; this one "
        f"is a {type(prior).__name__}. Use credo.priors.Normal, or VI, which takes any prior"
    )


def precision_of_segments(prior: DiagGaussian, selection: Selection) -> list[float]:
    """The prior precision of each parameter tensor, which must be one number."""
    of_tensors = []
    for name, place in selection.slices().items():
        precisions = prior.precision[place]
        first = float(precisions[0])
        if not bool((precisions == first).all()):
            raise UnsupportedError(
                f"the prior gives the weights of {name} different scales; this method takes one "
                "for each tensor, as credo.priors.Normal makes them. VI takes any prior"
            )
        of_tensors.append(first)
    return of_tensors
