"""Predictives without samples: the outputs' Gaussian integrated by a formula."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from statistics import NormalDist
from typing import Never

import torch
from torch import Tensor

from credo.checks import Probability, checked
from credo.display import Display
from credo.errors import DataError
from credo.likelihoods import Bernoulli, Categorical, Gaussian
from credo.likelihoods.base import match_shape
from credo.metrics import crps_mixture
from credo.posterior.outputs import OutputGaussian
from credo.posterior.predictive import Moments, Predictive, PredictiveError
from credo.types import Likelihood


class ClosedForm(Predictive):
    """A predictive without samples: the outputs' Gaussian was integrated by a formula.

    Args:
        gaussian: The outputs' distribution, of every example.
        likelihood: p(y | f).
    """

    _offers: str

    def __init__(self, gaussian: OutputGaussian, likelihood: Likelihood) -> None:
        self.__dict__.update(likelihood=likelihood, _kept=None, _gaussian=gaussian)

    @classmethod
    def concatenate(cls, parts: Iterable[Predictive]) -> Predictive:
        """One predictive for the examples of all parts, in their order."""
        parts = list(parts)
        same = [part for part in parts if type(part) is cls]
        if not same or len(same) < len(parts):
            raise DataError("Closed-form predictives can only be joined with their own kind.")
        if any(part.likelihood.config() != same[0].likelihood.config() for part in same):
            raise DataError("The parts have different likelihoods and can't share one Predictive.")
        gaussian = OutputGaussian.concatenate(part._gaussian for part in same)
        return cls(gaussian, same[0].likelihood)

    @property
    def samples(self) -> int:
        """None were drawn."""
        return 0

    @property
    def outputs(self) -> Tensor:
        """Refused: there are no samples."""
        self._refuse("outputs")

    def _display(self) -> Display:
        shape, kind = tuple(self._gaussian.mean.shape), self.likelihood.kind
        return Display(
            f"{type(self).__name__}: {kind} by a formula, shape={shape}", f"pred.{self._offers}"
        )

    _gaussian: OutputGaussian

    def _refuse(self, name: str) -> Never:
        raise PredictiveError(
            f"A {type(self).__name__} has no {name}: it is a formula, in which no samples are told "
            f'apart. It has {self._offers}. For the rest predict with link="samples".'
        )


class NormalPredictive(ClosedForm):
    """N(y; f, JΣJᵀ + scale²), exact for a Gaussian likelihood and outputs that are Gaussian.

    >>> gaussian = OutputGaussian(torch.zeros(1, 1), torch.tensor([[[3.0]]]))
    >>> pred = NormalPredictive(gaussian, Gaussian(scale=1.0))
    >>> pred.std, pred.epistemic_std
    (tensor([[2.]]), tensor([[1.7321]]))
    >>> pred.interval(0.95)[1]
    tensor([[3.9199]])
    """

    likelihood: Gaussian
    _offers = (
        "mean, std, variance, epistemic_std, aleatoric_std, interval(level), log_prob(y) and "
        "crps(y), exact"
    )

    @cached_property
    def _moments(self) -> Moments:
        mean = self._gaussian.mean
        with torch.no_grad():
            return Moments(0, mean, self._gaussian.variance, self.likelihood.variance(mean))

    @checked
    @torch.no_grad()
    def interval(self, level: Probability = 0.9) -> tuple[Tensor, Tensor]:
        """The ends of the central interval of each dimension by itself: mean ± z·std."""
        width = NormalDist().inv_cdf((1 + level) / 2) * self.std
        return self.mean - width, self.mean + width

    @torch.no_grad()
    def log_prob(self, y: Tensor) -> Tensor:
        """log N(y; f, JΣJᵀ + scale²) of each example, all dimensions jointly, (B,)."""
        mean = self._gaussian.mean
        y = torch.as_tensor(y, device=mean.device)
        self.likelihood.check(mean, y)
        y = match_shape(mean, y).to(mean.dtype)
        return self._gaussian.log_density(y, self.likelihood.variance(mean))

    @torch.no_grad()
    def crps(self, y: Tensor) -> Tensor:
        """The continuous ranked probability score of each target, in its units, (B, D)."""
        y = match_shape(self.mean, torch.as_tensor(y, device=self.mean.device))
        return torch.from_numpy(crps_mixture(self.mean[None], self.std[None], y)).to(self.mean)


class ProbitPredictive(ClosedForm):
    """softmax(f/√(1 + π/8·diag JΣJᵀ)), or σ of the same: probabilities without samples.

    >>> logits, covariance = torch.tensor([[2.0]]), torch.tensor([[[8 * 3 / torch.pi]]])
    >>> ProbitPredictive(OutputGaussian(logits, covariance), Bernoulli()).probs      # σ(2/√4)
    tensor([[0.7311]])
    """

    likelihood: Categorical | Bernoulli
    _offers = "probs, entropy, confidence, labels and log_prob(y)"

    @cached_property
    def _logits(self) -> Tensor:
        return self._gaussian.mean / (1 + math.pi / 8 * self._gaussian.variance).sqrt()

    @cached_property
    def probs(self) -> Tensor:
        """Of the labels, (B, C); P(y = 1) for `Bernoulli`."""
        return self.likelihood.probs(self._logits)

    @cached_property
    def expected_entropy(self) -> Tensor:
        """Refused: it is an average over samples."""
        self._refuse("expected_entropy")

    @cached_property
    def mutual_information(self) -> Tensor:
        """Refused: it is what samples disagree on."""
        self._refuse("mutual_information")

    @cached_property
    def epistemic_std(self) -> Tensor:
        """Refused: the formula gives the mean of the probabilities, not their spread."""
        self._refuse("epistemic_std")

    @torch.no_grad()
    def log_prob(self, y: Tensor) -> Tensor:
        """log of the probability of each example's labels, (B,)."""
        y = torch.as_tensor(y, device=self._logits.device)
        self.likelihood.check(self._logits, y)
        return self.likelihood.log_prob(self._logits, y)
