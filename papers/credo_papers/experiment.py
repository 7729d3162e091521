"""What an experiment is: a claim, settings to test it at, and a verdict with numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from scipy import stats

from credo.types import Json

Judgement = Literal["reproduced", "not reproduced", "inconclusive"]
JUDGEMENTS: tuple[str, ...] = get_args(Judgement)
VERDICTS = (*JUDGEMENTS, "not testable here")
"""What a row of the ledger may say; the last of them is no outcome of a run."""
PRESETS = ("quick", "paper")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every experiment must say of its scale; a subclass adds its own knobs.

    ``num_data`` counts training examples; a theorem that trains nothing has 0 of them.
    """

    net: str
    num_data: int
    epochs: int


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Verdict:
    """What the results say about the claim, and the numbers it rests on."""

    verdict: Judgement
    numbers: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Experiment(Generic[S]):
    """One claim of a paper and the code that tests it.

    Args:
        id: The number of the work that makes the claim, and a name: ``003-kl-weights``.
        paper: The number alone; the bibliography says which work it is.
        claim: What the paper says, in our words and with its place.
        theorem: Whether it holds exactly rather than on average.
        presets: "quick" (minutes on two cores) and "paper" (the original setting).
        run_one: ``run_one(settings, seed, folder)`` is one seed's run: numbers, and lists of
            numbers for the figures.
        check: ``check(results)`` judges the results of all seeds together.
        figures: ``figures(results, folder)`` draws them and returns the files.
        minutes: About how long one seed of the quick preset takes on one core: reckoned from the
            number and size of its trainings, to tell seconds from an hour.
        needs: What the quick preset reads from the folder that CREDO_DATA names, and packages
            beyond those of Credo.
        ours: Whether the statement is our own, about the paper's subject, instead of the paper's.
    """

    id: str
    paper: str
    claim: str
    theorem: bool
    presets: Mapping[str, S]
    run_one: Callable[[S, int, Path], Json]
    check: Callable[[list[Json]], Verdict]
    figures: Callable[[list[Json], Path], list[Path]]
    minutes: float
    needs: tuple[str, ...] = ()
    ours: bool = False

    def scale(self, preset: str) -> Json:
        """The scale a verdict holds at: preset, network, data size, epochs and the other knobs."""
        return {"preset": preset, **asdict(self.presets[preset])}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and its standard error; the latter is NaN for a single seed.

    >>> mean_and_error([1.0, 2.0, 3.0])
    (2.0, 0.577...)
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def summarise(results: Sequence[Json], names: Sequence[str] | None = None) -> dict[str, float]:
    """Mean of each number over the seeds, and its standard error as ``<name>_se``.

    ``names`` defaults to every entry that is a single number. With one seed there is no error.

    >>> summarise([{"nll": 1.0, "curve": [3, 1]}, {"nll": 2.0, "curve": [4, 2]}])
    {'nll': 1.5, 'nll_se': 0.5}
    """
    chosen = names or [name for name, value in results[0].items() if _is_number(value)]
    numbers = {}
    for name in chosen:
        mean, error = mean_and_error([float(result[name]) for result in results])
        numbers[name] = mean
        if math.isfinite(error):
            numbers[f"{name}_se"] = error
    return numbers


def sign_of_mean(values: Sequence[float], confidence: float = 0.95) -> int:
    """1 or −1 if the mean over seeds is above or below 0 with this confidence, 0 if neither.

    Each side is a one-sided t-test, so three seeds need a mean of 2.9 standard errors, and a single
    seed never decides.

    >>> sign_of_mean([0.9, 1.0, 1.1]), sign_of_mean([-1.0, 1.0, 0.5]), sign_of_mean([7.0])
    (1, 0, 0)
    """
    if len(values) < 2:
        return 0
    mean, error = mean_and_error(values)
    if abs(mean) <= float(stats.t.ppf(confidence, len(values) - 1)) * error:
        return 0
    return 1 if mean > 0 else -1


def judgement(signs: Iterable[float]) -> Judgement:
    """Of statements that hold (1), fail (−1) or are open (0): all must hold, and none may fail.

    >>> judgement([1, 1]), judgement([1, 0]), judgement([1, 0, -1])
    ('reproduced', 'inconclusive', 'not reproduced')
    """
    worst = min(signs)
    if worst > 0:
        return "reproduced"
    return "not reproduced" if worst < 0 else "inconclusive"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
