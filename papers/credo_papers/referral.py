r"""Filos et al. (2019), as Khan's tutorial tells it: the unsure are sent to a doctor. On Pima.

A. Filos et al., "A systematic comparison of Bayesian deep learning robustness in diabetic
retinopathy tasks", 2019 (arXiv:1912.10481): a network diagnoses, and hands the examples of largest
predictive entropy to an expert. Accuracy and AUROC of those it keeps rise with the share referred;
of all methods ensemble MC dropout does best. Their images are not here. The question is asked of
a table about the same illness, the Pima women (768 rows; zeros in five columns are missing values
and filled with the training mean), by a network 8-50-50-2.

A seed is ``splits`` random splits in 70 and 30 %, whose scores are averaged. Every method has the
library's defaults, half a cosine and the same epochs; MC dropout's p is 0.2. A curve is summarised
by its mean over the kept shares from 50 to 100 %, as in the paper's figures. Rules, written before
any run, each with 95 % confidence over seeds:

1. ``beats_random``: every method's accuracy of the kept exceeds that of all rows, which is what
   referral at random gives;
2. ``auroc_beats_random``: so does AUROC;
3. ``ensemble_dropout_wins``: ensemble MC dropout's mean accuracy exceeds the best of the others'.

Reproduced if all hold, not reproduced if one is refuted. (The third is hard: it compares with the
best of several in each seed, so that methods that are equally good refute it.) The cost of a
referral policy is reported (an error costs 1, a referral 0.25; the threshold is chosen on half of
the test rows and its cost read off the other half), and so is `credo.metrics.RetentionCurve.gain`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import credo
from credo.method import Method
from credo.metrics.selective import Measure
from credo.report.style import BLACK, blank_figure, coloured, faint_grid, house_style, save
from credo.types import Json
from credo_papers.experiment import (
    Experiment,
    Settings,
    Verdict,
    judgement,
    sign_of_mean,
    summarise,
)
from credo_papers.pima_table import filled, pima
from credo_papers.saved_scores import saved
from credo_papers.shift_setup import schedule_of, swag

CAPTIONS = {
    "map": "MAP",
    "dropout": "MC dropout",
    "ensemble": "ensemble",
    "ensemble_dropout": "ensemble MC dropout",
    "vi": "VI",
    "swag": "SWAG",
    "laplace": "Laplace",
}
SHARES = np.linspace(0.5, 1.0, 11)
"""Of the examples that are kept."""

ERROR_COST, REFERRAL_COST = 1.0, 0.25


@dataclass(frozen=True, kw_only=True)
class ReferralSettings(Settings):
    """``num_data`` training rows of the table; ``splits`` of it are averaged in a seed."""

    net: str = "8-50-50-2"
    num_data: int = 537
    epochs: int
    splits: int
    batch_size: int = 32
    members: int = 5
    dropout: float = 0.2
    prediction_samples: int


def methods(dropout: float, members: int) -> dict[str, Method[Any] | None]:
    """All that are trained; None is one that the library does not have."""
    return {
        "map": credo.MAP(),
        "dropout": credo.MCDropout(p=dropout),
        "ensemble": credo.Ensemble(credo.MAP(), members=members),
        "ensemble_dropout": credo.Ensemble(credo.MCDropout(p=dropout), members=members),
        "vi": credo.VI(),
        "swag": swag(),
        "laplace": credo.Laplace(structure="kron", train=credo.MAP()),
    }


def run_one(settings: ReferralSettings, seed: int, folder: Path) -> Json:
    """Every method on the same splits, from the same weights."""
    result: Json = {"skipped": []}
    for name, method in methods(settings.dropout, settings.members).items():
        if method is None:
            result["skipped"].append(f"{name}: this version of the library has no credo.SWAG")
            continue
        result |= saved(
            folder / name / "scores.json",
            settings,
            lambda name=name, method=method: _scores(settings, name, method, seed),  # type: ignore[misc]
        )
    return result


def _scores(settings: ReferralSettings, name: str, method: Method[Any], seed: int) -> Json:
    x, y = pima()
    splits = []
    for split in range(settings.splits):
        number = seed * settings.splits + split
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
        train, test = order[: settings.num_data], order[settings.num_data :]
        inputs, held = filled(x[train], x[test])
        posterior = credo.fit(
            credo.Model(_network(number), credo.likelihoods.Categorical()), method,
            (inputs, y[train]), epochs=settings.epochs, batch_size=settings.batch_size,
            seed=number, progress=False, schedule=schedule_of(name),
        )  # fmt: skip
        probs = posterior.predict(held, samples=settings.prediction_samples).probs
        splits.append(referral_scores(probs, y[test], binary=True))
    return {
        f"{name}_{key}": np.mean([scores[key] for scores in splits], axis=0).tolist()
        for key in splits[0]
    }


def _network(seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2)
        )


def referral_scores(probs: Tensor, y: Tensor, binary: bool) -> Json:
    """Of one set of predictions: curves at `SHARES`, their means and gains, a policy's price."""
    measures: tuple[Measure, ...] = ("accuracy", "nll", "auroc") if binary else ("accuracy", "nll")
    scores: Json = {"ece": credo.metrics.ece(probs, y)}
    for measure in measures:
        curve = credo.metrics.referral(probs, y, measure=measure)
        values = [curve.at(float(share)) for share in SHARES]
        scores |= {
            f"{measure}_curve": values,
            f"{measure}_kept": float(np.mean(values)),
            f"{measure}_half": values[0],
            f"{measure}_all": values[-1],
            f"{measure}_gain": curve.gain,
        }
    wrong = (probs.argmax(1) != y).double()
    unsure = 1 - probs.amax(1)
    prices = {"error_cost": ERROR_COST, "referral_cost": REFERRAL_COST}
    chosen = credo.metrics.referral_costs(wrong[::2], unsure[::2], **prices)
    others = credo.metrics.referral_costs(wrong[1::2], unsure[1::2], **prices)
    return scores | {
        "cost": others.at(chosen.best_threshold),
        "cost_by_chow": others.at(REFERRAL_COST / ERROR_COST),
        "cost_of_keeping": ERROR_COST * float(wrong[1::2].mean()),
    }


def present(results: Sequence[Json], captions: Mapping[str, str] = CAPTIONS) -> list[str]:
    """The methods that every seed has."""
    return [name for name in captions if all(f"{name}_accuracy_kept" in r for r in results)]


def margins(results: Sequence[Json]) -> dict[str, list[float]]:
    """For each statement, by how much it holds in each seed; negative where it does not."""
    names = present(results)
    rivals = [name for name in names if name != "ensemble_dropout"]

    def least_gain(result: Json, measure: str) -> float:
        return min(
            float(result[f"{name}_{measure}_kept"] - result[f"{name}_{measure}_all"])
            for name in names
        )

    return {
        "beats_random": [least_gain(r, "accuracy") for r in results],
        "auroc_beats_random": [least_gain(r, "auroc") for r in results],
        "ensemble_dropout_wins": [
            r["ensemble_dropout_accuracy_kept"] - max(r[f"{n}_accuracy_kept"] for n in rivals)
            for r in results
        ],
    }


def judged(results: list[Json], statements: Mapping[str, list[float]]) -> Verdict:
    """``<statement>_holds`` is 1, −1, or 0 for undecided; all must hold, and none may fail."""
    keys = [
        key
        for key, value in results[0].items()
        if isinstance(value, int | float) and all(key in r for r in results)
    ]
    numbers = summarise(results, keys)
    signs = {f"{name}_holds": sign_of_mean(values) for name, values in statements.items()}
    numbers |= {name: float(sign) for name, sign in signs.items()}
    return Verdict(judgement(signs.values()), numbers)


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring."""
    return judged(results, margins(results))


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Accuracy and AUROC of the kept rows against the share that is kept."""
    return [
        referral_figure(
            results, folder / "referral.png", {"accuracy": "accuracy", "auroc": "AUROC"}, CAPTIONS
        )
    ]


def referral_figure(
    results: Sequence[Json], path: Path, panels: Mapping[str, str], captions: Mapping[str, str]
) -> Path:
    """A panel for each measure; a line each method, its mean over seeds with a standard error."""
    with house_style():
        figure = blank_figure(4.8 * len(panels), 4.2)
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (measure, label) in zip(row, panels.items(), strict=True):
            for name, colour in coloured(present(results, captions)):
                values = np.array([r[f"{name}_{measure}_curve"] for r in results])
                mean = values.mean(0)
                axes.plot(SHARES, mean, color=colour, label=captions[name], linewidth=1.4)
                if len(values) > 1:
                    error = values.std(0, ddof=1) / len(values) ** 0.5
                    axes.fill_between(SHARES, mean - error, mean + error, color=colour, alpha=0.1)
            at_random = np.mean([r[f"map_{measure}_all"] for r in results])
            axes.axhline(at_random, color=BLACK, linestyle=":", linewidth=1, label="MAP, at random")
            axes.set(xlabel="share of rows that is kept", ylabel=f"{label} of the kept")
            faint_grid(axes)
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        return save(figure, path)


EXPERIMENT = Experiment(
    id="004-referral",
    paper="004",
    claim="Khan (2019), with the retinopathy study of Filos et al. (2019): referring the cases of "
    "largest uncertainty to an expert makes predictions for the others better than referral at "
    "random does, and ensemble MC dropout's uncertainty is the best. (There: photographs of eyes. "
    "Here: the Pima diabetes table.)",
    theorem=False,
    needs=("pima",),
    minutes=1.5,
    presets={
        "quick": ReferralSettings(epochs=40, splits=3, prediction_samples=64),
        "paper": ReferralSettings(epochs=40, splits=20, prediction_samples=256),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
