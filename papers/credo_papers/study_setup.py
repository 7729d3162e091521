r"""What the experiments of Book (2020) on training share: data, network, runs and their verdicts.

The thesis (§4.2, §4.3): LeNet-5 with max-pooling and ReLU, batches of 100, standardised images
without augmentation, Kaiming's prior, the ELBO proper, σ = ln(1 + e^ρ) with ρ₀ = −10, means and
scales at the same rate, Adam at 10⁻³ unless said.

Three things differ here.

- `credo.VI` starts scales at a fraction of the prior's. ``TINY`` makes that σ₀ = ln(1 + e^−10) in
  the first linear layer, which has three quarters of the weights, and up to four times as much in
  the others.
- The quick presets have a sixteenth of the images and about 200 steps instead of 25,000: at rate
  10⁻³ no ρ moves by more than 0.2 of the 7 to the prior's scale. What they say is said of the
  beginning of training, and of a q that is nearly a point, as the thesis's is at first.
- The thesis drops the score function (§5.1). The path derivative that is left adds noise of size
  1/(nσ) to the gradient of every mean: 0.4 at its 50,000 images, 7 at the 3,000 here, which drowns
  the data. So the quick presets take the KL in closed form ("reparam"); `path_derivative` compares.

A run is a `Trial`. Its record is kept under a hash of all that determines it, in one folder for all
experiments with ids beginning in 003, so that they resume and share runs.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

import credo
from credo import schedules, storage
from credo.errors import NonFiniteError
from credo.families.links import LinkName
from credo.method import Method
from credo.optim.by_name import BY_NAME, OptimizerSpec
from credo.trials.many import trial_key
from credo.types import Json
from credo.variational.elbo import KLWeights
from credo_papers.experiment import Settings, Verdict, judgement, mean_and_error, sign_of_mean
from credo_papers.networks import NetName, build

TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
SETS = tuple(TITLES)
TINY = math.log1p(math.exp(-10)) / math.sqrt(2 / 400)
"""The thesis's σ₀ as a fraction of the prior's scale in a layer with 400 inputs."""
SUCCESS = 0.15
"""A run that gets no further "failed" (fig. 5.3)."""
MEASURES = {
    "accuracy": "test accuracy",
    "nll": "test NLL",
    "kl": "KL per image",
    "elbo": "ELBO per image",
}
SHARED = "003-study-runs"
EXPECTED_WARNINGS = (
    "the posterior's scales collapsed",
    "the KL never moved",
    "the posterior's scales had not settled",
)
"""That scales hardly move in short runs from a tiny start is part of the setting."""

Estimator = Literal["reparam", "total", "path"]
Schedule = Literal["constant", "alternate", "dual plateau"]


@dataclass(frozen=True, kw_only=True)
class StudySettings(Settings):
    """The defaults are those of the quick presets; with `PAPER` they are the thesis's.

    There a thousand images take 0.25 s on one core. ``num_data`` is the most that is taken for
    training, ``test_images`` are the first of the test set.
    """

    net: NetName = "LeNet-5"
    num_data: int = 3000
    epochs: int = 6
    test_images: int = 2000
    batch_size: int = 100
    prediction_samples: int = 4
    estimator: Estimator = "reparam"


PAPER: dict[str, Any] = {
    "num_data": 60_000,
    "epochs": 50,
    "test_images": 10_000,
    "prediction_samples": 10,
    "estimator": "path",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training run; but for ``bayesian`` and ``outputs`` the names are `credo.VI`'s.

    ``options`` go to the optimizer. "logistic" outputs are the thesis's (§4.3): the classes'
    probabilities are proportional to independent logistic units. ``turn`` is the number of epochs
    for which means, then scales, are trained where the schedule alternates. ``tau`` balances the
    temperature, which is 1 without.
    """

    data: str
    epochs: int
    bayesian: bool = True
    outputs: Literal["softmax", "logistic"] = "softmax"
    optimizer: str = "adam"
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1e-3
    scale_ratio: float = 1.0
    estimator: Estimator = "reparam"
    link: LinkName = "softplus"
    init_scale: float = TINY
    kl_weights: KLWeights = "uniform"
    schedule: Schedule = "constant"
    turn: int = 1
    tau: float | None = None

    def identity(self) -> Json:
        """What tells it from others; a setting that most runs do without is left out of theirs."""
        return {k: v for k, v in asdict(self).items() if k != "tau" or v is not None}


Images = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class SharedRuns:
    """The runs of one seed at some settings: made when asked for, or read if they were made."""

    def __init__(self, settings: StudySettings, seed: int, folder: Path) -> None:
        self.settings, self.seed = settings, seed
        self.store = run_store(folder)
        self._images: dict[str, Images] = {}

    def trial(self, data: str, **changes: Any) -> Trial:
        """A trial of the settings' epochs and estimator."""
        usual = {"epochs": self.settings.epochs, "estimator": self.settings.estimator}
        return Trial(data=data, **(usual | changes))

    def run(self, trial: Trial) -> Json:
        """The record of a trial: scores on test images, and what each epoch recorded.

        ``accuracy``, ``nll`` (of the averaged probabilities), ``train_nll``, ``kl`` and ``elbo``
        (both per training image), ``scale`` (mean of σ), ``diverged``; ``nll_curve``, ``kl_curve``
        and ``rates`` by epoch. What a run doesn't have, or is not a number, is None. A network that
        diverged predicts nothing, so it scores as guessing does.
        """
        settings = self.settings
        key = trial_key({
            "net": settings.net,
            "num_data": settings.num_data,
            "test_images": settings.test_images,
            "batch_size": settings.batch_size,
            "prediction_samples": settings.prediction_samples,
            "seed": self.seed,
            **trial.identity(),
        })  # fmt: skip
        path = self.store / f"{key}.json"
        if path.exists():
            stored: Json = json.loads(path.read_text(encoding="utf-8"))
            return stored
        started = time.process_time()
        record = self._trained(trial) | {"core_seconds": time.process_time() - started}
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_atomically(path, json.dumps(record, allow_nan=False).encode())
        return record

    def _data(self, name: str) -> Images:
        if name not in self._images:
            images, settings = credo.data.load(name), self.settings
            count, tests = settings.num_data, settings.test_images
            x, x_test = credo.data.standardise(images.train[0][:count], images.test[0][:tests])
            self._images[name] = (x, images.train[1][:count]), (x_test, images.test[1][:tests])
        return self._images[name]

    def _trained(self, trial: Trial) -> Json:
        train, (x_test, y_test) = self._data(trial.data)
        net = build(self.settings.net, train[0].shape[1:], self.seed)
        if trial.outputs == "logistic":
            # Logits log s(f) make softmax the normalised units s(f)_c / Σ s(f)_k.
            net.append(nn.LogSigmoid())
        model = credo.Model(net, credo.likelihoods.Categorical())
        with warnings.catch_warnings():
            for message in EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            try:
                posterior = credo.fit(
                    model, method(trial), train, epochs=trial.epochs, seed=self.seed,
                    batch_size=self.settings.batch_size, schedule=schedule(trial), progress=False,
                )  # fmt: skip
            except NonFiniteError:
                return _diverged()
        if not bool(posterior.q.mean.isfinite().all()):
            return _diverged()
        samples = self.settings.prediction_samples if trial.bayesian else 1
        probs = posterior.predict(x_test, samples=samples, keep_samples=False).probs
        if not bool(probs.isfinite().all()):
            return _diverged()
        count, history = len(train[1]), posterior.history
        last = history[-1]
        return {
            "diverged": False,
            "accuracy": credo.metrics.accuracy(probs, y_test),
            "nll": credo.metrics.nll(probs, y_test),
            "train_nll": _number(last["nll"]),
            "kl": _number(last.get("kl", math.nan) / count),
            "elbo": _number(last.get("elbo", math.nan) / count),
            "scale": _number(last.get("mean_scale", math.nan)),
            "nll_curve": [_number(record["nll"]) for record in history],
            "kl_curve": [_number(record.get("kl", math.nan) / count) for record in history],
            "rates": [record.get("rates", {}) for record in history],
        }


def run_store(folder: Path) -> Path:
    """Beside the experiments of Book (2020) if ``folder`` belongs to one, else in ``folder``.

    >>> run_store(Path("runs/003-kl-weights/quick/seed-0-ab")).as_posix()
    'runs/003-study-runs'
    """
    own = next((place for place in folder.parents if place.name.startswith("003-")), None)
    return folder / SHARED if own is None else own.parent / SHARED


def method(trial: Trial) -> Method[Any]:
    """The learner that a trial describes."""
    optimizer: OptimizerSpec = trial.optimizer
    if trial.options:
        optimizer = partial(BY_NAME[trial.optimizer], **trial.options)
    if not trial.bayesian:
        return credo.MLE(lr=trial.lr, optimizer=optimizer)
    return credo.VI(
        estimator=trial.estimator, kl_weights=trial.kl_weights,
        temperature=1.0 if trial.tau is None else credo.Balanced(trial.tau),
        optimizer=optimizer, lr=trial.lr, scale_ratio=trial.scale_ratio, link=trial.link,
        init_scale=trial.init_scale,
    )  # fmt: skip


def schedule(trial: Trial) -> schedules.ScheduleSpec:
    """How the rates of a trial change."""
    if trial.schedule == "alternate":
        return schedules.alternate(trial.turn, trial.turn)
    if trial.schedule == "dual plateau":
        return schedules.dual_plateau()
    return "constant"


def judge(statements: Mapping[str, Sequence[float]], numbers: Mapping[str, float]) -> Verdict:
    """The verdict on statements, each given by how far it holds in every seed.

    A statement holds (fails) if the mean of its margins is above (below) 0 with 95 % confidence,
    and is open otherwise, or where a margin is not a number. Reproduced if all hold, not reproduced
    if one fails. The numbers say 1, −1 or 0 as ``<statement>_holds``.

    >>> judge({"better": [0.1, 0.2, 0.15]}, {}).verdict
    'reproduced'
    """
    reported = dict(numbers)
    signs = []
    for name, margins in statements.items():
        known = all(math.isfinite(margin) for margin in margins)
        signs.append(sign_of_mean(margins) if known else 0)
        if known:
            mean, error = mean_and_error(margins)
            reported |= {name: mean} | ({f"{name}_se": error} if math.isfinite(error) else {})
        reported[f"{name}_holds"] = float(signs[-1])
    return Verdict(judgement(signs), reported)


def averages(results: Sequence[Json], measures: Sequence[str] = tuple(MEASURES)) -> Json:
    """Mean over seeds of every run's measures, as ``<run>_<measure>``; those of MLE have no KL."""
    means = {}
    for label in results[0]["runs"]:
        for measure in measures:
            values = [value(r, label, measure) for r in results]
            if all(math.isfinite(v) for v in values):
                means[f"{label}_{measure}"] = math.fsum(values) / len(values)
    return means


def value(result: Json, label: str, measure: str) -> float:
    """One number of one run; NaN where the run has none."""
    number = result["runs"][label][measure]
    return math.nan if number is None else float(number)


def set_name(data: str) -> str:
    """A data set's name for readers.

    >>> set_name("cifar10")
    'CIFAR-10'
    """
    return TITLES.get(data, data)


def margins(results: Sequence[Json], holds: Callable[[Json], float]) -> list[float]:
    """By how much a statement holds in each seed."""
    return [float(holds(result)) for result in results]


def with_accuracies(runs: Mapping[str, Json]) -> Json:
    """A seed's result: all records under ``runs``, and the accuracies where `credo run` prints."""
    return {
        **{f"{label}_accuracy": record["accuracy"] for label, record in runs.items()},
        "runs": dict(runs),
    }


def _diverged() -> Json:
    classes = 10
    return {
        "diverged": True, "accuracy": 1 / classes, "nll": math.log(classes), "train_nll": None,
        "kl": None, "elbo": None, "scale": None, "nll_curve": [], "kl_curve": [], "rates": [],
    }  # fmt: skip


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
