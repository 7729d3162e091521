r"""How much the KL weighs: η in  E_q[−log p(D|w)] + η·KL(q‖prior).

At η = 1 the KL grows with the number of weights while the data term grows with the number of
examples, so a wide network falls back to its prior (Huix, Majewski, Durmus, Moulines & Korba 2022).
Balancing them,

    η = τ · n / N,        n = training examples (``num_data``), N = parameters or hidden units,

keeps the posterior informative at every width. η is logged with every epoch, whatever rule made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, final

from credo.checks import NotNegative, Positive, Range, checked
from credo.errors import DataError
from credo.types import Segment


@final
@checked
@dataclass(frozen=True)
class Balanced:
    """η = min(max_temperature, τ·n/N): the balanced temperature of Huix et al. 2022.

    Args:
        tau: τ, what an example weighs against a parameter or unit.
        per: ``"parameters"`` counts random weights, ``"units"`` the outputs of every layer but the
            last (the hidden units).
        max_temperature: A cap, which keeps a small network with much data from being crushed;
            infinity is none.

    >>> from credo.types import Segment
    >>> layer = Segment("0.weight", (50, 10), 0, 500, 10, 50, "0", "Linear")
    >>> Balanced(tau=0.1).resolve([layer], num_data=1000)
    0.2
    """

    tau: Positive
    per: Literal["parameters", "units"] = "parameters"
    max_temperature: Annotated[float, Range(0, open_low=True, infinite=True)] = 1.0

    def resolve(self, segments: Sequence[Segment], num_data: int) -> float:
        """The temperature η for this network and data.

        Args:
            segments: The random parameters.
            num_data: N, the number of training examples.
        """
        if self.per == "parameters":
            size = sum(s.stop - s.start for s in segments)
        else:
            size = hidden_units(segments)
        return min(self.max_temperature, self.tau * num_data / size)


Temperature: TypeAlias = NotNegative | Balanced | Callable[[float], float]
"""A number, `Balanced`, or a schedule: a function of the epochs done (fractional)."""

DEFAULT_TEMPERATURE = Balanced(tau=0.1)
"""1 for a small model with much data, less where weights outnumber examples; by measurement, see
docs/concepts/defaults.md."""

NATURAL_TEMPERATURE = Balanced(tau=0.3)
"""Of the natural-gradient optimizers and methods, whose scales stay nearer to their start than VI's
in runs of usual length, so that they can bear more; see docs/concepts/optimizers.md."""


def hidden_units(segments: Sequence[Segment]) -> int:
    """Outputs of all weight matrices but the last layer's; at least 1.

    Args:
        segments: The random parameters.
    """
    weights = [s for s in segments if len(s.shape) >= 2]
    if len(weights) < 2:
        return 1
    return sum(_outputs(s) for s in weights if s.layer != weights[-1].layer) or 1


def _outputs(weight: Segment) -> int:
    """Transposed convolutions and embeddings have inputs, or words, along the first dimension."""
    turned = weight.layer_type.startswith(("ConvTranspose", "Embedding"))
    return weight.shape[1 if turned else 0]


def temperature_at(
    temperature: Temperature, segments: Sequence[Segment], num_data: int, epoch: float
) -> float:
    """η at this point of training, checked.

    Args:
        temperature: A number, a function of the epoch, or `Balanced`.
        segments: The random parameters.
        num_data: N, the number of training examples.
        epoch: Epochs done, not only whole ones.
    """
    if isinstance(temperature, Balanced):
        return temperature.resolve(segments, num_data)
    value = temperature(epoch) if callable(temperature) else float(temperature)
    if not 0 <= value < float("inf"):
        raise DataError(f"temperature is {value} at epoch {epoch:.2f}; it must be finite and ≥ 0")
    return value
