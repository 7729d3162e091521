r"""Wolinski, Charpiat & Ollivier (2020), theorem 2: which penalties are priors, and which.

For a family β_{μ,ν} that moves with μ, a penalty r_ν(μ) is KL(β‖α) + const for some prior α if and
only if

    A_ν = −Ent(β_{0,ν}) − 𝓕⁻¹[𝓕r_ν / 𝓕β̌_{0,ν}]

doesn't depend on ν and e^A has a finite integral; then α ∝ e^A. The gallery holds penalties that
people use, says for each what the theorem must answer, and asks `credo.priors.from_penalty`. Where
there is a prior its density is compared with the known one, so a right answer by luck won't do.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from credo import priors
from credo.priors.penalty.heat_flow import mean_abs, normal_entropy
from credo.priors.penalty.solve import solve_penalty
from credo.report.style import BLACK, COLOURS, GREEN, GREY, VERMILLION, blank_figure, save
from credo.types import Json, Segment
from credo_papers.experiment import Experiment, Settings, Verdict

TOLERANCE = 1e-4
"""What a density may be off, at its worst point and relative to its maximum.

Closed forms are good to 1e-9; a deconvolved table to its rounding errors times e²⁰, about 1e-5.
"""

Array = NDArray[np.float64]
MIXTURE = priors.ScaleMixture(0.5, 1.0, 0.3)
POINTS = 241
WILD = 1e3
"""Beyond this an A is no log-density that anyone would draw on a linear scale."""


@dataclass(frozen=True)
class Picture:
    """A penalty, what it is trained with, and what the theorem says of it.

    ``log_density`` is ln α up to a constant, by other means; None where there is no prior.
    """

    title: str
    penalty: Callable[..., Any]
    log_density: Callable[[Array], Array] | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The title as a key."""
        return self.title.split(":")[0].replace(" ", "_").replace(",", "")


def _l2(mu: Array, sigma: float) -> Array:
    return 2 * (mu**2 + sigma**2) - normal_entropy(sigma)


def _averaged_l1(mu: Array, sigma: float) -> Array:
    return 2 * mean_abs(mu, sigma) - normal_entropy(sigma)


def _quartic(mu: Array, sigma: float) -> Array:
    return mu**4 + 6 * sigma**2 * mu**2 + 3 * sigma**4 - normal_entropy(sigma)


def _ripples(mu: Array, sigma: float) -> Array:
    ripple = math.exp(-(sigma**2) * 8) * np.cos(4 * mu)
    return 0.5 * (mu**2 + sigma**2) + ripple - normal_entropy(sigma)


def _mixture_log_density(x: Array) -> Array:
    return -priors.penalty_of(MIXTURE, "dirac")(x)


GALLERY = (
    Picture("L2 with σ: 2(μ²+σ²) − Ent", _l2, lambda x: -2 * x**2),
    Picture("L2 alone: 2μ²", lambda mu, sigma: 2 * mu**2, None),
    Picture("L2 alone, σ fixed: 2μ²", lambda mu, sigma: 2 * mu**2, lambda x: -2 * x**2,
            {"sigma": 0.3}),
    Picture("L1 alone: 2|μ|", lambda mu, sigma: 2 * np.abs(mu), None),
    Picture("L1 of a point: 2|μ|", lambda mu: 2 * np.abs(mu), lambda x: -2 * np.abs(x),
            {"family": "dirac"}),
    Picture("L1 averaged: 2E|θ| − Ent", _averaged_l1, lambda x: -2 * np.abs(x)),
    Picture("Quartic averaged: Eθ⁴ − Ent", _quartic, lambda x: -(x**4)),
    Picture("Quartic, σ fixed: μ⁴", lambda mu, sigma: mu**4,
            lambda x: -(x**4) + 6 * 0.3**2 * x**2, {"sigma": 0.3}),
    Picture("Ripples averaged: E[½θ²+cos 4θ] − Ent", _ripples,
            lambda x: -0.5 * x**2 - np.cos(4 * x)),
    Picture("Ripples alone: ½(μ²+σ²)+cos 4μ − Ent",
            lambda mu, sigma: _ripples(mu, sigma) + (1 - math.exp(-8 * sigma**2)) * np.cos(4 * mu),
            None),
    Picture("Mixture: KL to two Gaussians", priors.penalty_of(MIXTURE), _mixture_log_density),
    Picture("Cosine alone: cos 4μ", lambda mu, sigma: np.cos(4 * mu), None, {"sigma": 0.3}),
    Picture("Group lasso, Gaussian: 2‖μ‖ in 3 dim.", lambda radius, sigma: 2 * radius, None,
            {"dim": 3}),
    Picture("Group lasso of a point: 2‖μ‖ in 3 dim.", lambda radius: 2 * radius,
            lambda x: -2 * np.abs(x), {"family": "dirac", "dim": 3}),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GallerySettings(Settings):
    """Nothing is trained; ``pictures`` says how many of the gallery are hung."""

    net: str = "none: one weight, or a group of three"
    num_data: int = 0
    epochs: int = 0
    pictures: int = len(GALLERY)


def run_one(settings: GallerySettings, seed: int, folder: Path) -> Json:
    """Ask of every penalty; nothing is random, so the seed has no part in it."""
    shown = [_show(picture) for picture in GALLERY[: settings.pictures]]
    return {
        "right_verdicts": sum(picture["found"] == picture["expected"] for picture in shown),
        "pictures_shown": len(shown),
        "largest_density_error": max(picture["density_error"] for picture in shown),
        "pictures": shown,
    }


def _show(picture: Picture) -> Json:
    solution = solve_penalty(picture.penalty, **picture.options)
    half = _half_width(picture, solution.points)
    x = np.linspace(0 if picture.options.get("dim") else -half, half, POINTS)
    sigmas = solution.sigmas or (picture.options["sigma"],)
    near = np.abs(solution.points) <= half
    stride = max(1, int(near.sum()) // POINTS)
    shown: Json = {
        "title": picture.title,
        "name": picture.name,
        "expected": picture.log_density is not None,
        "found": not isinstance(solution.outcome, priors.NoPrior),
        "answer": _named(solution.outcome),
        "density_error": 0.0,
        "x": x.tolist(),
        "sigmas": list(sigmas),
        "penalties": [_penalty_at(picture, x, sigma) for sigma in sigmas],
        "points": solution.points[near][::stride].tolist(),
        "curves": [curve[near][::stride].tolist() for curve in solution.curves],
        "density": None,
    }
    if picture.log_density is None or isinstance(solution.outcome, priors.NoPrior):
        return shown
    density = _density(solution.outcome, x, picture.options.get("dim", 1))
    expected = np.exp(picture.log_density(x))
    wide = np.linspace(-12, 12, 48_001)
    shell = 2 * math.pi * wide**2 if picture.options.get("dim") else 1.0
    expected = expected / (np.exp(picture.log_density(wide)) * shell * (wide[1] - wide[0])).sum()
    error = float(np.abs(density - expected).max() / expected.max())
    return shown | {"density": density.tolist(), "density_error": error}


def _half_width(picture: Picture, points: Array) -> float:
    return min(3.0, float(np.abs(points).max())) if len(points) else 3.0


def _penalty_at(picture: Picture, x: Array, sigma: float) -> list[float]:
    values = picture.penalty(x) if sigma == 0 else picture.penalty(x, sigma)
    return np.asarray(values).tolist()


def _density(prior: Any, x: Array, dim: int) -> Array:
    """That of the prior on a line through the origin."""
    group = Segment("weight", (dim,), 0, dim, fan_in=1, fan_out=1, layer="", layer_type="Linear")
    points = torch.zeros(len(x), dim, dtype=torch.float64)
    points[:, 0] = torch.from_numpy(x)
    return prior.on([group], points[0]).log_prob(points).exp().numpy()


def _named(outcome: Any) -> str:
    if isinstance(outcome, priors.NoPrior):
        return textwrap.fill(outcome.reason.split(":")[0], 22)
    if isinstance(outcome, priors.Normal | priors.Laplace):
        return f"{type(outcome).__name__}, scale {outcome.scale:.3g}"
    return f"a table of {len(outcome.log_density)} knots"


def check(results: list[Json]) -> Verdict:
    """Every verdict as the theorem says, and every density the known one."""
    names = ("right_verdicts", "pictures_shown", "largest_density_error")
    numbers = {name: float(results[0][name]) for name in names}
    for picture in results[0]["pictures"]:
        numbers[f"{picture['name']}_has_a_prior"] = float(picture["found"])
    right = numbers["right_verdicts"] == numbers["pictures_shown"]
    exact = numbers["largest_density_error"] < TOLERANCE
    return Verdict("reproduced" if right and exact else "not reproduced", numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Three panels for each penalty: itself, the A_ν it leads to, the prior that comes of it."""
    pictures = results[0]["pictures"]
    rows = -(-len(pictures) // 2)
    figure = blank_figure(15, 1.7 * rows)
    grid = figure.subplots(rows, 6, squeeze=False)
    for axes in grid.flat[3 * len(pictures) :]:
        axes.set_axis_off()
    for panels, picture in zip(grid.reshape(-1, 3), pictures, strict=False):
        _draw(panels, picture)
    for column, axes in enumerate(grid[0]):
        heading = ("penalty", "A for each σ: must agree", "prior")[column % 3]
        place = {"xycoords": "axes fraction", "ha": "center", "fontsize": 12, "color": GREY}
        axes.annotate(heading, (0.5, 1.3), **place)
    for column, axes in enumerate(grid[-1]):
        axes.set_xlabel("θ" if column % 3 else "μ", fontsize=8, color=GREY)
    return [save(figure, folder / "penalty-gallery.png")]


def _draw(panels: Any, picture: Json) -> None:
    penalty, curves, prior = panels
    penalty.set_title(picture["title"], fontsize=9.5, loc="left", weight="bold")
    for sigma, values, colour in zip(
        picture["sigmas"], picture["penalties"], COLOURS, strict=False
    ):
        label = f"σ = {sigma:.2g}" if sigma else "Dirac"
        raised = np.asarray(values) - np.min(values)
        penalty.plot(picture["x"], raised, color=colour, label=label, lw=1.4)
    penalty.set_ylim(-0.3, 9)
    penalty.legend(fontsize=7, frameon=False, loc="upper center", handlelength=1.2)
    _draw_curves(curves, picture)
    if picture["density"] is None:
        _say(prior, f"no prior:\n{picture['answer']}", VERMILLION)
    else:
        prior.fill_between(picture["x"], picture["density"], color=GREEN, alpha=0.25, lw=0)
        prior.plot(picture["x"], picture["density"], color=GREEN, lw=1.6)
        prior.set_ylim(bottom=0)
        prior.set_title(picture["answer"], fontsize=8.5, loc="left", color=BLACK)
    if picture["found"] != picture["expected"]:
        prior.set_title("not what the theorem says", fontsize=9, color=VERMILLION)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7, colors=GREY)


def _draw_curves(axes: Axes, picture: Json) -> None:
    if not picture["curves"]:
        _say(axes, "not solved for:\nthe penalty doesn't rise", GREY)
        return
    wild = np.abs(picture["curves"]).max() > WILD
    for values, colour, style in zip(picture["curves"], COLOURS, ("-", "--", ":"), strict=False):
        look = {"lw": 0.5} if wild else {"lw": 1.6, "ls": style}
        axes.plot(picture["points"], values, color=colour, **look)
    if wild:
        axes.set_yscale("symlog", linthresh=10)
        axes.set_yticks([-1e4, 0, 1e4])
    else:
        axes.set_ylim(bottom=max(np.min(picture["curves"]), np.max(picture["curves"]) - 25))


def _say(axes: Axes, text: str, colour: str) -> None:
    axes.text(
        0.5, 0.5, text, ha="center", va="center", color=colour, fontsize=9,
        transform=axes.transAxes,
    )  # fmt: skip
    axes.set_axis_off()


EXPERIMENT = Experiment(
    id="001-penalty-gallery",
    paper="001",
    claim="Wolinski, Charpiat & Ollivier (2020), theorem 2 and its corollary: a penalty on the "
    "variational parameters is a KL to a prior if and only if A_ν, the penalty deconvolved, "
    "doesn't depend on ν and e^A can be normalised. So L2 needs its own function of σ (the paper's "
    "a and b exchanged), L1 and the group lasso of Gaussian means have no prior, and averaged or "
    "Dirac penalties have the expected ones.",
    theorem=True,
    minutes=0.2,
    presets={"quick": GallerySettings(), "paper": GallerySettings()},
    run_one=run_one,
    check=check,
    figures=figures,
)
