"""What a page says in words: the result in short, and what the numbers mean and do not mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from credo.report.contest import Contest, Section
from credo.report.scores import columns_of, score_of

FEW_SEEDS = 3

HEADLINES = {
    "classification": ("nll", "accuracy", "ood_auroc"),
    "dense": ("nll", "accuracy", "ood_auroc"),
    "regression": ("nll", "rmse", "ood_auroc"),
}


def in_short(contest: Contest) -> list[str]:
    """A few sentences that are true whatever the numbers are."""
    said = []
    for name in HEADLINES[contest.evidence.kind]:
        best = contest.best(name)
        if best:
            said.append(_headline(contest, name, best))
    near = [name for name in contest.finished if _at_floor(contest, name)]
    if near:
        one = len(near) == 1
        said.append(
            f"The calibration error of {_listed(near)} is within a tenth of its floor: on this "
            f"many {contest.unit} {'it' if one else 'they'} can’t be told from calibrated by it."
        )
    lost = [name for name in contest.names if contest.failures(name)]
    if lost:
        said.append(f"Failed, at least once: {_listed(lost)}; the table says why.")
    if contest.finished and len(contest.seeds) < FEW_SEEDS and len(contest.finished) > 1:
        said.append(
            f"With {'one seed' if len(contest.seeds) == 1 else 'two seeds'} the order of methods "
            "that are close is not settled."
        )
    return said


def _headline(contest: Contest, name: str, best: str) -> str:
    score, known = score_of(name), contest.summary(best, name)
    error = known.error_text(score.form)
    value = f"{known.text(score.form)}{' ' + error if error else ''}"
    extreme = "Highest" if score.better > 0 else "Lowest"
    equals = contest.as_good_as(best, name)
    told = [n for n in contest.judged if n != best and n not in equals]
    tail = ""
    if equals and not told:
        tail = "; no other method can be told apart from it"
    elif equals:
        tail = f"; {_listed(equals)} can’t be told apart from it"
    heading = score.heading if score.heading.isupper() else score.heading.lower()
    heading = heading.replace("auroc", "AUROC")
    return f"{extreme} {heading}: {best}, {value}{tail}."


def _at_floor(contest: Contest, name: str) -> bool:
    error, floor = contest.summary(name, "ece"), contest.summary(name, "ece_floor")
    return bool(error.count and floor.count and error.mean <= 1.1 * floor.mean)


def _listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> _listed(["MAP", "VI", "IVON"])
    'MAP, VI and IVON'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def meanings(contest: Contest) -> Section:
    """Every column explained, then what holds for all of them."""
    entries = [
        (score.heading, score.meaning)
        for name in columns_of(contest.evidence.runs)
        if (score := score_of(name)).meaning
    ]
    entries += [
        (
            "± and few seeds",
            "The standard error over seeds says how far a mean would move if everything were "
            "trained again with other seeds. From two or three seeds it is itself known only "
            "roughly. It does not say what another test set would do.",
        ),
        (
            "Paired differences",
            "Methods are compared on the same seeds and the same test examples, so that what these "
            "do to both cancels. Two methods can differ clearly although their ± overlap, and the "
            "other way round.",
        ),
        (
            "Told apart",
            "A filled dot, or “significant”, means: a paired t-test at the level of 5 %, corrected "
            "by Holm’s method for the number of methods that are compared in one score. An ≈ is "
            "less strict: the 95 % interval of the difference to the best holds 0. Neither is a "
            "probability that a method is better, both say nothing about other data sets, and what "
            "is not told apart may still differ: there may only be too few seeds.",
        ),
        (
            "What is not here",
            "All of this is one network on one data set at one setting of each method. A method "
            "that was tuned on these data looks better than it is.",
        ),
    ]
    return Section("meaning", "What the numbers mean, and what they do not", extra=entries)


def settings(contest: Contest) -> Section:
    """What made the page, as nested lists of names and values."""
    warned = {
        name: list(
            dict.fromkeys(
                str(text)
                for run in contest.runs(name)
                for text in run.settings.get("warnings") or ()
            )
        )
        for name in contest.names
    }
    methods = [
        (
            name,
            contest.looks[name].key,
            flat(next((run.settings for run in contest.evidence.runs if run.method == name), {})),
            warned[name],
        )
        for name in contest.names
    ]
    skipped = ("notes", "reference") if contest.reference is None else ("notes",)
    about = [pair for pair in flat(contest.evidence.about) if pair[0] not in skipped]
    return Section("settings", "What made this", extra={"about": about, "methods": methods})


def flat(nested: Mapping[str, Any], where: str = "") -> list[tuple[str, str]]:
    """Names with dots and values as text; warnings are shown elsewhere.

    >>> flat({"method": {"type": "VI", "lr": 0.003}, "epochs": 5})
    [('method.type', 'VI'), ('method.lr', '0.003'), ('epochs', '5')]
    """
    found = []
    for key, value in nested.items():
        name = f"{where}.{key}" if where else str(key)
        if name == "warnings":
            continue
        if isinstance(value, Mapping):
            found += flat(value, name)
        else:
            text = "none" if value is None else str(value)
            found.append((name, text if len(text) <= 400 else text[:399] + "…"))
    return found
