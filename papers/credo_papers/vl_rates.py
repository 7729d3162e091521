r"""Unlu & Aitchison (2021), figure 2: what a faster rate for log σ does to VI and to VL.

Adam moves a parameter by its rate at most in each step. log σ starts at log s − 3, so with the rate
of the means it may not get back to log s in the whole of training: VI is then stopped early. The
paper multiplies that rate by 1, 3, 10 and 30, untempered (β = 1) and tempered (β = 0.1), and
says (§5.1) of the final values:

1. ``elbo_rises``: the larger the multiplier, the higher VI's ELBO.
2. ``nll_worsens`` and ``accuracy_falls``: the larger it is, the worse VI does on test data.
3. ``vl_robust``: VL is "reasonably robust"; read as: the range of its test NLL over the multipliers
   is at most half of VI's.
4. ``early_is_map``: early-stopped VI is "very similar to MAP"; read as: at multiplier 1 its test
   NLL is at most half as far from MAP's as it is at the largest multiplier.

1 and 2 are slopes by least squares on the logarithm of the multiplier. The rules were written
before any run: each statement at each β is tested over seeds with 95 % confidence; reproduced if
all hold, not reproduced if one is refuted. Figure 2 does not say how VI predicts: here by 10
samples, its mean being drawn as well. ELBOs are those that training reports, averages over the
last epoch; VL's rests on its own expansion of the likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes

from credo.report.style import (
    BLUE,
    GREEN,
    VERMILLION,
    blank_figure,
    faint_grid,
    house_style,
    save,
)
from credo.types import Json
from credo_papers.experiment import Experiment, Verdict, judgement, sign_of_mean, summarise
from credo_papers.vl_setup import ImageSettings, images, method, scores, trained

COLOURS = {"vi": BLUE, "vl": VERMILLION}
METHODS = {"vi": "VI", "vl": "VL"}
FINAL = {"nll": "test NLL", "accuracy": "test accuracy", "elbo": "ELBO per image"}
KINDS: tuple[Literal["vi", "vl"], ...] = ("vi", "vl")


@dataclass(frozen=True, kw_only=True)
class RateSettings(ImageSettings):
    """``multipliers`` of the rate of log σ, the smallest first."""

    data: str = "cifar10"
    betas: tuple[float, ...] = (1.0, 0.1)
    multipliers: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)


def run_one(settings: RateSettings, seed: int, folder: Path) -> Json:
    """VI and VL at every β and multiplier, and MAP at every β, all from the same weights."""
    data = images(settings, settings.data)
    num_data = len(data.train[1])
    result: Json = {"betas": list(settings.betas), "multipliers": list(settings.multipliers)}
    for beta in settings.betas:
        point = trained(
            settings, data, method("map", settings.lr, beta), seed, folder / f"map-{beta:g}"
        )
        result |= {f"map_{beta:g}_{k}": v for k, v in scores(point, data.test, "mean", 1).items()}
        for kind in KINDS:
            final: dict[str, list[float]] = {name: [] for name in (*FINAL, "mean_nll", "scale")}
            curves = []
            for multiplier in settings.multipliers:
                how = method(kind, settings.lr, beta, multiplier)
                place = folder / f"{kind}-{beta:g}-{multiplier:g}"
                posterior = trained(settings, data, how, seed, place)
                at_mean = scores(posterior, data.test, "mean", 1)
                sampled = scores(posterior, data.test, "samples", settings.prediction_samples)
                predicted = sampled if kind == "vi" else at_mean
                curve = [record["elbo"] / num_data for record in posterior.history]
                curves.append(curve)
                final["nll"].append(predicted["nll"])
                final["accuracy"].append(predicted["accuracy"])
                final["elbo"].append(curve[-1])
                final["mean_nll"].append(at_mean["nll"])
                final["scale"].append(posterior.history[-1]["mean_scale"])
            result |= {f"{kind}_{beta:g}_{name}": values for name, values in final.items()}
            result[f"{kind}_{beta:g}_curves"] = curves
    return result


def slope(multipliers: Sequence[float], values: Sequence[float]) -> float:
    """Of values on the logarithm of the multipliers, by least squares.

    >>> round(slope([1, 10, 100], [5.0, 6.0, 7.0]), 3)  # 1 for each factor of ten
    0.434
    """
    return float(np.polyfit(np.log(multipliers), values, 1)[0])


def margins(result: Json, beta: float) -> dict[str, float]:
    """For each statement, by how much it holds at this β; negative where it does not."""

    def of(kind: str, name: str) -> list[float]:
        values: list[float] = result[f"{kind}_{beta:g}_{name}"]
        return values

    trend = {name: slope(result["multipliers"], of("vi", name)) for name in FINAL}
    from_map = [abs(value - result[f"map_{beta:g}_nll"]) for value in of("vi", "nll")]
    return {
        "elbo_rises": trend["elbo"],
        "nll_worsens": trend["nll"],
        "accuracy_falls": -trend["accuracy"],
        "vl_robust": 0.5 * float(np.ptp(of("vi", "nll"))) - float(np.ptp(of("vl", "nll"))),
        "early_is_map": 0.5 * from_map[-1] - from_map[0],
    }


def check(results: list[Json]) -> Verdict:
    """Every statement at every β; the numbers ``<statement>_<β>_holds`` are 1, −1, or 0 for open.

    Also there: the margin by which each holds, and VI's and VL's NLL at the two ends.
    """
    betas = results[0]["betas"]
    rows: list[Json] = [
        {f"{name}_{beta:g}": value for beta in betas for name, value in margins(r, beta).items()}
        for r in results
    ]
    numbers = summarise([row | _ends(r) for row, r in zip(rows, results, strict=True)])
    signs = {f"{name}_holds": sign_of_mean([row[name] for row in rows]) for name in rows[0]}
    numbers |= {name: float(sign) for name, sign in signs.items()}
    return Verdict(judgement(signs.values()), numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Figure 2: a row for each β; ELBO over epochs for VI and VL, and the final values."""
    first = results[0]
    betas, multipliers = first["betas"], first["multipliers"]
    with house_style():
        figure = blank_figure(14.0, 0.5 + 2.8 * len(betas))
        rows = figure.subplots(len(betas), 5, squeeze=False)
        for beta, row in zip(betas, rows, strict=True):
            for axes, kind in zip(row, KINDS, strict=False):
                _draw_elbo(axes, results, kind, beta)
            row[1].sharey(row[0])
            row[0].autoscale()
            row[0].set_title(f"β = {beta:g}: VI")
            row[1].set_title("VL")
            for axes, (name, label) in zip(row[2:], FINAL.items(), strict=True):
                for kind in KINDS:
                    values = np.array([r[f"{kind}_{beta:g}_{name}"] for r in results])
                    colour = COLOURS[kind]
                    axes.plot(multipliers, values.T, color=colour, linewidth=0.7, alpha=0.4)
                    axes.plot(multipliers, values.mean(0), "o-", color=colour, label=METHODS[kind])
                if name == "nll":
                    at_mean = np.mean([r[f"vi_{beta:g}_mean_nll"] for r in results], axis=0)
                    axes.plot(multipliers, at_mean, "--", color=BLUE, label="VI at its mean")
                if name != "elbo":
                    height = np.mean([r[f"map_{beta:g}_{name}"] for r in results])
                    axes.axhline(float(height), color=GREEN, linestyle=":", label="MAP")
                axes.set(xscale="log", xlabel="multiplier of the rate of log σ", ylabel=label)
                axes.set_xticks(multipliers, [f"{m:g}" for m in multipliers])
                axes.minorticks_off()
                faint_grid(axes)
        rows[0][2].legend(fontsize=8)
        return [save(figure, folder / "vl-rates.png")]


def _draw_elbo(axes: Axes, results: list[Json], kind: str, beta: float) -> None:
    """Mean over seeds for each multiplier, the darker the larger."""
    multipliers = results[0]["multipliers"]
    curves = np.mean([r[f"{kind}_{beta:g}_curves"] for r in results], axis=0)
    for index, (multiplier, curve) in enumerate(zip(multipliers, curves, strict=True)):
        axes.plot(
            range(1, len(curve) + 1), curve, color=COLOURS[kind], label=f"×{multiplier:g}",
            alpha=0.25 + 0.75 * (index + 1) / len(multipliers),
        )  # fmt: skip
    axes.set(xlabel="epoch", ylabel="ELBO per image")
    axes.legend(fontsize=8)
    faint_grid(axes)


def _ends(result: Json) -> Json:
    """NLL and scale at the smallest and the largest multiplier."""
    return {
        f"{kind}_{beta:g}_{name}_at_{result['multipliers'][end]:g}": (
            result[f"{kind}_{beta:g}_{name}"][end]
        )
        for kind in KINDS
        for beta in result["betas"]
        for name in ("nll", "accuracy", "elbo", "scale")
        for end in (0, -1)
    } | {f"map_{beta:g}_nll": result[f"map_{beta:g}_nll"] for beta in result["betas"]}


EXPERIMENT = Experiment(
    id="002-learning-rates",
    paper="002",
    claim="Unlu & Aitchison (2021), fig. 2 and §5.1: as the rate of log σ is multiplied by 1, 3, "
    "10 and 30, VI's ELBO rises and its test NLL and accuracy get worse, at β = 1 and 0.1; "
    "Variational Laplace is robust; and VI stopped before its scales have moved behaves like MAP.",
    theorem=False,
    needs=("cifar10",),
    minutes=3,
    presets={
        # 18 runs of 640 steps: less than three minutes a seed. At multiplier 1 log σ moves by 1 at
        # most, a quarter of what it may in the paper.
        "quick": RateSettings(epochs=40),
        "paper": RateSettings(
            net="PreactResNet-18", pool=1, num_data=100_000, test_images=100_000, epochs=200,
            lr=1e-4,
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)  # fmt: skip
