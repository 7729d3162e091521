r"""How much the KL weighs: η in  E_q[−log p(D|w)] + η·KL(q‖prior).

At η = 1 the KL grows with the number of weights while the data term grows with the number of
examples, so a wide network falls back to its prior (document 000). Balancing them,

    η = τ · n / N,        n = training examples (``num_data``), N = parameters or hidden units,

keeps the posterior informative at every width. η is logged with every epoch, whatever rule made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from credo.checks import positive
from credo.errors import DataError
from credo.types import Json, Segment


@dataclass(frozen=True)
class Balanced:
    """η = min(max_temperature, τ·n/N): document 000's balanced temperature.

    ``per="parameters"`` counts random weights, ``"units"`` the outputs of every layer but the last
    (the hidden units). The cap keeps a small network with much data from being crushed.

    >>> from credo.types import Segment
    >>> layer = Segment("0.weight", (50, 10), 0, 500, 10, 50, "0", "Linear")
    >>> Balanced(tau=0.1).resolve([layer], num_data=1000)
    0.2
    """

    tau: float
    per: Literal["parameters", "units"] = "parameters"
    max_temperature: float = 1.0

    def __post_init__(self) -> None:
        positive("tau", self.tau)
        if not self.max_temperature > 0:
            raise DataError(f"max_temperature={self.max_temperature} must be positive; inf is none")
        if self.per not in ("parameters", "units"):
            raise DataError(f'per={self.per!r} must be "parameters" or "units"')

    def resolve(self, segments: list[Segment] | tuple[Segment, ...], num_data: int) -> float:
        """The temperature η for this network and data."""
        if self.per == "parameters":
            size = sum(s.size for s in segments)
        else:
            size = hidden_units(segments)
        return min(self.max_temperature, self.tau * num_data / size)


Temperature: TypeAlias = float | Balanced | Callable[[float], float]
"""A number, `Balanced`, or a schedule: a function of the epochs done (fractional)."""


def hidden_units(segments: list[Segment] | tuple[Segment, ...]) -> int:
    """Outputs of all weight matrices but the last layer's; at least 1."""
    weights = [s for s in segments if len(s.shape) >= 2]
    if len(weights) < 2:
        return 1
    return sum(_outputs(s) for s in weights if s.layer != weights[-1].layer) or 1


def _outputs(weight: Segment) -> int:
    """Transposed convolutions and embeddings have inputs, or words, along the first dimension."""
    turned = weight.layer_type.startswith(("ConvTranspose", "Embedding"))
    return weight.shape[1 if turned else 0]


def check_temperature(temperature: Temperature) -> None:
    """Refuse a number that no KL can be weighted by, where it is given rather than in training."""
    if not isinstance(temperature, Balanced) and not callable(temperature):
        temperature_at(temperature, (), 1, 0.0)


def temperature_at(
    temperature: Temperature,
    segments: list[Segment] | tuple[Segment, ...],
    num_data: int,
    epoch: float,
) -> float:
    """η at this point of training, checked."""
    if isinstance(temperature, Balanced):
        return temperature.resolve(segments, num_data)
    value = temperature(epoch) if callable(temperature) else float(temperature)
    if not 0 <= value < float("inf"):
        raise DataError(f"temperature is {value} at epoch {epoch:.2f}; it must be finite and ≥ 0")
    return value


def temperature_config(temperature: Temperature) -> Json | float | str:
    """What the run folder records."""
    if isinstance(temperature, Balanced):
        return {"type": "Balanced", "tau": temperature.tau, "per": temperature.per,
                "max_temperature": temperature.max_temperature}  # fmt: skip
    if callable(temperature):
        return f"schedule {getattr(temperature, '__name__', type(temperature).__name__)}"
    return float(temperature)
