r"""Settings that know the network: what an optimizer starts from when it is not told.

A weight of fan-in d lives on the scale √(2/d) (He et al., 2015), so one prior for all layers is
too wide for some and too narrow for others, and a first noise that is not well below a layer's
scale drowns the signal before anything was learned. Unless the user says otherwise,

    p_ℓ = d_ℓ/2                     the prior precision of layer ℓ
    τ   = min(1, 0.3·n/P)           `credo.Balanced`, as for the methods
    h₀  = p_ℓ/(c²N) − p/N           the first noise is c = 0.1 of the layer's scale, N = n/τ

whatever the network's depth and width; the first noise also where the prior is the user's own and
wider (a narrower one takes the layer's place). The runs that chose these numbers are in
docs/concepts/optimizers.md.

Reference: why temperature and prior have to know the network, Huix et al., 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from credo.network import parameters_of
from credo.priors.scales import Kaiming
from credo.types import Segment

FIRST_NOISE = 0.1
"""c: the first noise as a share of the layer's scale."""

CLIP_RADIUS = 0.01
"""Natural gradients beyond it are cut: with IVON's rate of 0.1 no weight moves by more than 1e-3
in a step, which is Adam's."""


def first_curvature(delta: float, layer_delta: float, noise: float = FIRST_NOISE) -> float:
    """h₀ at which the first noise is a share of the layer's scale, or of a narrower prior's.

    >>> h = first_curvature(delta=0.04, layer_delta=0.01, noise=0.1)
    >>> round((0.04 / (h + 0.04)) ** 0.5, 6)
    0.1

    Args:
        delta: δ = p/N of the prior.
        layer_delta: The same of a prior as wide as the layer's weights.
        noise: The share.
    """
    return max(delta, layer_delta) / noise**2 - delta


def layer_precisions(parameters: Sequence[Tensor], module: nn.Module | None) -> list[float]:
    """1/variance d/2 at which a layer's weights live, for each parameter; d is the fan-in.

    Layers are those of ``module``. Of a parameter that comes alone only the shape is known: a
    matrix is read as a layer's (out, in, …), and a vector as the bias of the matrix before it, if
    that has as many rows.
    """
    known: dict[int, Segment] = {}
    if module is not None:
        known = {id(parameter): segment for segment, parameter in parameters_of(module)}
    rule, found = Kaiming(), []
    matrix: Segment | None = None
    for parameter in parameters:
        segment = known.get(id(parameter)) or _by_shape(parameter, matrix)
        matrix = segment if len(segment.shape) > 1 else matrix
        found.append(rule.scale(segment) ** -2)
    return found


def _by_shape(parameter: Tensor, matrix: Segment | None) -> Segment:
    shape = tuple(parameter.shape)
    size = parameter.numel()
    if len(shape) > 1:
        fan_in = math.prod(shape[1:])
    elif matrix is not None and matrix.shape[0] == size:
        fan_in = matrix.fan_in
    else:
        fan_in = size
    return Segment("", shape, 0, size, max(1, fan_in), max(1, size), "", "")
