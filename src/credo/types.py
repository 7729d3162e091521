"""The nouns every layer shares: flat vectors, segments of them, batches, and three protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from torch import Generator, Tensor
from torch.nn import Parameter

Vector: TypeAlias = Tensor
"""A flat tensor (P,) of parameter values, in the order of the segments."""

Inputs: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""What a network is called with: ``net(x)``, ``net(*x)`` or ``net(**x)``."""

Batch: TypeAlias = tuple[Inputs, Tensor]
"""Inputs and targets of some examples."""

Json: TypeAlias = dict[str, Any]

Kind: TypeAlias = Literal["classification", "regression", "loss"]


@dataclass(frozen=True)
class Segment:
    """One parameter tensor's place in the flat vector, and the facts priors are built from.

    ``layer`` is the dotted path of the module that owns it ("" for the root), ``layer_type`` that
    module's class name. ``fan_in`` is the number of inputs one output unit sums over.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    fan_in: int
    fan_out: int
    layer: str
    layer_type: str

    @property
    def size(self) -> int:
        """Number of scalars."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """Where it lies in the flat vector."""
        return slice(self.start, self.stop)


class Likelihood(Protocol):
    """p(y | f): how targets follow from the network's outputs f.

    ``kind`` is "classification", "regression" or "loss"; targets equal to ``ignore_index``, if
    there is one, do not count. `credo.likelihoods.BaseLikelihood` has defaults for what has any.
    """

    kind: Kind
    ignore_index: int | None

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log-probability of each example, (B,): summed over an example's pixels or dimensions."""
        ...

    def mean_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss: the mean over examples of −log p(y | f), a scalar."""
        ...

    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:
        """Targets drawn from p(y | outputs)."""
        ...

    def hessian(self, outputs: Tensor) -> Tensor:
        """Λ = −∂² log p / ∂f² in closed form."""
        ...

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise `DataError` if these targets can't belong to these outputs."""
        ...

    def config(self) -> Json:
        """JSON from which `credo.likelihoods.from_config` builds the same likelihood again."""
        ...

    def parameters(self) -> Iterator[Parameter]:
        """Learned noise, trained as point estimates; usually none."""
        ...


@runtime_checkable
class FlatDistribution(Protocol):
    """A distribution over flat vectors: every family is one, and every prior becomes one."""

    @property
    def scale(self) -> Tensor:
        """Standard deviation of each weight, (P,) or broadcastable to it."""
        ...

    def log_prob(self, w: Vector) -> Tensor:
        """Log-density summed over the last dimension: (..., P) → (...).

        Args:
            w: Weights, (..., P).
        """
        ...

    def grad_log_prob(self, w: Vector) -> Tensor:
        """∇_w log p(w) in closed form: (..., P) → (..., P).

        Args:
            w: Weights, (..., P).
        """
        ...

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Draws, (n, P).

        Args:
            n: How many.
            generator: Where the randomness comes from; torch's global generator if it isn't given.
        """
        ...


class Prior(Protocol):
    """A rule that gives every weight of any network its prior distribution."""

    def on(self, segments: Sequence[Segment], like: Vector) -> FlatDistribution:
        """The prior over these segments, with the dtype and device of the flat vector ``like``.

        Args:
            segments: The parameters that the distribution is over, one after the other.
            like: A vector whose dtype and device the distribution takes.
        """
        ...

    def config(self) -> Json:
        """JSON from which `credo.priors.from_config` builds the same prior again."""
        ...
