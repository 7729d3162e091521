"""Sections of a page about scores: paired differences, shift, price, and how training went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from credo.report.contest import Contest, Group, Panel, Section, thinned
from credo.report.evidence import Run
from credo.report.panels import Line, draw_lines, line_over_seeds
from credo.report.scores import columns_of, is_number, score_of
from credo.report.style import GREY, faint_grid
from credo.report.svg import Mark, inline_svg, marks_at, page_style, panel

COMPARED = ("nll", "accuracy", "rmse", "brier", "crps", "ece", "ood_auroc", "retention_area")
"""The scores whose differences are drawn, where there are any."""

SHIFTED = ("accuracy", "rmse", "nll", "crps", "ece", "coverage")

RECORDS: Mapping[str, str] = {
    "nll": "Training NLL",
    "val_nll": "Validation NLL",
    "val_accuracy": "Validation accuracy",
    "val_rmse": "Validation RMSE",
    "kl": "KL to the prior (nats)",
    "temperature": "Temperature",
    "elbo": "ELBO (nats)",
    "mean_scale": "Mean standard deviation of the weights",
}
"""What of a training's records is drawn, in this order."""

LOGARITHMIC = ("kl", "temperature")
"""Records that may differ by orders of magnitude between methods."""

PAIRED_BY = {
    "seeds": "The differences are paired by seed, {} of them: a seed decides the starting weights "
    "and the order of the data, so what it does to both methods cancels. The intervals say how "
    "training again with other seeds would come out, not what other test data would do.",
    "examples": "There is one seed, so the differences are paired by test example, where a score "
    "is a mean over examples, and the others have no interval. The intervals say how these two "
    "trained networks would compare on other examples of the same kind; training again with "
    "another seed may well turn the order round.",
}

LONGEST_NAME = 19


def differences(contest: Contest) -> Section | None:
    """Every method's scores minus those of the first, seed by seed."""
    if len(contest.judged) < 2:
        return None
    base, *others = contest.judged
    scores = [name for name in COMPARED if name in columns_of(contest.evidence.runs)]
    panels = [shown for score in scores if (shown := _differences(contest, base, others, score))]
    if not panels:
        return None
    words = [
        f"Each dot is a method’s score minus that of {base}, the first in the list; arrows say "
        "which side is better. Lines are 95 % intervals of Student’s t. Filled dots are told apart "
        "from 0 at the level of 5 %, corrected for the number of methods (Holm 1979); hollow ones "
        "may be chance, also where their own interval, which knows of no other, leaves out 0.",
        PAIRED_BY[contest.paired_by].format(len(contest.seeds)),
    ]
    return Section("differences", f"Compared with {base}", words, [Group(panels)])


def _differences(contest: Contest, base: str, others: Sequence[str], name: str) -> Panel | None:
    score, gaps = score_of(name), contest.differences(others, base, name)
    if not any(math.isfinite(gap.mean) for gap in gaps):
        return None
    form = score.form.replace("{:", "{:+") if "%" in score.form else "{:+.3g}"
    said, marks = [], []
    with page_style():
        figure, axes = panel(height=58 + 24 * len(others), left=118, top=8, bottom=46)
        axes.axvline(0, color=GREY, linewidth=1)
        for row, (other, gap) in enumerate(zip(others, gaps, strict=True)):
            look, interval = contest.looks[other], math.isfinite(gap.low)
            if interval:
                axes.plot(
                    [gap.low, gap.high], [row, row], color=look.colour, linewidth=1.8,
                    solid_capstyle="round", gid=look.key,
                )  # fmt: skip
            axes.plot(
                [gap.mean], [row], look.marker, color=look.colour, markersize=7, gid=look.key,
                markerfacecolor=look.colour if gap.told_apart else "white", markeredgewidth=1.5,
            )  # fmt: skip
            words = form.format(gap.mean)
            if interval:
                words += f" (95 %: {form.format(gap.low)} to {form.format(gap.high)})"
            said.append(f"{other} {words}" + (", told apart" if gap.told_apart else ""))
        axes.set_yticks(range(len(others)), [_short(other) for other in others], parse_math=False)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_ylim(len(others) - 0.4, -0.6)
        axes.locator_params(axis="x", nbins=4)
        if "%" in score.form:
            axes.xaxis.set_major_formatter(
                lambda value, _: f"{100 * value:+.3g}%" if value else "0"
            )
        else:
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.3g}" if value else "0")
        if score.better:
            axes.set_xlabel("better →" if score.better > 0 else "← better")
        heads = [f"{other} − {base}" for other in others]
        texts = [one.removeprefix(f"{other} ") for one, other in zip(said, others, strict=True)]
        for row, (other, gap) in enumerate(zip(others, gaps, strict=True)):
            key = contest.looks[other].key
            marks += marks_at(axes, [gap.mean], [row], [heads[row]], [texts[row]], key)
        svg = inline_svg(figure, f"difference-{name}")
    label = f"{score.heading} minus that of {base}: {'; '.join(said)}."
    return Panel(score.heading, label, svg, marks=marks)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def shifts(contest: Contest) -> Section | None:
    """Scores over severity: the mean over all shifts, then each by itself."""
    names = [name for name in contest.finished if any(run.shifts for run in contest.runs(name))]
    if not names:
        return None
    kinds = list(
        dict.fromkeys(
            one.shift for name in names for run in contest.runs(name) for one in run.shifts
        )
    )
    scores = [
        score
        for score in SHIFTED
        if any(score in one.scores for n in names for run in contest.runs(n) for one in run.shifts)
    ]
    groups = []
    if len(kinds) > 1:
        panels = [_shift(contest, names, kinds, score, index) for index, score in enumerate(scores)]
        groups.append(Group([one for one in panels if one], f"Mean of {len(kinds)} shifts"))
    for index, kind in enumerate(kinds, start=1):
        panels = [
            _shift(contest, names, [kind], score, f"{index}-{number}")
            for number, score in enumerate(scores)
        ]
        groups.append(Group([one for one in panels if one], kind, folded=len(kinds) > 1))
    words = (
        "The same test examples, made harder step by step; severity 0 is as they are. Every method "
        "gets worse. What to look for is whether its confidence falls with its accuracy: a rising "
        "NLL or ECE means that it does not."
        + (" Bands are ± 1 standard error over the seeds." if len(contest.seeds) > 1 else ""),
    )
    return Section("shift", "What happens under shift?", words, groups, legend=True)


def _shift(
    contest: Contest, names: Sequence[str], kinds: Sequence[str], score: str, index: Any
) -> Panel | None:
    lines, form = [], score_of(score).form
    for name in names:
        runs = [_severities(run, kinds, score) for run in contest.runs(name)]
        common = sorted(set.intersection(*(set(run) for run in runs)))
        if len(common) > 1:
            values = [[run[severity] for severity in common] for run in runs]
            lines.append(line_over_seeds(contest.looks[name], common, values, error=True))
    if not lines:
        return None
    with page_style():
        figure, axes = panel()
        draw_lines(axes, lines)
        axes.set(xlabel="severity", ylabel=score_of(score).heading)
        axes.set_xticks(sorted({float(x) for line in lines for x in line.x}))
        axes.xaxis.set_major_formatter("{x:g}")
        if "%" in form:
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        marks = _line_marks(axes, lines, lambda x: f"severity {x:g}", form)
        svg = inline_svg(figure, f"shift-{index}")
    by_key = {look.key: name for name, look in contest.looks.items()}
    ends = "; ".join(
        f"{by_key[line.look.key]} from {form.format(line.y[0])} to {form.format(line.y[-1])}"
        for line in lines
    )
    where = kinds[0] if len(kinds) == 1 else f"the mean of {len(kinds)} shifts"
    label = f"{score_of(score).heading} under {where}, by severity: {ends}."
    return Panel(score_of(score).heading, label, svg, marks=marks, by_column=True)


def _severities(run: Run, kinds: Sequence[str], score: str) -> dict[int, float]:
    """The score by severity, the mean over the shifts that have it at each."""
    by_severity: dict[int, list[float]] = {}
    if is_number(run.scores.get(score)):
        by_severity[0] = [float(run.scores[score])]
    for one in run.shifts:
        if one.shift in kinds and one.severity > 0 and is_number(one.scores.get(score)):
            by_severity.setdefault(one.severity, []).append(float(one.scores[score]))
    return {severity: float(np.mean(values)) for severity, values in by_severity.items()}


def price(contest: Contest) -> Section | None:
    """A dot for each method: what its training took, and how good it is."""
    quality = next((s for s in ("nll", "rmse") if contest.best(s)), None)
    names = [n for n in contest.finished if contest.values(n, "train_seconds")]
    if quality is None or len(names) < 2:
        return None
    score = score_of(quality)
    pairs = {
        n: (contest.summary(n, "train_seconds").mean, contest.summary(n, quality).mean)
        for n in names
    }
    from matplotlib.ticker import LogLocator

    marks, said = [], []
    with page_style():
        figure, axes = panel(width=420, height=270, left=58)
        axes.set_xscale("log")
        for name, (seconds, value) in pairs.items():
            look = contest.looks[name]
            axes.plot(
                [seconds], [value], look.marker, color=look.colour, markersize=9,
                markeredgecolor="white", gid=look.key,
            )  # fmt: skip
        axes.set(xlabel="seconds of training", ylabel=score.heading)
        axes.margins(0.08)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        faint_grid(axes)
        for name, (seconds, value) in pairs.items():
            text = f"{score.heading} {score.form.format(value)} for {seconds:.3g} s"
            said.append(f"{name}: {text}")
            key = contest.looks[name].key
            marks += marks_at(axes, [seconds], [value], [name], [text], key)
        svg = inline_svg(figure, "price")
    label = f"{score.heading} over the seconds of training. {'; '.join(said)}."
    words = (
        "Down and to the left is better: a low error for little time. Times are of the machine "
        "that ran this, with whatever else ran on it.",
    )
    shown = Panel(f"{score.heading} and time", label, svg, marks=marks, wide=True)
    return Section("price", "What does it cost?", words, [Group([shown])], legend=True)


def training(contest: Contest) -> Section | None:
    """What was logged epoch by epoch."""
    panels = []
    for index, (record, title) in enumerate(RECORDS.items()):
        lines = [line for name in contest.finished if (line := _history(contest, name, record))]
        if not lines:
            continue
        with page_style():
            figure, axes = panel(left=56)
            draw_lines(axes, lines, dots=8)
            axes.set(xlabel="epoch")
            axes.locator_params(axis="y", nbins=5)
            axes.locator_params(axis="x", integer=True)
            values = np.concatenate([line.y for line in lines])
            if record in LOGARITHMIC and 0 < 20 * values.min() < values.max():
                axes.set_yscale("log")
            axes.yaxis.set_major_formatter(_plain)
            marks = _line_marks(axes, lines, lambda x: f"epoch {x:g}", "{:.4g}")
            svg = inline_svg(figure, f"training-{index}")
        by_key = {look.key: name for name, look in contest.looks.items()}
        ends = "; ".join(f"{by_key[line.look.key]} {line.y[-1]:.4g}" for line in lines)
        label = f"{title} by epoch. At the end: {ends}."
        panels.append(Panel(title, label, svg, marks=marks, by_column=True))
    if not panels:
        return None
    words = (
        "Logged at the end of every epoch"
        + ("; the mean over the seeds, with a band of ± 1 standard error. " if _several(contest)
           else ". ")
        + "The KL is how far the posterior has moved from the prior, and the temperature how much "
        "that costs: below 1 the data count for more than Bayes’ rule says. Methods that have "
        "neither are absent from those figures. The scale of the KL differs between priors and "
        "methods; a lower one is not better.",
    )  # fmt: skip
    return Section("training", "How did training go?", words, [Group(panels)], legend=True)


def _several(contest: Contest) -> bool:
    return any(len(contest.runs(name)) > 1 for name in contest.finished)


def _history(contest: Contest, name: str, record: str) -> Line | None:
    runs = []
    for run in contest.runs(name):
        values = [entry[record] for entry in run.history if is_number(entry.get(record))]
        if len(values) > 1 and np.isfinite(values).all():
            runs.append(np.asarray(values, dtype=float))
    if not runs:
        return None
    length = min(len(values) for values in runs)  # early stopping ends runs at different epochs
    at = thinned(length, 120)
    return line_over_seeds(
        contest.looks[name], at + 1, np.stack([values[at] for values in runs]), error=True
    )


def _line_marks(axes: Any, lines: Sequence[Line], head: Any, form: str) -> list[Mark]:
    marks: list[Mark] = []
    for line in lines:
        at = thinned(len(line.x), 40)
        heads = [head(x) for x in line.x[at]]
        texts = [form.format(value) for value in line.y[at]]
        marks += marks_at(axes, line.x[at], line.y[at], heads, texts, line.look.key)
    return marks


def _plain(value: float, _: Any) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
