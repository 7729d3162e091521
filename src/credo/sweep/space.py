r"""What a sweep searches: a named set of parameters, each with a distribution.

A parameter is its quantile function Q, from u in [0, 1] to a value. So one definition serves random
search (u uniform), grids (u evenly spaced) and samplers that learn (they propose u):

================= ================================== ====================================
parameter         Q(u)                               JSON
================= ================================== ====================================
`Uniform`         low + u·(high − low)               {"uniform": [low, high]}
`LogUniform`      low·(high/low)^u                   {"loguniform": [low, high]}
`TruncatedNormal` that of the normal between bounds  {"normal": [mean, scale, low, high]}
`Choice`          one of the options, all alike      {"choice": [option, …]}
================= ================================== ====================================

Normals are always truncated: Book (2020) draws momenta from N(v, (v/2)²), of which 41 % exceed 1
for v = 0.9, so that its success rates are partly those of impossible settings.

    >>> import torch
    >>> space = Space({"lr": LogUniform(1e-4, 1e-1), "optimizer": Choice(("adam", "sgd"))})
    >>> sorted(space.sample(torch.Generator().manual_seed(0)))
    ['lr', 'optimizer']
    >>> [(p["optimizer"], round(p["lr"], 6)) for p in space.grid(2)]
    [('adam', 0.0001), ('sgd', 0.0001), ('adam', 0.1), ('sgd', 0.1)]
    >>> Space.from_json(space.to_json()) == space
    True
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Generator

from credo.checks import Count, Finite, Positive, checked, finite
from credo.errors import DataError
from credo.types import Json

Option: TypeAlias = str | int | float | bool | None


class Parameter(ABC):
    """One axis of a space."""

    @abstractmethod
    def at(self, u: float) -> Any:
        """The value at a quantile.

        Args:
            u: From 0 to 1.
        """

    @abstractmethod
    def to_json(self) -> Json:
        """The table's JSON."""

    def grid(self, n: int) -> list[Any]:
        """Values from the lowest to the highest; the median alone for one.

        Args:
            n: How many.
        """
        return [self.at(0.5 if n == 1 else k / (n - 1)) for k in range(n)]


@checked
@dataclass(frozen=True)
class Uniform(Parameter):
    """Any value between two bounds.

    Args:
        low: The least value.
        high: The largest value.

    >>> Uniform(-1, 3).at(0.25)
    0.0
    """

    low: Finite
    high: Finite

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def at(self, u: float) -> float:
        """On the line from low to high."""
        return float(min(self.high, max(self.low, self.low * (1 - u) + self.high * u)))

    def to_json(self) -> Json:
        """{"uniform": [low, high]}."""
        return {"uniform": [self.low, self.high]}


@checked
@dataclass(frozen=True)
class LogUniform(Parameter):
    """A positive value whose logarithm is uniform: for rates and other scales.

    Args:
        low: The least value, positive.
        high: The largest value.

    >>> round(LogUniform(1e-4, 1e-2).at(0.5), 6)
    0.001
    """

    low: Positive
    high: Positive

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def at(self, u: float) -> float:
        """On the line from ln low to ln high."""
        value = math.exp(math.log(self.low) * (1 - u) + math.log(self.high) * u)
        return min(self.high, max(self.low, value))

    def to_json(self) -> Json:
        """{"loguniform": [low, high]}."""
        return {"loguniform": [self.low, self.high]}


@checked
@dataclass(frozen=True)
class TruncatedNormal(Parameter):
    """N(mean, scale²) given that it lies between two bounds.

    Args:
        mean: Of the normal.
        scale: Its standard deviation.
        low: The least value.
        high: The largest value.

    >>> TruncatedNormal(0.9, 0.45, low=0.0, high=0.999).at(1.0)
    0.999
    """

    mean: Finite
    scale: Positive
    low: Finite
    high: Finite

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def at(self, u: float) -> float:
        """The quantile of the truncated distribution."""
        # Imported here because it takes a second, which workers that draw nothing need not wait.
        from scipy import stats

        low, high = ((bound - self.mean) / self.scale for bound in (self.low, self.high))
        value = float(stats.truncnorm.ppf(u, low, high, loc=self.mean, scale=self.scale))
        if not math.isfinite(value):
            # The bounds lie so far out in one tail that the mass between them is not a number;
            # there the density falls within a hair of the nearer bound.
            value = self.low if self.low > self.mean else self.high
        return min(self.high, max(self.low, value))

    def to_json(self) -> Json:
        """{"normal": [mean, scale, low, high]}."""
        return {"normal": [self.mean, self.scale, self.low, self.high]}


@dataclass(frozen=True)
class Choice(Parameter):
    """One of a few options.

    Args:
        options: Strings, numbers, truth values or None.

    >>> Choice(("adam", "sgd")).at(0.7)
    'sgd'
    """

    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        if not self.options:
            raise DataError("a Choice needs at least one option")
        for option in self.options:
            if not isinstance(option, str | int | float | bool | None):
                raise DataError(
                    f"the option {option!r} is a {type(option).__name__}; options are strings, "
                    "numbers, truth values or None, for they are written down as JSON"
                )
            if isinstance(option, float):
                finite("an option", option)

    def at(self, u: float) -> Option:
        """Each option has an equal share of [0, 1]."""
        return self.options[min(int(u * len(self.options)), len(self.options) - 1)]

    def grid(self, n: int) -> list[Any]:
        """All options, however few are asked for: there is nothing between them."""
        return list(self.options)

    def to_json(self) -> Json:
        """{"choice": [option, …]}."""
        return {"choice": list(self.options)}


@dataclass(frozen=True)
class Space:
    """Parameters by name.

    Args:
        parameters: By name.
    """

    parameters: Mapping[str, Parameter]

    def __post_init__(self) -> None:
        if not self.parameters:
            raise DataError("a search space needs at least one parameter")

    def sample(self, generator: Generator | None = None) -> Json:
        """Independent draws of all parameters.

        Args:
            generator: Of the draws; torch's own if there is none.
        """
        u = torch.rand(len(self.parameters), dtype=torch.float64, generator=generator).tolist()
        return {
            name: parameter.at(share)
            for (name, parameter), share in zip(self.parameters.items(), u, strict=True)
        }

    @checked
    def grid(self, n: Count) -> list[Json]:
        """All combinations of values of each parameter, and of all options of a choice.

        Args:
            n: Values of each parameter.
        """
        # The last name varies fastest, as in nested loops.
        axes = [parameter.grid(n) for parameter in self.parameters.values()]
        return [dict(zip(self.parameters, values, strict=True)) for values in product(*axes)]

    def to_json(self) -> Json:
        """JSON that `from_json` reads."""
        return {name: parameter.to_json() for name, parameter in self.parameters.items()}

    @classmethod
    def from_json(cls, content: Any) -> Space:
        """The space that the JSON describes, or a `DataError` that names what is wrong with it.

        Args:
            content: What `to_json` gave, or a person wrote.

        >>> Space.from_json({"lr": {"loguniform": [1e-4, 1e-1]}}).parameters["lr"]
        LogUniform(low=0.0001, high=0.1)
        """
        if not isinstance(content, dict):
            raise DataError(f"a search space is an object of parameters, not {content!r:.80}")
        return cls({name: _parameter(name, entry) for name, entry in content.items()})


KINDS = {
    "uniform": (Uniform, ("low", "high")),
    "loguniform": (LogUniform, ("low", "high")),
    "normal": (TruncatedNormal, ("mean", "scale", "low", "high")),
}


def _parameter(name: str, entry: Any) -> Parameter:
    if not isinstance(entry, dict) or len(entry) != 1:
        raise DataError(
            f'{name}: {entry!r:.80} is not a parameter; write {{"uniform": [low, high]}}, or '
            f'"loguniform", "normal" or "choice" with their list'
        )
    ((kind, values),) = entry.items()
    if not isinstance(values, list):
        raise DataError(f"{name}: {kind} takes a list, not {values!r:.80}")
    try:
        if kind == "choice":
            return Choice(tuple(values))
        if kind not in KINDS:
            raise DataError(f"{kind!r} is unknown; choose from {[*KINDS, 'choice']}")
        make, arguments = KINDS[kind]
        if len(values) != len(arguments) or not all(map(_is_number, values)):
            raise DataError(f"{kind} takes the numbers {list(arguments)}, not {values!r:.80}")
        return make(*map(float, values))
    except (DataError, OverflowError) as error:
        raise DataError(f"{name}: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ordered(low: float, high: float) -> None:
    if not low < high:
        raise DataError(f"low={low} must be less than high={high}")
    if not math.isfinite(high - low):
        raise DataError(f"low={low} and high={high} are too far apart for a float")


def points_per_axis(space: Space, trials: int) -> int:
    """The finest grid with at most this many points: values for each parameter.

    Args:
        space: What is searched.
        trials: The most points.

    >>> space = Space({"lr": LogUniform(1e-4, 1e-1), "optimizer": Choice(("adam", "sgd"))})
    >>> points_per_axis(space, 11)
    5
    """
    choices = [p for p in space.parameters.values() if isinstance(p, Choice)]
    fixed = math.prod(len(choice.options) for choice in choices)
    axes = len(space.parameters) - len(choices)
    if fixed > trials:
        raise DataError(
            f"the coarsest grid has {fixed} points, but trials={trials}: raise it, or sample at "
            "random"
        )
    points = 1
    while axes and fixed * (points + 1) ** axes <= trials:
        points += 1
    return points
