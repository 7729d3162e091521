"""The predictive distribution: a mixture over samples of the network, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Never

import torch
from torch import Tensor

from credo.checks import Probability, checked
from credo.display import Display, Displayed
from credo.errors import DataError, UnsupportedError
from credo.likelihoods import Classification, Regression
from credo.likelihoods.base import match_shape
from credo.metrics import crps_mixture
from credo.types import Likelihood

_OFFERS = {
    "classification": "probs, sample_probs, entropy, expected_entropy, mutual_information, "
    "confidence, labels, epistemic_std and log_prob(y)",
    "regression": "mean, std, variance, epistemic_std, aleatoric_std, interval(level), "
    "log_prob(y) and crps(y)",
    "loss": "mean and epistemic_std of the outputs, and log_prob(y)",
}
_NEXT = {
    "classification": "pred.probs, pred.entropy, pred.mutual_information, pred.log_prob(y)",
    "regression": "pred.mean, pred.std, pred.interval(0.9), pred.log_prob(y)",
    "loss": "pred.mean, pred.epistemic_std",
}
"""What is asked for most, of each kind."""


MOST_IN_CRPS = 128
"""Samples of which all pairs are looked at."""


class PredictiveError(UnsupportedError, AttributeError):
    """This predictive does not have that quantity; `hasattr` says so too."""


@dataclass(frozen=True)
class Moments:
    """Averages over samples: all that most quantities need, in memory that S does not change.

    Args:
        count: How many samples, S.
        centre: The average of E[y | f_s]: probabilities, means, or for a bare loss the outputs.
        spread: The variance of E[y | f_s] over the samples.
        within: The average uncertainty left at one sample: an entropy for classification, a
            variance for regression.
    """

    count: int
    centre: Tensor
    spread: Tensor
    within: Tensor

    @classmethod
    def over(cls, samples: Iterable[Tensor], likelihood: Likelihood) -> Moments:
        """One pass of Welford's updates, which do not cancel when the spread is small.

        Args:
            samples: Outputs (B, ...), one sample after the other.
            likelihood: p(y | f).
        """
        count = 0
        for outputs in samples:
            term, uncertainty = _terms(_as_outputs(outputs), likelihood)
            count += 1
            if count == 1:
                centre, within = term.clone(), uncertainty.clone()
                squares = torch.zeros_like(centre)
                continue
            if term.shape != centre.shape:
                raise DataError(
                    f"Sample {count} predicts shape {tuple(term.shape)}, but those before it "
                    f"{tuple(centre.shape)}: every sample must predict the same examples."
                )
            change = term - centre
            centre += change / count
            squares.addcmul_(change, term - centre)
            within += (uncertainty - within) / count
        if not count:
            raise DataError("There are no samples to predict from: give at least one.")
        return cls(count, centre, squares / count, within)

    @classmethod
    def merge(cls, parts: Sequence[Moments]) -> Moments:
        """Moments of the samples of all parts together.

        Args:
            parts: Of the same examples, each of other samples.
        """
        count = sum(part.count for part in parts)
        shares = [part.count / count for part in parts]
        centre = sum(share * part.centre for share, part in zip(shares, parts, strict=True))
        spread = sum(
            share * (part.spread + (part.centre - centre).square())
            for share, part in zip(shares, parts, strict=True)
        )
        within = sum(share * part.within for share, part in zip(shares, parts, strict=True))
        assert isinstance(centre, Tensor)
        assert isinstance(spread, Tensor)
        assert isinstance(within, Tensor)
        return cls(count, centre, spread, within)

    @classmethod
    def concatenate(cls, parts: Sequence[Moments]) -> Moments:
        """Moments of the examples of all parts together.

        Args:
            parts: Of the same samples, each of other examples.
        """
        return cls(
            parts[0].count,
            torch.cat([part.centre for part in parts]),
            torch.cat([part.spread for part in parts]),
            torch.cat([part.within for part in parts]),
        )


class Predictive(Displayed):
    """p(y | x) ≈ (1/S) Σ_s p(y | f_s(x)): a mixture with one component per sampled network.

    Shapes below leave out the samples; for dense classification (S, B, C, H, W), read (B, C, H, W)
    for (B, C) and (B, H, W) for (B,). `Bernoulli` has the outputs' shape everywhere. Everything is
    computed when first asked for, without gradients, and kept. Half-precision outputs are raised to
    float32.

    Uncertainty splits into a part that more data would remove and one that it would not:

        H[(1/S) Σ p_s]  =  mutual information  +  (1/S) Σ H[p_s]            (classification)
        std²            =  epistemic_std²      +  aleatoric_std²            (regression)

    >>> import torch
    >>> from credo.likelihoods import Categorical
    >>> outputs = torch.tensor([[[9.0, -9.0], [0.0, 0.0]], [[-9.0, 9.0], [0.0, 0.0]]])
    >>> pred = Predictive(outputs, Categorical())
    >>> pred.entropy                          # both inputs are uncertain ...
    tensor([0.6931, 0.6931])
    >>> pred.mutual_information.round(decimals=4)  # ... the first because the samples disagree
    tensor([0.6931, 0.0000])

    Depeweg et al. (2018), Decomposition of uncertainty in Bayesian deep learning.

    Args:
        outputs: The network's outputs f_s, (S, B, ...), samples first.
        likelihood: p(y | f).
    """

    likelihood: Likelihood
    _kept: Tensor | None
    _own: tuple[Likelihood, ...] | None = None
    """The likelihood of each sample, where they differ in their noise."""
    available: int | None = None
    """How many different samples the posterior has; None where they can't be counted."""

    def __init__(self, outputs: Tensor, likelihood: Likelihood) -> None:
        if outputs.dim() < 2 or 0 in outputs.shape:
            raise DataError(
                f"Predictive needs outputs (S, B, ...), samples first, with at least one sample of "
                f"one example, but their shape is {tuple(outputs.shape)}. "
                "For a single network's outputs use outputs.unsqueeze(0)."
            )
        self.__dict__.update(likelihood=likelihood, _kept=_as_outputs(outputs))

    @classmethod
    def from_stream(cls, samples: Iterable[Tensor], likelihood: Likelihood) -> Predictive:
        """The same from outputs (B, ...) that arrive one sample at a time and are not kept.

        Memory stays that of a few samples, whatever their number. What needs all samples at once
        is refused: ``outputs``, ``sample_probs``, ``interval`` and ``log_prob``.

        >>> from credo.likelihoods import Gaussian
        >>> stream = (torch.full((3,), float(s)) for s in range(1000))
        >>> Predictive.from_stream(stream, Gaussian()).mean
        tensor([499.5000, 499.5000, 499.5000])

        Args:
            samples: Outputs (B, ...), one sample after the other.
            likelihood: p(y | f).
        """
        with torch.no_grad():
            moments = Moments.over(samples, likelihood)
        return cls._from_moments(moments, likelihood)

    def out_of(self, available: int | None) -> Predictive:
        """This predictive, which knows how many samples there were to choose from.

        Args:
            available: Their number; None where they can't be counted.
        """
        self.__dict__["available"] = available
        return self

    @classmethod
    def concatenate(cls, parts: Iterable[Predictive]) -> Predictive:
        """One predictive for the examples of all parts, such as minibatches, in their order.

        Args:
            parts: Predictives with the same likelihood and number of samples.
        """
        parts = list(parts)
        if not parts:
            raise DataError("There is nothing to concatenate: give at least one Predictive.")
        first = parts[0]
        if type(first) is not cls and isinstance(first, cls):
            return type(first).concatenate(parts)
        if any(part.samples != first.samples for part in parts):
            raise DataError(
                f"The parts have {sorted({part.samples for part in parts})} samples: "
                "predict all of them with the same number."
            )
        if any(part.likelihood.config() != first.likelihood.config() for part in parts):
            raise DataError("The parts have different likelihoods and can't share one Predictive.")
        kept = [part._kept for part in parts if part._kept is not None]
        if not kept:
            moments = Moments.concatenate([part._moments for part in parts])
            return cls._from_moments(moments, first.likelihood).out_of(first.available)
        if len(kept) < len(parts):
            raise DataError("Some parts kept their samples and some, from a stream, did not.")
        joined = cls(torch.cat(kept, dim=1), first.likelihood)
        joined.__dict__["_own"] = first._own
        return joined.out_of(first.available)

    @classmethod
    def merge(cls, parts: Sequence[Predictive]) -> Predictive:
        """One predictive from the samples of all parts, which are of the same examples.

        Every part's samples keep the noise of their own likelihood, so parts may have learned
        different ones: an ensemble's members do.

        Args:
            parts: Predictives of the same kind and the same examples.
        """
        if not parts:
            raise DataError("There is nothing to merge: give at least one Predictive.")
        first = parts[0].likelihood
        kinds = sorted({type(part.likelihood).__name__ for part in parts})
        if len(kinds) > 1:
            raise DataError(f"The parts have likelihoods of different kinds: {', '.join(kinds)}.")
        # Moments only where they are all there is: they take as long as the outputs themselves.
        shapes = {
            tuple((part._moments.centre if part._kept is None else part._kept[0]).shape)
            for part in parts
        }
        if len(shapes) > 1:
            raise DataError(f"The parts predict different examples: shapes {sorted(shapes)}.")
        each = [part.available for part in parts]
        available = None if None in each else sum(number or 0 for number in each)
        kept = [part._kept for part in parts if part._kept is not None]
        if len(kept) < len(parts):
            moments = Moments.merge([part._moments for part in parts])
            return cls._from_moments(moments, first).out_of(available)
        own = [part.likelihood for part in parts for _ in range(part.samples)]
        return cls.of_members(torch.cat(kept), own).out_of(available)

    @classmethod
    def of_members(cls, outputs: Tensor, likelihoods: Sequence[Likelihood]) -> Predictive:
        """Samples that each have a likelihood, with noise of its own.

        Args:
            outputs: The network's outputs (S, B, ...).
            likelihoods: S of one kind.
        """
        first = likelihoods[0]
        merged = cls(outputs, first)
        if any(each is not first and each.config() != first.config() for each in likelihoods):
            merged.__dict__["_own"] = tuple(likelihoods)
        return merged

    @property
    def outputs(self) -> Tensor:
        """The network's outputs (S, B, ...)."""
        if self._kept is None:
            raise PredictiveError(
                "A predictive from a stream keeps no samples, so it has no outputs, sample_probs, "
                "interval or log_prob. Predict with the samples kept, in smaller batches if memory "
                "is short."
            )
        return self._kept

    @property
    def samples(self) -> int:
        """S, the number of samples."""
        return self._moments.count if self._kept is None else len(self._kept)

    @cached_property
    def sample_probs(self) -> Tensor:
        """Each sample's probabilities (S, B, C)."""
        likelihood = self._classification("sample_probs")
        with torch.no_grad():
            return torch.stack([likelihood.probs(outputs) for outputs in self.outputs])

    @cached_property
    def probs(self) -> Tensor:
        """(1/S) Σ_s p(y | f_s), averaged after the softmax, (B, C); P(y = 1) for `Bernoulli`."""
        self._classification("probs")
        return self._moments.centre

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of ``probs`` in nats, (B,): all uncertainty about the label."""
        return self._classification("entropy").entropy(self.probs)

    @cached_property
    def expected_entropy(self) -> Tensor:
        """(1/S) Σ_s H[p(y | f_s)], (B,): the aleatoric part, on which the samples agree."""
        self._classification("expected_entropy")
        return self._moments.within

    @cached_property
    def mutual_information(self) -> Tensor:
        """I[y; f] = entropy − expected_entropy ≥ 0, (B,): the epistemic part."""
        self._classification("mutual_information")
        # Jensen makes it non-negative; rounding may not
        return (self.entropy - self.expected_entropy).clamp_min(0)

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of the likeliest label, (B,)."""
        return self._classification("confidence").confidence(self.probs)

    @cached_property
    def labels(self) -> Tensor:
        """The likeliest label, int64 (B,)."""
        return self._classification("labels").labels(self.probs)

    @cached_property
    def mean(self) -> Tensor:
        """E[y], (B, D); for a bare loss the mean of the outputs."""
        if isinstance(self.likelihood, Classification):
            self._refuse("mean")
        return self._moments.centre

    @cached_property
    def epistemic_std(self) -> Tensor:
        """Standard deviation over the samples of E[y | f_s], (B, D); of the probabilities, (B, C).

        The sum of squares is divided by S, as the mixture's own variance demands: one sample has
        none.
        """
        return self._moments.spread.sqrt()

    @cached_property
    def aleatoric_std(self) -> Tensor:
        """Root of the average noise variance (1/S) Σ_s Var[y | f_s], (B, D)."""
        self._regression("aleatoric_std")
        return self._moments.within.sqrt()

    @cached_property
    def variance(self) -> Tensor:
        """Var[y] = epistemic_std² + aleatoric_std², (B, D)."""
        self._regression("variance")
        return self._moments.spread + self._moments.within

    @cached_property
    def std(self) -> Tensor:
        """Standard deviation of y, (B, D)."""
        self._regression("std")
        return self.variance.sqrt()

    @checked
    @torch.no_grad()
    def interval(self, level: Probability = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval that holds y with probability ``level``.

        The ends are the mixture's own quantiles at (1 − level)/2 and (1 + level)/2, found by
        bisection, in every dimension by itself: no normal approximation.

        >>> from credo.likelihoods import Gaussian
        >>> Predictive(torch.zeros(4, 1), Gaussian(scale=1.0)).interval(0.95)
        (tensor([-1.9600]), tensor([1.9600]))

        Args:
            level: The probability that the interval holds, between 0 and 1.
        """
        self._regression("interval")
        tail = (1 - level) / 2
        groups = self._alike()

        def all_samples(of: Callable[[Regression, Tensor], Tensor]) -> Tensor:
            """Of every sample, computed for those with one likelihood at once."""
            found = [
                of(own, outputs.flatten(0, 1)).unflatten(0, outputs.shape[:2])
                for outputs, own in groups
            ]
            return torch.cat(found)

        def repeated(y: Tensor, outputs: Tensor) -> Tensor:
            return y.repeat(len(outputs) // len(y), *[1] * (y.dim() - 1))

        # a mixture's quantile lies between the least and the greatest of its components'
        lower_ends = all_samples(lambda own, f: own.quantile(f, tail))
        upper_ends = all_samples(lambda own, f: own.quantile(f, 1 - tail))
        lower = _bisect(
            lambda y: all_samples(lambda own, f: own.cdf(f, repeated(y, f))).mean(0) < tail,
            lower_ends,
        )
        # the upper tail by itself: near one the cdf has no digits left
        upper = _bisect(
            lambda y: all_samples(lambda own, f: own.survival(f, repeated(y, f))).mean(0) > tail,
            upper_ends,
        )
        return lower, upper

    @torch.no_grad()
    def log_prob(self, y: Tensor) -> Tensor:
        """log (1/S) Σ_s p(y | f_s) of each example, (B,); for a bare loss it is not normalised.

        Args:
            y: The targets, (B, ...).
        """
        y = torch.as_tensor(y, device=self.outputs.device)
        self.likelihood.check(self.outputs[0], y)
        each = torch.stack([own.log_prob(outputs, y) for outputs, own in self._each()])
        return each.logsumexp(0) - math.log(self.samples)

    @torch.no_grad()
    def crps(self, y: Tensor) -> Tensor:
        """The continuous ranked probability score of each target, in its units, (B, D).

        Exact for the mixture over the samples; of more than 128, over an even choice of them.

        Args:
            y: The targets, (B, ...).
        """
        self._regression("crps")
        y = match_shape(self.mean, torch.as_tensor(y, device=self.mean.device))
        parts = [own.mean_and_scale(outputs.flatten(0, 1)) for outputs, own in self._alike()]
        mean = torch.cat([m for m, _ in parts]).unflatten(0, (self.samples, -1))
        scale = torch.cat([s.expand_as(m) for m, s in parts]).view_as(mean)
        every = -(-self.samples // MOST_IN_CRPS)
        return torch.from_numpy(crps_mixture(mean[::every], scale[::every], y)).to(self.mean)

    def __setattr__(self, name: str, value: Any) -> Never:
        raise AttributeError(f"A Predictive does not change: {name} can't be set.")

    def _display(self) -> Display:
        shape, kind = tuple(self._moments.centre.shape), self.likelihood.kind
        fewer = self.available is not None and self.available > self.samples
        among = f" of {self.available:,}" if fewer else ""
        return Display(
            f"{type(self).__name__}: {kind}, samples={self.samples}{among}, shape={shape}",
            _NEXT[kind],
            notes=(f"It has outputs, samples, {_OFFERS[kind]}.",),
        )

    @classmethod
    def _from_moments(cls, moments: Moments, likelihood: Likelihood) -> Predictive:
        predictive = cls.__new__(cls)
        predictive.__dict__.update(likelihood=likelihood, _kept=None, _moments=moments)
        return predictive

    @cached_property
    def _moments(self) -> Moments:
        with torch.no_grad():
            if self._own is None:
                return Moments.over(self.outputs, self.likelihood)
            return Moments.merge([Moments.over([f], own) for f, own in self._each()])

    def _each(self) -> Iterator[tuple[Tensor, Likelihood]]:
        """Every sample's outputs (B, ...), and its likelihood."""
        own = self._own or (self.likelihood,) * self.samples
        return zip(self.outputs, own, strict=True)

    def _alike(self) -> list[tuple[Tensor, Any]]:
        """The outputs (S', B, ...) of samples that follow each other with one likelihood."""
        if self._own is None:
            return [(self.outputs, self.likelihood)]
        runs = [list(run) for _, run in groupby(range(self.samples), lambda s: id(self._own[s]))]  # type: ignore[index]
        return [(self.outputs[run[0] : run[-1] + 1], self._own[run[0]]) for run in runs]

    def _classification(self, name: str) -> Classification:
        if not isinstance(self.likelihood, Classification):
            self._refuse(name)
        return self.likelihood

    def _regression(self, name: str) -> Regression:
        if not isinstance(self.likelihood, Regression):
            self._refuse(name)
        return self.likelihood

    def _refuse(self, name: str) -> Never:
        kind = self.likelihood.kind
        raise PredictiveError(
            f"The likelihood {type(self.likelihood).__name__} makes this a {kind} predictive, "
            f"which has no {name}. It has outputs, samples, {_OFFERS[kind]}."
        )


def _as_outputs(outputs: Tensor) -> Tensor:
    """Detached, and precise enough to average probabilities in."""
    if not outputs.is_floating_point():
        raise DataError(f"Outputs must be floating-point numbers, but they are {outputs.dtype}.")
    outputs = outputs.detach()
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _terms(outputs: Tensor, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    """What one sample adds to the moments: E[y | f] and the uncertainty left."""
    if isinstance(likelihood, Classification):
        probs = likelihood.probs(outputs)
        return probs, likelihood.entropy(probs)
    if isinstance(likelihood, Regression):
        return likelihood.mean(outputs), likelihood.variance(outputs)
    return outputs, torch.zeros_like(outputs)


def _bisect(is_below: Callable[[Tensor], Tensor], ends: Tensor) -> Tensor:
    """Where ``is_below`` turns false, elementwise, between the extremes of ``ends`` over dim 0.

    128 halvings reach neighbouring floats from any bracket that matters; most need some 30.
    """
    low, high = ends.amin(0), ends.amax(0)
    for _ in range(128):
        middle = low + (high - low) / 2
        if ((middle == low) | (middle == high)).all():
            break
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
