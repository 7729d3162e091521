"""One run of a comparison, in whatever process an engine chose: trained, tried, written down.

<run>/result.json             scores, the records of training, what was warned of: it is finished
      arrays.safetensors      one entry for each test example
      posterior.safetensors   for `credo.load`
      training/               the run of `credo.fit` while it lasts; a killed one goes on from there
"""

from __future__ import annotations

import inspect
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from credo import storage
from credo.checks import nearest
from credo.errors import DataError
from credo.likelihoods import Gaussian
from credo.map import MAP
from credo.method import Method
from credo.model import Model
from credo.network.batches import as_inputs, as_tensor
from credo.packing import as_json
from credo.posterior.posterior import Posterior
from credo.report.evidence import Run, ShiftScores
from credo.sampling.chains import ChainPosterior
from credo.schedules import ScheduleSpec
from credo.tools.compare_meter import Cost, metered
from credo.tools.compare_scores import Array, Scored, doubts, foreign_scores, score
from credo.tools.compare_sets import Sets
from credo.train import fit
from credo.types import Json

MakeModel = Callable[..., Model]
"""``make_model(seed)`` or ``make_model()``."""

KEPT_SAMPLES = 256
"""Draws of a regression's means that are kept where there is a reference to compare them with."""


@dataclass(frozen=True)
class Task:
    """Everything that a run of any method and seed needs.

    Args:
        make_model: Builds the model.
        methods: By name.
        sets: To train and try on.
        epochs: By the method's name.
        schedules: Of the rates, by the method's name.
        batch_size: Of training.
        samples: Draws of the weights for predictions.
        device: Where to; None stays where the model is built.
        keeps_samples: Whether draws of a regression's means are kept.
        checkpoints: Whether training can go on after it was killed.
    """

    make_model: MakeModel
    methods: Mapping[str, Method[Any]]
    sets: Sets
    epochs: Mapping[str, int]
    schedules: Mapping[str, ScheduleSpec]
    batch_size: int
    samples: int
    device: str | torch.device | None = None
    keeps_samples: bool = False
    checkpoints: bool = False

    def __call__(self, trial: Json, folder: Path | None) -> Json:
        """Train and try one method with one seed; the result is JSON, arrays are in the folder."""
        assert folder is not None
        name, seed = trial["method"], trial["seed"]
        warm_up()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            posterior, trained = self._train(name, seed, folder)
            found, shifts = self._try(posterior, trained)
        posterior.save(folder / "posterior.safetensors")
        arrays = {key: torch.from_numpy(_whole(a)) for key, a in found.arrays.items()}
        storage.write_tensors(folder / "arrays.safetensors", arrays, {"kind": "run", **trial})
        shutil.rmtree(folder / "training", ignore_errors=True)
        return {
            "scores": found.scores,
            "shifts": [asdict(each) for each in shifts],
            "history": json.loads(json.dumps(as_json(posterior.history))),
            "settings": {**self.settings(name), "seed": seed, "r_hat": _r_hat(posterior)},
            "cpu_seconds": trained.cpu_seconds,
            "warnings": list(dict.fromkeys(str(each.message) for each in heard)),
        }

    def settings(self, name: str) -> Json:
        """What makes a run of this method.

        Args:
            name: Of the method.
        """
        return {
            "method": self.methods[name].config(),
            "epochs": self.epochs[name],
            "schedule": as_json(self.schedules[name]),
            "batch_size": self.batch_size,
            "samples": self.samples,
        }

    def _train(self, name: str, seed: int, folder: Path) -> tuple[Posterior, Cost]:
        method, place = self.methods[name], folder / "training"
        model = fresh_model(self.make_model, seed)
        if self.device is not None:
            model.net.to(self.device)
        earlier = _seconds_so_far(place)
        with metered(model.like.device) as cost:
            posterior = fit(
                model, method, self.sets.train, self.epochs[name], self.batch_size, seed,
                folder=place if self.checkpoints else None, device=self.device, progress=False,
                schedule=self.schedules[name],
            )  # fmt: skip
        cost.seconds += earlier
        return posterior, cost

    def _try(self, posterior: Posterior, trained: Cost) -> tuple[Scored, list[ShiftScores]]:
        sets, kind = self.sets, self.sets.kind
        with metered(posterior.model.like.device) as predicted:
            predictive = self._predict(posterior, sets.inputs)
            own = doubts(predictive, kind)
        found = score(predictive, as_tensor(sets.targets), kind, sets.ignored)
        foreign = {
            name: doubts(self._predict(posterior, inputs), kind)
            for name, inputs in sets.ood.items()
        }
        found.scores.update(foreign_scores(own, foreign).scores)
        doubt = ("std", "epistemic_std") if kind == "regression" else (
            "entropy", "mutual_information"
        )  # fmt: skip
        for index, suffix in enumerate(doubt):
            each = {name: values[index] for name, values in foreign.items()}
            if each:
                found.arrays[f"ood_{suffix}"] = np.concatenate(list(each.values()))
            if len(each) > 1:
                found.arrays.update({f"ood_{suffix}: {name}": a for name, a in each.items()})
        if self.keeps_samples and kind == "regression":
            found.arrays["samples"] = _means(posterior, sets.inputs)
        chains = _r_hat(posterior)
        if "predictions_max" in chains:
            found.scores["r_hat"] = chains["predictions_max"]
        found.scores.update(
            train_seconds=trained.seconds,
            train_mib=trained.mib,
            predict_seconds=predicted.seconds,
            predict_mib=predicted.mib,
        )
        shifts = [
            ShiftScores(
                name,
                severity,
                score(self._predict(posterior, x), y, kind, sets.ignored, in_full=False).scores,
            )
            for name, severity, x, y in sets.shifted()
        ]
        return found, shifts

    def _predict(self, posterior: Posterior, inputs: Any) -> Any:
        # Averages over the samples are all that classes need; intervals need the samples.
        keep = self.sets.kind == "regression"
        return posterior.predict(as_inputs(inputs), self.samples, keep_samples=keep)


def fresh_model(make_model: MakeModel, seed: int) -> Model:
    """A model whose network's first weights depend on the seed alone.

    Args:
        make_model: Called with the seed if it takes an argument; torch's and numpy's generators are
            seeded with it either way, and left as they were.
        seed: Of the run.

    Raises:
        DataError: It does not give a `credo.Model`.
    """
    state = np.random.get_state()  # noqa: NPY002 - networks of others may draw from it
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            model = make_model(seed) if takes_seed(make_model) else make_model()
    finally:
        np.random.set_state(state)  # noqa: NPY002
    if not isinstance(model, Model):
        hint = "wrap it: credo.Model(net, likelihood)" if isinstance(model, nn.Module) else (
            "it must return credo.Model(net, likelihood)"
        )  # fmt: skip
        raise DataError(f"make_model gave a {type(model).__name__}: {hint}")
    return model


def takes_seed(make_model: MakeModel) -> bool:
    """Whether it must be given an argument, or has one that is called seed.

    Args:
        make_model: The user's function.
    """
    try:
        parameters = list(inspect.signature(make_model).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return bool(positional) and (
        positional[0].default is inspect.Parameter.empty or positional[0].name == "seed"
    )


@cache
def warm_up() -> None:
    """The first optimizer of a process makes torch import much: no run should pay for it."""
    point = torch.zeros(1, 1)
    with torch.random.fork_rng(devices=[]):
        model = Model(nn.Linear(1, 1), Gaussian())
    posterior = fit(model, MAP(), (point, point), epochs=1, progress=False)
    posterior.predict(point)


def read_run(trial: Json, result: Json, folder: Path) -> Run:
    """A finished run, from what lies in its folder.

    Args:
        trial: Method and seed.
        result: What its call returned.
        folder: Where its arrays are.
    """
    tensors, _ = storage.read_tensors(folder / "arrays.safetensors")
    return Run(
        trial["method"],
        trial["seed"],
        result["scores"],
        {name: tensor.numpy() for name, tensor in tensors.items()},
        [ShiftScores(**each) for each in result["shifts"]],
        result["history"],
        {**result["settings"], "warnings": result["warnings"]},
    )


def by_name(given: Any, names: list[str], what: str, otherwise: Any) -> dict[str, Any]:
    """One value for each method, of a value for all or a mapping from some methods' names.

    Args:
        given: What the user said.
        names: Of the methods.
        what: The parameter's name, for the error.
        otherwise: From a method's name to what it gets where nothing is said.
    """
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    for name in given:
        if name not in names:
            raise DataError(
                f"{what} has an entry for {name!r}, which is no method of this comparison: they "
                f"are {', '.join(names)}.{nearest(str(name), names)}"
            )
    return {name: given[name] if name in given else otherwise(name) for name in names}


def _seconds_so_far(training: Path) -> float:
    """Of the epochs that an earlier call, which was killed, has trained."""
    try:
        lines = (training / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return float(json.loads(lines[-1])["seconds"])
    except (OSError, ValueError, IndexError, KeyError):
        return 0.0


def _r_hat(posterior: Posterior) -> dict[str, float]:
    """How well chains agree, where there are any."""
    if not isinstance(posterior, ChainPosterior) or posterior.chains is None:
        return {}
    return posterior.chains.r_hat


def _means(posterior: Posterior, inputs: Any) -> Array:
    """Draws of E[y | f], (S, B): what the weights' uncertainty makes of each prediction."""
    predictive = posterior.predict(as_inputs(inputs), KEPT_SAMPLES)
    if predictive.samples:
        kept = predictive.outputs
        drawn = torch.stack([predictive.likelihood.mean(outputs) for outputs in kept])  # type: ignore[attr-defined]
        every = -(-len(drawn) // KEPT_SAMPLES)
        return drawn[::every].flatten(2).mean(2).cpu().numpy()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((KEPT_SAMPLES, *predictive.mean.shape), generator=generator)
    drawn = predictive.mean.cpu() + predictive.epistemic_std.cpu() * noise.to(predictive.mean.dtype)
    return drawn.flatten(2).mean(2).numpy()


def _whole(array: Array) -> Array:
    return np.ascontiguousarray(array)
