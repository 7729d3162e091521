r"""Book (2020), eqs. 2.0.4 and 2.0.5: a prior moves the estimate of a coin's probability.

The observations y = (0, 1) have the likelihood p(1 − p), largest at ½. With the prior Beta(a, b)
the posterior is Beta(a + s, b + n − s), s successes in n observations, and its mode is

    p_MAP = (a + s − 1) / (a + b + n − 2),

which is 0.6 for Beta(3, 2). The thesis's footnote counts a successes and b failures; the *mode*
weighs a − 1 and b − 1 of them (with the footnote's counts it would be 4/7), the *mean* a and b.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar

from credo.report.style import blank_figure, save
from credo.types import Json
from credo_papers.experiment import Experiment, Settings, Verdict

TOLERANCE = 1e-6
"""A minimum found from function values alone is known to the square root of float64's rounding."""


@dataclass(frozen=True, kw_only=True)
class CoinSettings(Settings):
    """The prior's counts and what was observed."""

    net: str = "none: one Bernoulli probability"
    num_data: int = 2
    epochs: int = 0
    a: float = 3.0
    b: float = 2.0
    successes: int = 1


def posterior_mode(a: float, b: float, successes: int, num_data: int) -> float:
    """(a + s − 1)/(a + b + n − 2): the mode of Beta(a + s, b + n − s), for a + s, b + n − s > 1.

    >>> posterior_mode(3, 2, successes=1, num_data=2)
    0.6
    >>> posterior_mode(1, 1, successes=1, num_data=2)      # a flat prior: maximum likelihood
    0.5
    """
    return (a + successes - 1) / (a + b + num_data - 2)


def run_one(settings: CoinSettings, seed: int, folder: Path) -> Json:
    """Closed form and numerical maximum; nothing is random, so the seed has no part in it."""
    s, n, a, b = settings.successes, settings.num_data, settings.a, settings.b

    def maximum(heads: float, tails: float) -> float:
        optimum = minimize_scalar(
            lambda p: -heads * np.log(p) - tails * np.log1p(-p),
            bounds=(0, 1),
            method="bounded",
            options={"xatol": 1e-12},
        )
        return float(optimum.x)

    return {
        "mle": maximum(s, n - s),
        "map": maximum(s + a - 1, n - s + b - 1),
        "map_closed_form": posterior_mode(a, b, s, n),
        "map_if_prior_counts_were_a_and_b": maximum(s + a, n - s + b),
    }


def check(results: list[Json]) -> Verdict:
    """The thesis's two numbers, and the closed form against the numerical maximum."""
    r = results[0]
    right = (
        abs(r["mle"] - 0.5) < TOLERANCE
        and abs(r["map"] - 0.6) < TOLERANCE
        and abs(r["map"] - r["map_closed_form"]) < TOLERANCE
    )
    return Verdict("reproduced" if right else "not reproduced", dict(r))


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Likelihood and posterior over p, with their maxima."""
    settings = CoinSettings()
    s, n = settings.successes, settings.num_data
    p = np.linspace(0, 1, 401)
    likelihood = p**s * (1 - p) ** (n - s)
    posterior = likelihood * p ** (settings.a - 1) * (1 - p) ** (settings.b - 1)
    figure = blank_figure(5, 3)
    axes = figure.subplots()
    for curve, label, at in (
        (likelihood, "likelihood", results[0]["mle"]),
        (posterior, "posterior", results[0]["map"]),
    ):
        (line,) = axes.plot(p, curve / curve.max(), label=f"{label}, maximum at {at:.2f}")
        axes.axvline(at, color=line.get_color(), linestyle=":")
    axes.set(xlabel="p", ylabel="relative to its maximum")
    axes.legend()
    return [save(figure, folder / "beta-bernoulli.png")]


EXPERIMENT = Experiment(
    id="003-beta-bernoulli",
    paper="003",
    claim="Book (2020), eq. 2.0.5: after one failure and one success the maximum-likelihood "
    "probability is 0.5, and with a Beta(3, 2) prior the maximum a posteriori is 0.6 (its mode "
    "weighs a − 1 and b − 1, not the a and b of the footnote, which would give 4/7).",
    theorem=True,
    minutes=0.1,
    presets={"quick": CoinSettings(), "paper": CoinSettings()},
    run_one=run_one,
    check=check,
    figures=figures,
)
