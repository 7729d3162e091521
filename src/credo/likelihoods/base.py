"""What likelihoods share: the interfaces they implement and the shape rules they enforce."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from statistics import NormalDist

import torch
from torch import Generator, Tensor, nn

from credo.errors import DataError
from credo.types import Json, Kind, Likelihood


class BaseLikelihood(nn.Module, ABC):
    """p(y | f) as a module: learned noise is a ``Parameter``, and ``.to`` and ``deepcopy`` work.

    ``log_prob`` and ``mean_nll`` refuse shapes and dtypes that would broadcast into a wrong
    answer, which costs no look at the data; ``check`` also looks at every value.
    """

    kind: Kind
    ignore_index: int | None = None
    """The label that stands for no label; None if every target counts."""

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log-probability of each example, (B,): summed over its pixels or dimensions.

        Args:
            outputs: The network's outputs f, examples first.
            targets: The targets y of the same examples.
        """

    @abstractmethod
    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:
        """Targets drawn from p(y | outputs), as ``log_prob`` takes them; they carry no gradient.

        Args:
            outputs: The network's outputs f, examples first.
            generator: Where the randomness comes from; None for torch's own.
        """

    @abstractmethod
    def hessian(self, outputs: Tensor) -> Tensor:
        """Λ = −∂² log p / ∂f², or its expectation under p(y | f) where it depends on y.

        Args:
            outputs: The network's outputs f, examples first.
        """

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise `DataError` if these targets can't belong to these outputs.

        Args:
            outputs: The network's outputs f, examples first.
            targets: The targets y, as `log_prob` takes them.
        """

    @abstractmethod
    def config(self) -> Json:
        """JSON from which `credo.likelihoods.from_config` builds the same likelihood again."""

    def mean_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss: the mean over examples of −log p(y | f), a scalar.

        Args:
            outputs: The network's outputs f, examples first.
            targets: The targets y, as `log_prob` takes them.
        """
        return -self.log_prob(outputs, targets).mean()

    def extra_repr(self) -> str:
        """The settings, for ``print``."""
        settings = {key: value for key, value in self.config().items() if key != "type"}
        return ", ".join(f"{key}={value!r}" for key, value in settings.items())


class Classification(BaseLikelihood):
    """A likelihood over finitely many labels."""

    kind: Kind = "classification"

    @abstractmethod
    def probs(self, outputs: Tensor) -> Tensor:
        """Probabilities of the labels, in the shape of the outputs.

        Args:
            outputs: The network's outputs f, examples first.
        """

    @abstractmethod
    def entropy(self, probs: Tensor) -> Tensor:
        """Entropy in nats of every label's distribution; 0 log 0 is 0.

        Args:
            probs: Probabilities of the labels, as `probs` gives them.
        """

    @abstractmethod
    def confidence(self, probs: Tensor) -> Tensor:
        """Probability of the likeliest label.

        Args:
            probs: Probabilities of the labels, as `probs` gives them.
        """

    @abstractmethod
    def labels(self, probs: Tensor) -> Tensor:
        """The likeliest label, int64.

        Args:
            probs: Probabilities of the labels, as `probs` gives them.
        """


class Regression(BaseLikelihood):
    """Independent normal noise: y ~ N(mean(f), scale(f)²) in every dimension.

    A subclass says how outputs f become a mean and a standard deviation; all else follows.
    Targets have the mean's shape, except that a last dimension of size one may be missing on
    either side.
    """

    kind: Kind = "regression"

    @abstractmethod
    def mean_and_scale(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of y; the scale broadcasts against the mean.

        Args:
            outputs: The network's outputs f, examples first.
        """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Σ_d log N(y_d; mean_d, scale_d²), (B,)."""
        mean, scale = self.mean_and_scale(outputs)
        error = (match_shape(mean, targets).to(mean.dtype) - mean) / scale
        return per_example_sum(-0.5 * error.square() - scale.log() - 0.5 * math.log(2 * math.pi))

    @torch.no_grad()
    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:
        """Mean plus scaled normal noise, in the mean's shape."""
        mean, scale = self.mean_and_scale(outputs)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + scale * noise

    def mean(self, outputs: Tensor) -> Tensor:
        """E[y | f].

        Args:
            outputs: The network's outputs f, examples first.
        """
        return self.mean_and_scale(outputs)[0]

    def variance(self, outputs: Tensor) -> Tensor:
        """Var[y | f], in the mean's shape.

        Args:
            outputs: The network's outputs f, examples first.
        """
        mean, scale = self.mean_and_scale(outputs)
        return scale.square().expand_as(mean)

    def cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """P(Y ≤ y | f) in every dimension.

        Args:
            outputs: The network's outputs f, examples first.
            y: Where, in the mean's shape.
        """
        mean, scale = self.mean_and_scale(outputs)
        return _normal_cdf((y - mean) / scale)

    def survival(self, outputs: Tensor, y: Tensor) -> Tensor:
        """P(Y > y | f): what 1 − cdf would round away in the upper tail.

        Args:
            outputs: The network's outputs f, examples first.
            y: Where, in the mean's shape.
        """
        mean, scale = self.mean_and_scale(outputs)
        return _normal_cdf((mean - y) / scale)

    def quantile(self, outputs: Tensor, probability: float) -> Tensor:
        """The y at which the cdf reaches ``probability``.

        Args:
            outputs: The network's outputs f, examples first.
            probability: Between 0 and 1.
        """
        mean, scale = self.mean_and_scale(outputs)
        return mean + scale * NormalDist().inv_cdf(probability)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Shapes agree, targets are real and finite."""
        mean = self.mean(outputs)
        require_examples(mean)
        if targets.is_complex() or targets.dtype == torch.bool:
            raise DataError(
                f"Regression targets must be real numbers, but their dtype is {targets.dtype}. "
                "For yes/no targets use credo.likelihoods.Bernoulli()."
            )
        match_shape(mean, targets)
        require_finite(targets)


def _normal_cdf(z: Tensor) -> Tensor:
    """Φ(z), by erfc: in float32 torch.special.ndtr goes through 1 + erf and loses the tail."""
    return 0.5 * torch.special.erfc(z * -math.sqrt(0.5))


def missing_members(likelihood: object) -> list[str]:
    """What `credo.types.Likelihood` asks for and this object has not.

    >>> missing_members(object())[:3]
    ['check', 'config', 'hessian']

    Args:
        likelihood: What is to be used as one.
    """
    asked = {*vars(Likelihood), *Likelihood.__annotations__}
    return sorted(n for n in asked if not n.startswith("_") and not hasattr(likelihood, n))


def per_example_sum(x: Tensor) -> Tensor:
    """Sum over all dimensions but the first: (B, ...) → (B,).

    Args:
        x: Numbers, examples first.
    """
    return x if x.dim() == 1 else x.flatten(1).sum(1)


def match_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets in the outputs' shape, which may differ by a last dimension of size one only.

    Anything else is refused: (B, 1) against (B,) would broadcast to (B, B) without a word.

    Args:
        outputs: Predictions, in the shape that is wanted.
        targets: Targets of the same examples.
    """
    if outputs.shape == targets.shape:
        return targets
    if (*targets.shape, 1) == outputs.shape or (*outputs.shape, 1) == targets.shape:
        return targets.reshape(outputs.shape)
    raise DataError(
        f"Targets of shape {tuple(targets.shape)} do not fit predictions of shape "
        f"{tuple(outputs.shape)}: both need the same shape, up to a last dimension of size one."
    )


def require_examples(outputs: Tensor) -> None:
    """Refuse outputs without a batch dimension, and empty batches.

    Args:
        outputs: The network's outputs f, examples first.
    """
    if outputs.dim() == 0 or outputs.numel() == 0:
        raise DataError(
            f"Outputs of shape {tuple(outputs.shape)} hold no examples: "
            "the first dimension must count at least one."
        )


def require_finite(targets: Tensor) -> None:
    """Refuse NaN and infinite targets, naming the first.

    Args:
        targets: Any real targets.
    """
    bad = ~targets.isfinite()
    if bad.any():
        raise DataError(
            f"{int(bad.sum())} of {targets.numel()} target values are NaN or infinite, the first "
            f"at index {first_index(bad)}. Remove those examples or fill in their values."
        )


def first_index(mask: Tensor) -> tuple[int, ...]:
    """Index of the first true entry.

    Args:
        mask: Booleans of any shape, one of them true.
    """
    return tuple(mask.nonzero()[0].tolist())
