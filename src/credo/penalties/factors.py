"""Each layer's share λ_ℓ of a penalty, from its fan-in and the size of its groups of weights."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from credo.checks import NotNegative, check
from credo.errors import DataError
from credo.network import select
from credo.network.selection import is_norm
from credo.priors.elastic_net import elastic_rate
from credo.priors.group import GroupLayout, Side
from credo.types import Segment

Kind = Literal["l2", "l1", "group_lasso", "group_lasso_transposed", "elastic_net"]
KINDS: tuple[Kind, ...] = get_args(Kind)

GROUPS: dict[str, Side] = {"group_lasso": "incoming", "group_lasso_transposed": "outgoing"}
"""The kinds that penalise groups, and what makes a group."""

Factors: TypeAlias = Literal["bayesian", "usual"] | Mapping[str, float]
Table: TypeAlias = tuple[tuple[str, float], ...]

Weights: TypeAlias = str | Sequence[str] | None
"""None for all matrices and kernels but those of norm layers, or names and globs over names."""


def penalised(segments: Iterable[Segment], weights: Weights) -> list[Segment]:
    """The segments that a penalty is for."""
    everything = list(segments)
    if weights is not None:
        return list(select(everything, weights).segments)
    chosen = [s for s in everything if len(s.shape) >= 2 and not is_norm(s)]
    if not chosen:
        raise DataError(
            "there is no weight to penalise: matrices and kernels of layers other than norms are, "
            f"if they are trainable, and there are {[s.name for s in everything]}. Name others by "
            "weights="
        )
    return chosen


def factor(
    kind: Kind,
    segment: Segment,
    rule: Literal["bayesian", "usual"] | Table,
    gain: float,
    l1_ratio: float,
) -> float:
    """λ_ℓ of one tensor."""
    size = GroupLayout.of(segment, GROUPS[kind]).size if kind in GROUPS else 1
    if isinstance(rule, tuple):
        return _entry(segment, rule)
    if rule == "usual":
        return math.sqrt(size)
    if segment.fan_in == 0:
        return 0.0
    if kind == "l2":
        return segment.fan_in / (2 * gain**2)
    if kind == "elastic_net":
        return elastic_rate(gain / math.sqrt(segment.fan_in), l1_ratio)
    return math.sqrt((size + 1) * segment.fan_in) / gain


def as_table(factors: Factors | Table) -> Literal["bayesian", "usual"] | Table:
    """The factors with a mapping turned into pairs, whose order counts, after a check of them."""
    if isinstance(factors, str):
        return factors
    pairs = list(factors.items() if isinstance(factors, Mapping) else factors)
    for name, value in pairs:
        check(f"the factor of {name!r}", value, NotNegative)
    return tuple((str(name), float(value)) for name, value in pairs)


def _entry(segment: Segment, table: Table) -> float:
    """A name wins over a glob, an earlier glob over a later one."""
    for name, value in table:
        if name in (segment.layer, segment.name):
            return value
    for name, value in table:
        if fnmatch.fnmatchcase(segment.name, name):
            return value
    raise DataError(
        f"no factor is given for {segment.name!r} of layer {segment.layer!r}, only for "
        f"{[name for name, _ in table]}; add one (0 leaves it alone), or '*' for all others"
    )
