r"""Two works pull apart: should the scales learn faster than the means, or slower?

Unlu & Aitchison (2021, §5; below: 002) give log σ ten times the rate of the means, for otherwise
the ELBO has not converged. Book (2020, fig. 5.10; below: 003) wants a tenth of it or less, for
otherwise accuracy suffers. They differ in more than the rate: 002 has σ = e^ρ from e⁻³ of the
prior's scale, 003 has σ = ln(1 + e^ρ) from ρ₀ = −10, nearly a point. So everything is crossed, on
CIFAR-10:

=============  ======================================================================
ratio          0.1 (003), 1, 10 (002)
link           exp (002), softplus (003)
initial scale  "tiny" (003), "small" (002: e⁻³ of the prior's; `credo.VI` starts at
               0.05, the same), "wide" (0.3 of the prior's)
optimizer      Adam (both), AdaBound (003's favourite)
=============  ======================================================================

The reading that is tested: both are right, each for its own measure, and the measures disagree. The
rules, written before any run, all with Adam:

1. ``accuracy_wants_slow_in_003``: at 003's link and start, ratio 0.1 beats 10 in test accuracy.
2. ``elbo_wants_fast_in_002``: at 002's link and start, ratio 10 beats 0.1 in ELBO.
3. ``elbo_wants_fast_in_003``, ``accuracy_wants_slow_in_002``: the same with the settings exchanged,
   so that it is the measure and not the setting which decides.

What each choice buys is among the numbers and in the second figure: ``effect_<choice>_<measure>``
is the mean over all else of the measure with the second option less that with the first (ratio 10
less 0.1, softplus less exp, small less tiny, wide less small, AdaBound less Adam).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from credo.families.links import LinkName
from credo.report.style import (
    BLUE,
    GREY,
    VERMILLION,
    blank_figure,
    coloured,
    faint_grid,
    house_style,
    save,
)
from credo.types import Json
from credo_papers.experiment import Experiment, Verdict, mean_and_error
from credo_papers.study_setup import (
    MEASURES,
    PAPER,
    TINY,
    SharedRuns,
    StudySettings,
    averages,
    judge,
    margins,
    set_name,
    value,
)

RATIOS = (0.1, 1.0, 10.0)
LINKS: tuple[LinkName, ...] = ("exp", "softplus")
STARTS = {"tiny": TINY, "small": math.exp(-3), "wide": 0.3}
OPTIMIZERS = {"adam": "Adam", "adabound": "AdaBound"}
STARTS_IN_WORDS = {"tiny": "ρ₀ = −10 (003)", "small": "e⁻³ of the prior (002)", "wide": "0.3"}

THESIS, LAPLACE = ("softplus", "tiny"), ("exp", "small")
"""Link and start of Book (2020) and of Unlu & Aitchison (2021)."""

CHOICES = {
    "fast_scales": ("ratio", "0.1", "10"),
    "softplus": ("link", "exp", "softplus"),
    "small_start": ("start", "tiny", "small"),
    "wide_start": ("start", "small", "wide"),
    "adabound": ("optimizer", "adam", "adabound"),
}
CHOICES_IN_WORDS = {
    "fast_scales": "ratio 10, not 0.1",
    "softplus": "softplus, not exp",
    "small_start": "start small, not tiny",
    "wide_start": "start wide, not small",
    "adabound": "AdaBound, not Adam",
}
AXES = ("optimizer", "link", "start", "ratio")


@dataclass(frozen=True, kw_only=True)
class CrossSettings(StudySettings):
    """``lr`` is the rate of the means."""

    data: str = "cifar10"
    lr: float = 3e-3
    prediction_samples: int = 8


def cross() -> Iterator[tuple[str, str, LinkName, str, float]]:
    """Label and options of every combination."""
    for optimizer, link, start, ratio in product(OPTIMIZERS, LINKS, STARTS, RATIOS):
        yield f"{optimizer}_{link}_{start}_{ratio:g}", optimizer, link, start, ratio


def run_one(settings: CrossSettings, seed: int, folder: Path) -> Json:
    """All 36 combinations from the same weights."""
    shared = SharedRuns(settings, seed, folder)
    runs = {
        label: shared.run(
            shared.trial(
                settings.data, optimizer=optimizer, link=link, init_scale=STARTS[start],
                lr=settings.lr, scale_ratio=ratio,
            )
        )
        for label, optimizer, link, start, ratio in cross()
    }  # fmt: skip
    result: Json = {"data": settings.data, "runs": runs}
    effects = {
        f"{choice}_{measure}": effect(result, choice, measure)
        for choice in CHOICES
        for measure in MEASURES
    }
    # A diverged run leaves its pair out; with all pairs gone there is nothing to print.
    return result | {name: number for name, number in effects.items() if math.isfinite(number)}


def effect(result: Json, choice: str, measure: str) -> float:
    """The measure with the choice's second option less that with its first, over all else.

    Where one run of a pair has no such number the pair is left out; NaN if none is left.
    """
    axis, before, after = CHOICES[choice]
    place = AXES.index(axis)
    differences = []
    for label, *_ in cross():
        parts = label.split("_")
        if parts[place] != before:
            continue
        parts[place] = after
        difference = value(result, "_".join(parts), measure) - value(result, label, measure)
        if math.isfinite(difference):
            differences.append(difference)
    return float(np.mean(differences)) if differences else math.nan


def preference(result: Json, setting: tuple[str, str], measure: str) -> float:
    """What ratio 10 gains over 0.1 in a measure, with Adam at this link and start."""
    fast, slow = (
        value(result, f"adam_{setting[0]}_{setting[1]}_{ratio}", measure) for ratio in ("10", "0.1")
    )
    return fast - slow


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring."""

    def gains(setting: tuple[str, str], measure: str) -> list[float]:
        return margins(results, partial(preference, setting=setting, measure=measure))

    statements = {
        "accuracy_wants_slow_in_003": [-gain for gain in gains(THESIS, "accuracy")],
        "elbo_wants_fast_in_002": gains(LAPLACE, "elbo"),
        "elbo_wants_fast_in_003": gains(THESIS, "elbo"),
        "accuracy_wants_slow_in_002": [-gain for gain in gains(LAPLACE, "accuracy")],
    }
    numbers = averages(results)
    for choice, measure in product(CHOICES, MEASURES):
        mean, error = mean_and_error([effect(r, choice, measure) for r in results])
        if math.isfinite(mean):
            numbers[f"effect_{choice}_{measure}"] = mean
        if math.isfinite(error):
            numbers[f"effect_{choice}_{measure}_se"] = error
    return judge(statements, numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """All combinations against the ratio; and what each choice buys."""
    with house_style():
        return [
            _draw_combinations(results, folder / "disagreement.png"),
            _draw_effects(results, folder / "disagreement-effects.png"),
        ]


def _draw_combinations(results: Sequence[Json], path: Path) -> Path:
    figure = blank_figure(12.0, 6.2)
    rows = figure.subplots(len(OPTIMIZERS), len(MEASURES), sharex=True, sharey="col")
    for (optimizer, name), row in zip(OPTIMIZERS.items(), rows, strict=True):
        for axes, (measure, title) in zip(row, MEASURES.items(), strict=True):
            for (start, colour), link in product(coloured(STARTS), LINKS):
                labels = [f"{optimizer}_{link}_{start}_{ratio:g}" for ratio in RATIOS]
                values = np.array([[value(r, x, measure) for x in labels] for r in results])
                axes.plot(
                    RATIOS, np.ma.masked_invalid(values).mean(0), "o-" if link == "exp" else "s--",
                    color=colour, markersize=4, label=f"{STARTS_IN_WORDS[start]}, {link}",
                )  # fmt: skip
            axes.set(xscale="log", ylabel=title)
            axes.set_xticks(RATIOS, [f"{ratio:g}" for ratio in RATIOS])
            axes.minorticks_off()
            faint_grid(axes)
        row[0].set_title(name)
    for axes in rows[-1]:
        axes.set_xlabel("rate of scales / rate of means")
    data = results[0]["data"]
    figure.suptitle(set_name(data))
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return save(figure, path)


def _draw_effects(results: Sequence[Json], path: Path) -> Path:
    figure = blank_figure(11.0, 2.8)
    panels = figure.subplots(1, len(MEASURES), sharey=True)
    for axes, (measure, title) in zip(panels, MEASURES.items(), strict=True):
        for place, choice in enumerate(CHOICES):
            values = np.array([effect(r, choice, measure) for r in results])
            # More KL is neither good nor bad.
            good = values.mean() * (-1 if measure == "nll" else 1) > 0
            colour = GREY if measure == "kl" else (BLUE if good else VERMILLION)
            axes.barh(place, values.mean(), color=colour, alpha=0.5)
            axes.scatter(values, np.full(len(values), place), s=12, color=colour)
        axes.axvline(0.0, color=GREY, linewidth=1)
        axes.set_xlabel(f"change of {title}")
        axes.set_yticks(range(len(CHOICES)), [CHOICES_IN_WORDS[choice] for choice in CHOICES])
    panels[0].invert_yaxis()
    panels[0].set_title("What each choice buys (blue) or costs (red)")
    return save(figure, path)


EXPERIMENT = Experiment(
    id="003-disagreement",
    paper="003",
    claim="Ours, on Unlu & Aitchison (2021) and Book (2020): scales that learn ten times faster "
    "than the means give the better ELBO (the former), scales that learn ten times slower the "
    "better accuracy (the latter), and each holds at the other's parametrisation and initial scale "
    "too: the measures disagree.",
    theorem=False,
    ours=True,
    needs=("cifar10",),
    minutes=2,
    presets={
        "quick": CrossSettings(),
        "paper": CrossSettings(
            **(PAPER | {"estimator": "reparam", "prediction_samples": 10}), lr=1e-3
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
