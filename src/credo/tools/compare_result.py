"""What a comparison found: a table, its summary, differences that are more than chance, a page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from torch import nn

from credo import report
from credo.checks import Probability, checked, nearest
from credo.display import Display, Displayed
from credo.errors import DataError
from credo.metrics.agreement import agreement, total_variation, w2
from credo.metrics.paired import Paired, holm, paired
from credo.posterior.loading import load
from credo.posterior.posterior import Posterior
from credo.report.evidence import Evidence, Run
from credo.sampling.chains import UNMIXED
from credo.storage import write_atomically
from credo.tools.compare_rows import WIDTH, Rows, latex, latex_table, text_table
from credo.tools.compare_scores import SCORES, about
from credo.types import Json

Unit = Literal["seeds", "examples"]

PRICES = ("train_seconds", "train_mib", "predict_seconds", "predict_mib")
"""What a method takes, and not how good it is."""

WITHOUT_ERROR = ("ece_floor", "ece_floor_std")
"""What is known well enough to be printed alone."""

SHOWN_IN_HTML = 12


class Comparison(Displayed):
    """Several methods on the same data, seed by seed; `credo.compare` makes it.

    ``print`` shows the summary in 80 columns, with what is to be known about it below.

    Args:
        evidence: All runs, and what they were tried on.
        reference: The name of the method that the others are compared with, if there is one.
        places: The folder of each finished run, by method and seed.
    """

    def __init__(
        self,
        evidence: Evidence,
        reference: str | None = None,
        places: dict[tuple[str, int], Path] | None = None,
    ) -> None:
        self.reference = reference
        self._places = places or {}
        runs = beside_reference(evidence.runs, reference)
        facts = {**evidence.about, "reference": reference}
        self._evidence = replace(evidence, runs=runs, about=facts)
        self._evidence.about["notes"] = self.notes  # type: ignore[index]

    @property
    def evidence(self) -> Evidence:
        """All runs with their arrays, for figures and pages."""
        return self._evidence

    @property
    def runs(self) -> Sequence[Run]:
        """One for each method and seed."""
        return self._evidence.runs

    @property
    def methods(self) -> list[str]:
        """Their names, in the order of the call."""
        return list(dict.fromkeys(run.method for run in self.runs))

    @property
    def table(self) -> Rows:
        """One row for each method and seed: its scores, or the error that it failed with."""
        names = self._names()
        return Rows(
            {
                "method": run.method,
                "seed": run.seed,
                "status": self._status(run),
                **{name: run.scores[name] for name in names if name in run.scores},
                **({"error": run.error} if run.error else {}),
            }
            for run in self.runs
        )

    @property
    def shift_table(self) -> Rows:
        """One row for each method, seed, shift and severity; 0 are the examples as they are."""
        rows = Rows()
        for run in (run for run in self.runs if run.error is None):
            names = list(dict.fromkeys(name for each in run.shifts for name in each.scores))
            for shift in dict.fromkeys(each.shift for each in run.shifts):
                key = {"method": run.method, "seed": run.seed, "shift": shift}
                clean = {name: run.scores[name] for name in names if name in run.scores}
                rows.append({**key, "severity": 0, **clean})
                rows.extend(
                    {**key, "severity": each.severity, **each.scores}
                    for each in run.shifts
                    if each.shift == shift
                )
        return rows

    @property
    def summary(self) -> Rows:
        """One row for each method: the mean of each score over the seeds, and its standard error.

        The standard error of a score is under its name with "_se"; NaN for a single seed.
        """
        rows = Rows()
        for method in self.methods:
            runs = [run for run in self.runs if run.method == method]
            finished = [run for run in runs if run.error is None]
            row: Json = {"method": method, "seeds": len(finished)}
            row["failed"] = len(runs) - len(finished)
            for name in self._names():
                values = [run.scores[name] for run in finished if name in run.scores]
                if values:
                    row[name], row[f"{name}_se"] = _mean_and_error(values)
            rows.append(row)
        return rows

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers must know: failures, warnings, a reference that is none."""
        failed: dict[tuple[str, str], list[str]] = {}
        for run in (run for run in self.runs if run.error is not None):
            failed.setdefault((run.method, str(run.error)), []).append(str(run.seed))
        notes = [
            f"{method}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}, failed. {error}"
            for (method, error), seeds in failed.items()
        ]
        notes += self._about_reference()
        for method in self.methods:
            heard: dict[str, int] = {}
            for run in (run for run in self.runs if run.method == method):
                for text in run.settings.get("warnings", ()):
                    heard[text] = heard.get(text, 0) + 1
            notes += [f"{method}: {text}" for text in heard]
        return notes

    @checked
    def differences(
        self,
        baseline: str | None = None,
        scores: Sequence[str] | None = None,
        unit: Unit | None = None,
        level: Probability = 0.05,
    ) -> Rows:
        """Every method's scores minus the baseline's: paired, tested and corrected.

        By Student's paired t, over seeds (would it be so again with other seeds?) or over test
        examples (would it be so on other examples, for these very networks?); Holm's method
        corrects for the number of methods within each score. A difference is significant where its
        corrected p is below ``level``. See `credo.metrics.paired`.

        Args:
            baseline: The method to subtract; the first one if it is not said.
            scores: Their names; by default all that say how good a method is.
            unit: "seeds", or "examples" for those scores that are means over examples (accuracy,
                nll, brier; nll, crps, mse, coverage): ECE and AUROC are none. By default seeds if
                there are two or more, else examples.
            level: Of the tests of one score, all together.
        """
        chosen = baseline if baseline is not None else self.methods[0]
        if chosen not in self.methods:
            raise DataError(
                f"baseline={chosen!r} is no method of this comparison: they are "
                f"{', '.join(self.methods)}.{nearest(chosen, self.methods)}"
            )
        unit = unit or self._default_unit()
        known = self._tested(unit)
        for name in scores or ():
            if name not in known:
                raise DataError(
                    f"scores has {name!r}, which has no differences over {unit}: those that have "
                    f"are {', '.join(known)}.{nearest(name, known)}"
                )
        others = [m for m in self.methods if m not in (chosen, self.reference)]
        rows = Rows()
        for name in known if scores is None else scores:
            found = [self._paired(other, chosen, name, unit) for other in others]
            corrected = holm([each.p for each in found])
            for other, each, p in zip(others, found, corrected, strict=True):
                if each.count:
                    rows.append(_difference(other, chosen, name, unit, each, p, level))
        return rows

    def to_csv(self, path: str | Path | None = None) -> str:
        """`table` as comma-separated values, unrounded.

        Args:
            path: A file to write, too.
        """
        return self.table.to_csv(path)

    def to_latex(self, path: str | Path | None = None) -> str:
        r"""`summary` as a tabular for LaTeX, which needs ``\usepackage{booktabs}``; best in bold.

        Args:
            path: A file to write, too.
        """
        names = self._columns()
        best = self._best(names)
        rows = []
        for row in self.summary:
            cells = [latex(row["method"])]
            for name in names:
                text = latex(_cell(row, name))
                cells.append(rf"\textbf{{{text}}}" if row["method"] in best[name] else text)
            rows.append(cells)
        return latex_table(["method", *(about(name).heading for name in names)], rows, path)

    def save_html(self, path: str | Path) -> Path:
        """Write the page: one file that needs no network.

        Args:
            path: The file.
        """
        target = Path(path)
        write_atomically(target, report.comparison_page(self.evidence).encode())
        return target

    def posterior(self, method: str, net: nn.Module, seed: int | None = None) -> Posterior:
        """The posterior of a run, from the comparison's folder.

        Args:
            method: Its name.
            net: A network such as ``make_model`` builds.
            seed: The run's; by default the first that finished.

        Raises:
            DataError: There is no such run, or the comparison had no folder.
        """
        found = [place for key, place in self._places.items() if key[0] == method and (
            seed is None or key[1] == seed
        )]  # fmt: skip
        if not self._places:
            raise DataError(
                "posteriors are kept in the folder of a comparison, and this one had none: call "
                "credo.compare(…, folder=…)"
            )
        if not found:
            which = "" if seed is None else f" with seed {seed}"
            raise DataError(
                f"there is no finished run of {method!r}{which}: the methods are "
                f"{', '.join(self.methods)}"
            )
        return load(found[0] / "posterior.safetensors", net)

    def __str__(self) -> str:
        names = self._columns()
        rows = [
            [row["method"], *(_cell(row, name) for name in names)]
            if row["seeds"]
            else [row["method"], "failed", *[""] * (len(names) - 1)]
            for row in self.summary
        ]
        header = [about(name).heading for name in names] or ["status"]
        lines = [text_table(["method", *header], rows)]
        lines += ["", *_wrapped(self._reading())]
        notes = self.notes
        if notes:
            lines += ["", *_wrapped(f"- {note}" for note in notes)]
        return "\n".join(lines)

    def _display(self) -> Display:
        names = self._columns()[:SHOWN_IN_HTML]
        failed = sum(run.error is not None for run in self.runs)
        seeds = len(dict.fromkeys(run.seed for run in self.runs))
        count = f"{len(self.methods)} methods, {seeds} seed{'s' * (seeds > 1)}"
        return Display(
            f"Comparison: {count}, {self._evidence.kind}"
            + (f", {failed} failed" if failed else ""),
            'print(result); result.differences(); result.save_html("page.html")',
            [[row["method"], *(_cell(row, name) for name in names)] for row in self.summary],
            ["method", *(about(name).heading for name in names)],
            [*self._reading(), *self.notes],
        )

    def _names(self) -> list[str]:
        """Of all scores, those that are known first."""
        present = dict.fromkeys(name for run in self.runs for name in run.scores)
        return [name for name in SCORES if name in present] + [
            name for name in present if name not in SCORES
        ]

    def _columns(self) -> list[str]:
        """The scores in the order in which a narrow table shows them: seconds before the rest."""
        names = self._names()
        first = [n for n in names if about(n).better and n not in PRICES and ":" not in n][:4]
        beside = ["ece_floor"] if "ece_floor" in names else []
        first = [each for n in first for each in (n, *(beside if n == "ece" else ()))]
        if self.reference is not None:
            judged = ("agreement", "total_variation", "w2", "r_hat")
            first = [*first[:3], *(n for n in judged if n in names)]
        first = list(dict.fromkeys([*first, *(n for n in ("train_seconds",) if n in names)]))
        return [*first, *(name for name in names if name not in first)]

    def _best(self, names: Sequence[str]) -> dict[str, set[str]]:
        """The methods whose mean prints best, score by score."""
        rows, best = self.summary, {}
        for name in names:
            known = about(name)
            values = {
                row["method"]: round(row[name], known.digits) * known.better
                for row in rows
                if name in row and row["method"] != self.reference
            }
            top = max(values.values(), default=0.0)
            best[name] = {m for m, value in values.items() if known.better and value == top}
        return best

    def _status(self, run: Run) -> str:
        if run.error is not None:
            return "failed"
        return "not converged" if run.method == self.reference and not _converged(run) else (
            "finished"
        )  # fmt: skip

    def _about_reference(self) -> list[str]:
        if self.reference is None:
            return []
        run = next((r for r in self.runs if r.method == self.reference), None)
        if run is None or run.error is not None:
            return ["The reference failed, so nothing is compared with it."]
        chains = run.settings.get("r_hat") or {}
        if not chains:
            return [
                f"{self.reference} has no chains whose agreement (R̂) would say whether it is one: "
                "take it as one more opinion."
            ]
        worst, nll = chains.get("predictions_max", math.nan), chains.get("nll", math.nan)
        said = f"R̂ is {nll:.3f} for the training NLL and at most {worst:.3f} for predictions"
        if _converged(run):
            return [f"{self.reference}: {said}; its chains agree."]
        return [
            f"{self.reference} HAS NOT CONVERGED: {said}. Distances to it are not distances to the "
            "posterior; run it for more epochs."
        ]

    def _reading(self) -> list[str]:
        seeds = len(dict.fromkeys(run.seed for run in self.runs))
        about_test = self._evidence.about.get("test", "?")
        lines = [
            f"Means over {seeds} seeds ± standard errors, {about_test} test examples."
            if seeds > 1
            else f"One seed, {about_test} test examples: chance of training is not seen."
        ]
        unit = self._default_unit()
        several = len(self.methods) - (self.reference is not None) > 1
        if several and "nll" in self._tested(unit):
            rows = [row for row in self.differences(scores=["nll"]) if row["significant"]]
            told = ", ".join(f"{row['method']} {row['difference']:+.3g}" for row in rows)
            lines.append(
                f"NLL that differs from that of {self.methods[0]} by more than chance (paired over "
                f"{unit}, Holm, 5 %): {told or 'none'}."
            )
        return lines

    def _default_unit(self) -> Unit:
        seeds = dict.fromkeys(run.seed for run in self.runs if run.method != self.reference)
        return "seeds" if len(seeds) > 1 else "examples"

    def _tested(self, unit: Unit) -> list[str]:
        """The scores that can be compared over this unit."""
        if unit == "seeds":
            return [n for n in self._names() if about(n).better and n not in PRICES]
        arrays = {name for run in self.runs for name in run.arrays}
        return [n for n, known in SCORES.items() if known.terms and known.terms in arrays]

    def _paired(self, method: str, baseline: str, name: str, unit: Unit) -> Paired:
        one, other = (
            {r.seed: r for r in self.runs if r.method == m and r.error is None}
            for m in (method, baseline)
        )
        seeds = [seed for seed in one if seed in other]
        if unit == "seeds":
            both = [s for s in seeds if name in one[s].scores and name in other[s].scores]
            return paired(
                [one[s].scores[name] for s in both], [other[s].scores[name] for s in both]
            )
        terms = about(name).terms
        both = [s for s in seeds if terms in one[s].arrays and terms in other[s].arrays]
        if not both:
            return paired([], [])
        means = [np.mean([runs[s].arrays[terms] for s in both], axis=0) for runs in (one, other)]
        return paired(*means)


def beside_reference(runs: Iterable[Run], reference: str | None) -> list[Run]:
    """Every run with its distance to the reference's predictions among its scores.

    Args:
        runs: The reference's among them.
        reference: Its name.
    """
    runs = list(runs)
    standard = next((r for r in runs if r.method == reference and r.error is None), None)
    if standard is None:
        return runs
    return [
        run
        if run.error is not None or run.method == reference
        else replace(run, scores={**run.scores, **_distances(run, standard)})
        for run in runs
    ]


def _distances(run: Run, standard: Run) -> dict[str, float]:
    if "probs" in standard.arrays and "probs" in run.arrays:
        pair = run.arrays["probs"], standard.arrays["probs"]
        return {
            "agreement": float(agreement(*pair)),
            "total_variation": float(total_variation(*pair)),
        }
    if "samples" in standard.arrays and "samples" in run.arrays:
        return {"w2": float(w2(run.arrays["samples"], standard.arrays["samples"]))}
    return {}


def _converged(run: Run) -> bool:
    chains = run.settings.get("r_hat") or {}
    worst, nll = chains.get("predictions_max", math.nan), chains.get("nll", math.nan)
    return bool(max(worst, nll) <= UNMIXED)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    array = np.asarray(values, dtype=np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else math.nan
    return float(array.mean()), error


def _difference(
    method: str, baseline: str, name: str, unit: Unit, found: Paired, p: float, level: float
) -> Json:
    significant = bool(p < level)
    ahead = found.difference * about(name).better
    return {
        "method": method,
        "score": name,
        "difference": found.difference,
        "standard_error": found.standard_error,
        "p_holm": p,
        "significant": significant,
        "better": (method if ahead > 0 else baseline) if significant and ahead else "",
        "baseline": baseline,
        "unit": unit,
        "n": found.count,
        "t": found.t,
        "p": found.p,
    }


def _cell(row: Json, name: str) -> str:
    """A mean with its standard error, as narrow as it can be read."""
    digits, value = about(name).digits, row.get(name)
    if value is None or not math.isfinite(value):
        return ""
    text, error = f"{value:.{digits}f}", row.get(f"{name}_se", math.nan)
    if not math.isfinite(error) or name in WITHOUT_ERROR:
        return text
    spread = f"{error:.{digits}f}"
    return f"{text}±{spread.removeprefix('0') if digits else spread}"


def _wrapped(texts: Iterable[str]) -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, WIDTH, subsequent_indent="  " if text[:1] == "-" else "")
    ]
