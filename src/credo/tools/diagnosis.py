r"""Is this posterior ignoring the data, balanced, or nearly a point estimate?

A temperature that is too high for the width of the network leaves the prior (Huix et al., 2022);
one that is too low leaves a single network. Both fail silently: the loss goes down, predictions
come out. `diagnose` compares the posterior's predictions with those of the prior and with each
other.

At every input let m, s be the mean and the standard deviation over sampled networks of E[y | f]
(class probabilities, or the regression's mean), and m₀, s₀ those under the prior:

    distance        = RMS over inputs of √(‖m − m₀‖² + ‖s − s₀‖²)
    epistemic share = mean mutual information / mean entropy       (classification)
                      mean s² / mean variance of y                 (regression)

For regression the distance is in units of the prior predictive's standard deviation, noise
included; for a bare loss in units of s₀. The verdict is the first that applies:

1. *ignoring the data*: the distance is at most `NEAR_PRIOR` plus what the samples can't tell
   (``noise``, the standard error that two independent sets of samples would have).
2. *nearly a point estimate*: the epistemic share is less than `POINT_SHARE`: averaging over the
   posterior then hardly differs from one network. For a bare loss, s/s₀ < `POINT_SPREAD`.
3. *balanced*.

Without inputs only the weights can be judged, more roughly: KL per weight below
`NEAR_PRIOR_KL` nats; or the median of scale/prior scale below `POINT_SPREAD`.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 50)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    >>> posterior = credo.fit(model, credo.MAP(lr=0.01), (x, x.sin()), epochs=50, progress=False)
    >>> credo.diagnose(posterior, x).verdict
    'nearly a point estimate'
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from rich.table import Table
from torch import Generator, Tensor

from credo.checks import Range, Remedy, checked
from credo.display import Display, Displayed
from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.families import Delta, Empirical, Family
from credo.kl import kl, kl_monte_carlo
from credo.likelihoods import Classification, Regression
from credo.model import Model
from credo.network.batches import TARGET_KEYS, map_inputs
from credo.posterior.posterior import Posterior
from credo.posterior.predictive import Predictive
from credo.temperature import hidden_units
from credo.train.feed import make_feed
from credo.types import FlatDistribution, Inputs

NEAR_PRIOR = 0.1
"""In probability, or in standard deviations of the prior predictive."""
POINT_SHARE = 0.02
"""Of the predicted uncertainty; in regression samples then scatter by a seventh of the noise."""
POINT_SPREAD = 0.02
"""Of the prior's spread."""
NEAR_PRIOR_KL = 0.01
"""Nats per weight: a mean that moved by a seventh of the prior's scale."""
AS_WIDE_AS_PRIOR = 0.8
"""Of the prior's spread, from where a balanced posterior is told that it learned little."""
PRIOR_AGREES = 0.5
"""Of the prior's spread, from where samples that agree say more of the prior than of q."""
MAX_INPUTS = 1024
KL_SAMPLES = 64

State: TypeAlias = Literal["ignoring the data", "balanced", "nearly a point estimate"]


@dataclass(frozen=True)
class Predictions:
    """What the posterior predicts at some inputs; see the module for the symbols.

    Args:
        num_inputs: How many inputs these are.
        distance: Between the predictions of posterior and prior.
        noise: How large the distance would be by chance.
        spread_ratio: The RMS of s over that of s₀.
        mean_output: The mean of |E_q f|.
        epistemic_share: Of the predicted uncertainty, where it divides.
        confidence: Mean over inputs, for classification.
        entropy: Mean over inputs, for classification.
    """

    num_inputs: int
    distance: float
    noise: float
    spread_ratio: float
    mean_output: float
    epistemic_share: float | None
    confidence: float | None
    entropy: float | None


@dataclass(frozen=True, repr=False)
class Diagnosis(Displayed):
    """A verdict, and the numbers it rests on.

    Args:
        verdict: What kind of posterior it is.
        reason: Why.
        advice: What to change.
        num_weights: Random weights.
        num_units: Hidden units.
        kl: KL(q‖prior) in nats: infinite for a point mass, None where it can't be known (a bag of
            samples).
        scale_ratio: The median of q's scale over the prior's.
        temperature: η of the last epoch, if training recorded it.
        predictions: At the inputs that were given; None without any.
    """

    verdict: State
    reason: str
    advice: str
    num_weights: int
    num_units: int
    kl: float | None
    scale_ratio: float
    temperature: float | None
    predictions: Predictions | None

    @property
    def kl_per_weight(self) -> float | None:
        """KL over the number of random weights."""
        return None if self.kl is None else self.kl / self.num_weights

    @property
    def kl_per_unit(self) -> float | None:
        """KL over the number of hidden units, as Huix et al. (2022) count."""
        return None if self.kl is None else self.kl / self.num_units

    def rows(self) -> list[tuple[str, str, str]]:
        """The numbers, each with its name and what it says."""
        table = [
            ("KL(q‖prior)", _number(self.kl), "nats; 0 is the prior itself"),
            ("  per weight", _number(self.kl_per_weight), f"{self.num_weights:,} random weights"),
            ("  per hidden unit", _number(self.kl_per_unit), f"{self.num_units:,} units"),
            ("scale / prior's", _number(self.scale_ratio), "median; 1 is the prior, 0 a point"),
            ("temperature η", _number(self.temperature), "in the last epoch"),
        ]
        p = self.predictions
        if p is None:
            return table
        table += [
            ("distance to prior", _number(p.distance), f"of predictions; noise {p.noise:.2g}"),
            ("spread / prior's", _number(p.spread_ratio), "how far sampled networks disagree"),
            ("mean |E f|", _number(p.mean_output), f"on {p.num_inputs:,} inputs"),
        ]
        optional = (
            ("epistemic share", p.epistemic_share, "of the uncertainty; 0 is one network"),
            ("confidence", p.confidence, "mean of the largest probability"),
            ("entropy", p.entropy, "mean, in nats"),
        )
        return table + [(n, _number(v), note) for n, v, note in optional if v is not None]

    def __str__(self) -> str:
        lines = [f"This posterior is {self.verdict}.", self.reason, self.advice, ""]
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        lines += [f"  {n:<{widths[0]}}  {v:>{widths[1]}}  {note}" for n, v, note in rows]
        return "\n".join(lines)

    def _display(self) -> Display:
        return Display(
            f"Diagnosis: this posterior is {self.verdict}",
            "print(diagnosis)",
            rows=self.rows(),
            notes=(self.reason, self.advice),
        )

    def __rich__(self) -> Table:
        colour = "green" if self.verdict == "balanced" else "yellow"
        title = f"[bold {colour}]This posterior is {self.verdict}[/]"
        table = Table(title=title, title_justify="left", caption=f"{self.reason}\n{self.advice}",
                      caption_justify="left", show_header=False)  # fmt: skip
        for name, value, note in self.rows():
            table.add_row(name, value, f"[dim]{note}[/]")
        return table


@checked
def diagnose(
    posterior: Annotated[Posterior, Remedy(lambda _: "Give what credo.fit returns")],
    data: Any = None,
    *,
    samples: Annotated[int, Range(2)] = 64,
    generator: Generator | None = None,
) -> Diagnosis:
    """What kind of posterior this is, and what to change.

    Args:
        posterior: As `credo.fit` returns it.
        data: Inputs (a tensor, an array, a mapping) of the kind that the network will meet, or as
            for `credo.fit` a pair (inputs, targets), a Dataset or a DataLoader; up to 1024 inputs
            are used, of a loader its first batch.
        samples: Networks drawn from the posterior and as many from the prior, with the same noise
            where both are diagonal Gaussians.
        generator: Of the draws.

    >>> import torch, credo
    >>> from credo.families import DiagGaussian
    >>> model = credo.Model(torch.nn.Linear(3, 2), credo.likelihoods.Categorical())
    >>> prior = credo.Posterior.at_network(model, model.prior_over_weights())
    >>> print(diagnose(prior, torch.ones(5, 3)))
    This posterior is ignoring the data.
    Its predictions are those of the prior: distance 0, at most ... counts as the same.
    ...
    """
    model, q = posterior.model, posterior.q
    prior = model.prior_over_weights()
    with torch.no_grad():
        total = _total_kl(q, prior, generator)
        ratio = float((q.scale / prior.scale).median())
        predictions = None
        if data is not None:
            predictions = _predictions(posterior, prior, _inputs(model, data), samples, generator)
    verdict, reason = (
        _judge_weights(q, total, ratio) if predictions is None else _judge(predictions)
    )
    history: dict[str, Any] = posterior.history[-1] if posterior.history else {}
    temperature = history.get("temperature")
    return Diagnosis(
        verdict=verdict,
        reason=reason,
        advice=_advice(verdict, q, temperature, predictions),
        num_weights=q.size,
        num_units=hidden_units(model.random.segments),
        kl=total,
        scale_ratio=ratio,
        temperature=None if temperature is None else float(temperature),
        predictions=predictions,
    )


def _inputs(model: Model, data: Any) -> Inputs:
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data)
    if isinstance(data, Mapping):
        data = {name: tensor for name, tensor in data.items() if name not in TARGET_KEYS}
    if not isinstance(data, Tensor | Mapping):
        return next(make_feed(data, MAX_INPUTS, model).batches(seed=0, epoch=0))[0]

    def some(x: Tensor) -> Tensor:
        if not x.dim() or not len(x):
            raise DataError(f"there are no inputs in a tensor of shape {tuple(x.shape)}")
        # Spread over the whole, because data are often sorted.
        rows = torch.linspace(0, len(x) - 1, min(len(x), MAX_INPUTS)).round().long()
        return x[rows.to(x.device)]

    return map_inputs(some, data)


def _total_kl(q: Family, prior: FlatDistribution, generator: Generator | None) -> float | None:
    if isinstance(q, Delta):
        return math.inf
    if not q.is_continuous and type(q) is not type(prior):
        return None
    try:
        return float(kl(q, prior))
    except UnsupportedError:
        source = generator or torch.Generator(q.mean.device).manual_seed(0)
        return float(kl_monte_carlo(q, prior, KL_SAMPLES, source)[0])


def _predictions(
    posterior: Posterior,
    prior: FlatDistribution,
    x: Inputs,
    samples: int,
    generator: Generator | None,
) -> Predictions:
    seed = 0 if generator is None else int(torch.randint(2**62, (), generator=generator))

    def predicted(p: Posterior) -> Predictive:
        # The same seed for both: with diagonal Gaussians the noise cancels in the distance.
        return p.predict(x, samples=samples, generator=torch.Generator().manual_seed(seed))

    if not isinstance(prior, Family):
        source = torch.Generator(posterior.mean.device).manual_seed(seed)
        prior = Empirical(prior.sample(samples, source))
    before = Posterior(posterior.model, prior, posterior.point, posterior.buffers, posterior.draws)
    now, then = predicted(posterior), predicted(before)
    m, s, m0, s0 = _centre(now), now.epistemic_std, _centre(then), then.epistemic_std
    if not all(bool(torch.isfinite(t).all()) for t in (m, s, m0, s0)):
        raise NonFiniteError(
            "the network's outputs are not finite on these inputs: look for NaN or huge values in "
            "them, and whether training diverged"
        )
    square = _mean_square(now, (m - m0).square() + (s - s0).square())
    # Means of n draws have variance s²/n, and their standard deviations about half that.
    noise = 1.5 * _mean_square(now, s.square() + s0.square()) / samples
    spread, prior_spread = (_mean_square(now, t.square()) for t in (s, s0))
    unit = 1.0
    if isinstance(now.likelihood, Regression):
        unit = float(then.variance.mean())
    elif not isinstance(now.likelihood, Classification):
        unit = prior_spread
    classifies = isinstance(now.likelihood, Classification)
    return Predictions(
        num_inputs=len(m),
        distance=_root_ratio(square, unit),
        noise=_root_ratio(noise, unit),
        spread_ratio=_root_ratio(spread, prior_spread),
        mean_output=float((now.outputs.mean(0) if classifies else m).abs().mean()),
        epistemic_share=_epistemic_share(now),
        confidence=float(now.confidence.mean()) if classifies else None,
        entropy=float(now.entropy.mean()) if classifies else None,
    )


def _centre(predictive: Predictive) -> Tensor:
    classifies = isinstance(predictive.likelihood, Classification)
    return predictive.probs if classifies else predictive.mean


def _mean_square(predictive: Predictive, squares: Tensor) -> float:
    """Summed over classes, averaged over everything else."""
    if isinstance(predictive.likelihood, Classification):
        if predictive.entropy.shape == squares.shape:
            return 2 * float(squares.mean())  # P(y = 1) stands for two classes
        squares = squares.sum(1)
    return float(squares.mean())


def _epistemic_share(predictive: Predictive) -> float | None:
    if isinstance(predictive.likelihood, Classification):
        part, whole = predictive.mutual_information, predictive.entropy
    elif isinstance(predictive.likelihood, Regression):
        part, whole = predictive.epistemic_std.square(), predictive.variance
    else:
        return None
    return float(part.mean()) / max(float(whole.mean()), torch.finfo(whole.dtype).tiny)


def _root_ratio(square: float, unit: float) -> float:
    return math.sqrt(square / unit) if unit > 0 else (0.0 if square == 0 else math.inf)


def _judge(p: Predictions) -> tuple[State, str]:
    limit = NEAR_PRIOR + p.noise
    if p.distance <= limit:
        return "ignoring the data", (
            f"Its predictions are those of the prior: distance {p.distance:.2g}, at most "
            f"{limit:.2g} counts as the same."
        )
    if p.epistemic_share is None and p.spread_ratio < POINT_SPREAD:
        return "nearly a point estimate", (
            f"Its sampled networks agree: they scatter {p.spread_ratio:.1%} as much as the prior's."
        )
    if p.epistemic_share is not None and p.epistemic_share < POINT_SHARE:
        return "nearly a point estimate", (
            "Its sampled networks agree, so it predicts as one network would: their disagreement "
            f"is {p.epistemic_share:.1%} of the uncertainty it states."
        )
    return "balanced", (
        f"Its predictions differ from the prior's (distance {p.distance:.2g}), and its sampled "
        "networks differ from each other."
    )


def _judge_weights(q: Family, total: float | None, ratio: float) -> tuple[State, str]:
    if total is not None and total <= NEAR_PRIOR_KL * q.size:
        return "ignoring the data", f"Its weights are those of the prior: {total:.2g} nats from it."
    if ratio < POINT_SPREAD:
        return "nearly a point estimate", (
            f"Half of its weights have less than {ratio:.2g} of the prior's scale."
            if ratio
            else "At least half of its weights have no spread at all."
        )
    return "balanced", (
        "Its weights are neither the prior's nor points. Give inputs to judge its predictions."
    )


def _advice(
    verdict: State, q: Family, temperature: float | None, predictions: Predictions | None
) -> str:
    if verdict == "ignoring the data":
        now = "" if temperature is None else f" (η was {temperature:.2g})"
        return (
            f"Lower the temperature{now}: temperature=credo.Balanced(tau=0.1), or a tenth of it, "
            "keeps the data's weight at any width; credo.tune_temperature finds one. If it is low "
            "already, train longer or raise lr."
        )
    if verdict == "nearly a point estimate":
        if isinstance(q, Delta):
            return (
                "A point estimate has no uncertainty of its own, and its KL is infinite: fit with "
                "credo.VI(), or put credo.Laplace() around the trained network."
            )
        if predictions is not None and predictions.spread_ratio > PRIOR_AGREES:
            return (
                "But so do the prior's: averaged over so many units, its networks hardly differ, "
                "and no temperature changes that. Choose a wider prior, or credo.priors.Normal."
                "kaiming() in a network that does not divide by its width."
            )
        now = "" if temperature is None else f" (η was {temperature:.2g})"
        return (
            f"Raise the temperature{now}: temperature=credo.Balanced(tau=1.0) or 1.0; see that the "
            "scales had time to move (scale_lr, epochs). With far more examples than weights this "
            "is how a posterior should look."
        )
    if predictions is not None and predictions.spread_ratio > AS_WIDE_AS_PRIOR:
        return (
            f"Its networks scatter {predictions.spread_ratio:.0%} as much as the prior's, though: "
            "a lower temperature may fit better; credo.tune_temperature compares."
        )
    return "There is nothing to change; credo.tune_temperature can still compare temperatures."


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
