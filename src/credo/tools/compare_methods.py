"""Which of these methods on *my* data? Several of them, trained and tried alike, in one table.

    >>> import torch, credo
    >>> data = credo.data.digits()
    >>> def make_model():
    ...     net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    ...     return credo.Model(net, credo.likelihoods.Categorical())
    >>> methods = {"MAP": credo.MAP(lr=0.01), "VI": credo.VI(lr=0.01)}
    >>> result = credo.compare(
    ...     make_model, methods, data.train, data.test, ood=data.ood, seeds=2, epochs=2,
    ...     progress=False,
    ... )
    >>> result
    <Comparison: 2 methods, 2 seeds, classification; next: print(result); ...>
    >>> [(row["method"], row["seed"]) for row in result.table]
    [('MAP', 0), ('MAP', 1), ('VI', 0), ('VI', 1)]

All methods start, seed by seed, from the same weights and see the examples in the same order, so
their differences are paired: see `credo.metrics.paired`. A comparison with a folder is
resumed by the same call:

<folder>/comparison.json        what was asked for: a later call must ask the same, but for more
                                seeds and more methods
         examples.safetensors   test inputs and targets, for the page
         runs/<run>/            one method with one seed, see `credo.tools.compare_run`
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from credo import storage
from credo.checks import Count, Remedy, checked
from credo.errors import CheckpointError, DataError, FileFormatError
from credo.method import Method
from credo.model import Model
from credo.network.batches import as_inputs, like_weights
from credo.packing import as_json
from credo.report.evidence import Evidence, Run
from credo.schedules import ScheduleSpec
from credo.tools.compare_result import Comparison
from credo.tools.compare_run import MakeModel, Task, by_name, fresh_model, read_run
from credo.tools.compare_sets import SEVERITIES, Sets, fingerprint, first_few, gather
from credo.train.feed import trial_outputs
from credo.train.folder import differences
from credo.trials import Outcome, run_many
from credo.trials.attempt import stored_error, stored_result
from credo.trials.many import place_of
from credo.types import Json
from credo.workers import EngineName

MOST_INPUTS = 50_000_000
"""Numbers of test inputs that are kept for the page; of larger sets none are."""


def _what_methods_are(given: object) -> str:
    return 'Give a name for each: {"MAP": credo.MAP(), "VI": credo.VI()}'


@checked
def compare(
    make_model: MakeModel,
    methods: Annotated[Mapping[str, Method[Any]], Remedy(_what_methods_are)],
    train: Any,
    test: Any,
    ood: Any = None,
    shifts: Mapping[str, Any] | None = None,
    seeds: Count | Sequence[int] = 3,
    epochs: Count | Mapping[str, int] | None = None,
    batch_size: Count = 128,
    schedule: ScheduleSpec | Mapping[str, ScheduleSpec] = "cosine",
    folder: str | Path | None = None,
    resume: bool = True,
    jobs: Count | None = 1,
    reference: Method[Any] | None = None,
    progress: bool = True,
    *,
    samples: Count = 64,
    severities: Sequence[int] = SEVERITIES,
    classes: Sequence[str] = (),
    engine: EngineName = "local",
    device: str | torch.device | None = None,
) -> Comparison:
    """Train each method with each seed and try them on the same test examples.

    A method that fails is a row that says why, and the others go on. With a folder, what is
    finished stays finished: after Ctrl-C or a crash the same call goes on, and adds seeds or
    methods that it did not have.

    Args:
        make_model: Builds a fresh `credo.Model`: ``make_model(seed)`` or ``make_model()``. Torch's
            and numpy's generators are seeded before each call either way.
        methods: By name; the first one is the baseline of differences.
        train: What `credo.fit` takes: (inputs, targets), a Dataset or a DataLoader.
        test: Examples with targets, in the same forms.
        ood: Foreign inputs, or several sets of them by name.
        shifts: By name a function of (inputs, severity), such as those of `credo.data.shifts`, or a
            list of shifted test sets from the mildest on: inputs, or (inputs, targets).
        seeds: How many, or which: each gives first weights, order of the data and noise.
        epochs: For all methods, or by name. Methods that take all data at once (`credo.HMC`), and
            all if it is None, have their own default; `credo.Laplace` trains, too.
        batch_size: Examples in a minibatch.
        schedule: Of the rates, as in `credo.fit`, or by the method's name; methods without an
            optimizer have none.
        folder: Where runs, posteriors and arrays are kept.
        resume: Whether to go on with what the folder has; otherwise it is made anew.
        jobs: Runs at a time, each in a process of its own if there are several; None is one per
            core.
        reference: A method to hold the others against, such as `credo.HMC`: it is trained with the
            first seed, and every run has its distance to it among its scores.
        progress: Whether to show a bar.
        samples: Draws of the weights for predictions.
        severities: Those that functions among the shifts are called with.
        classes: Names of the classes, for the page.
        engine: "local" processes, "ray" or "dask"; the latter need a folder that all machines see.
        device: Where to train.

    Raises:
        DataError: A method, a set or a name can't be meant; nothing was trained yet.
        CheckpointError: The folder holds another comparison; the message says what differs.
    """
    label = None if reference is None else f"{type(reference).__name__} (reference)"
    contenders = _checked_methods(methods, reference, label)
    chosen = _checked_seeds(seeds)
    model = _checked_model(make_model, chosen[0])
    sets = gather(model, train, test, ood, shifts, severities, batch_size)
    names = list(contenders)
    task = Task(
        make_model, contenders, sets,
        _epochs(epochs, contenders, label),
        _rates(_schedules(schedule, names, label), contenders, make_model, chosen[0], sets),
        batch_size, samples, device,
        keeps_samples=reference is not None,
        checkpoints=folder is not None,
    )  # fmt: skip
    trials = [
        {"method": name, "seed": seed}
        for seed in chosen
        for name in names
        if name != label or seed == chosen[0]
    ]
    call = _call(task, model)
    facts = _about(task, model, chosen, classes)
    with ExitStack() as stack:
        if folder is None:
            if engine != "local":
                raise DataError(f"engine={engine!r} needs a folder that all its machines see")
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            home = Path(folder)
        _begin(home, call, {"about": facts, "kind": sets.kind, "reference": label}, sets, resume)
        outcomes = run_many(
            task, trials, jobs, home / "runs", _label, progress, engine=engine, notice=_notice
        )
        runs = _in_order([_run(outcome, home) for outcome in outcomes], names)
        evidence = Evidence(
            sets.kind, runs, _shown_inputs(sets), sets.targets, tuple(classes), facts
        )
        places = {} if folder is None else _places(runs, home)
        result = Comparison(evidence, label, places)
    for note in result.notes:
        if "chains agree" not in note:
            warnings.warn(note, stacklevel=3)
    return result


def load_comparison(folder: str | Path) -> Comparison:
    """A comparison from its folder, with the runs that are finished or have failed.

    Args:
        folder: What `credo.compare` was given.

    Raises:
        FileFormatError: There is none, or it is damaged.
    """
    home = Path(folder)
    stored = _stored(home)
    if stored is None:
        raise FileFormatError(f"{home} holds no comparison: it has no comparison.json")
    tensors, _ = storage.read_tensors(home / "examples.safetensors")
    facts, call = stored["about"], stored["call"]
    names = list(call["methods"])
    runs = []
    for place in sorted((home / "runs").glob("*/config.json")):
        trial = json.loads(place.read_text(encoding="utf-8"))
        outcome = _outcome(trial, place.parent)
        if outcome.known:
            runs.append(_run(outcome, home))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    evidence = Evidence(
        stored["kind"], _in_order(runs, names), arrays.get("inputs"), arrays["targets"],
        tuple(facts.get("classes", ())), facts,
    )  # fmt: skip
    return Comparison(evidence, stored["reference"], _places(runs, home))


# --- before anything is trained -------------------------------------------------------------------


def _checked_methods(
    methods: Mapping[str, Any], reference: Method[Any] | None, label: str | None
) -> dict[str, Method[Any]]:
    if not methods:
        raise DataError("methods is empty: give at least one, such as credo.MAP(), by its name")
    for name, method in methods.items():
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"a method is called {name!r}: its name must be a word")
        if isinstance(method, type) and issubclass(method, Method):
            raise DataError(
                f"the method {name!r} is the class {method.__name__}: call it, {method.__name__}()"
            )
        if not isinstance(method, Method):
            raise DataError(
                f"the method {name!r} is a {type(method).__name__}; methods are credo.MAP(), "
                "credo.VI(), credo.Laplace() and their like"
            )
    if reference is None or label is None:
        return dict(methods)
    if label in methods:
        raise DataError(f"a method is called {label!r}, as the reference is: give it another name")
    return {**methods, label: reference}


def _checked_seeds(seeds: int | Sequence[int]) -> list[int]:
    chosen = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0:
        raise DataError(f"seeds={seeds!r} must be a number of them, or different numbers from 0 on")
    return chosen


def _checked_model(make_model: MakeModel, seed: int) -> Model:
    """A model, after a look at whether every call makes one of its own, alike for one seed."""
    model, again = fresh_model(make_model, seed), fresh_model(make_model, seed)
    if model.net is again.net:
        raise DataError(
            "make_model returns the same network every time, so one method would go on where "
            "another stopped: build the network inside of it"
        )
    if not torch.equal(model.weights(), again.weights()):
        raise DataError(
            f"make_model gives other weights when it is called again with seed {seed}, so methods "
            "would not start alike: draw them from torch's generator, or from the seed it is given"
        )
    return model


def _epochs(
    epochs: int | Mapping[str, int] | None, methods: Mapping[str, Method[Any]], label: str | None
) -> dict[str, int]:
    def own(name: str) -> int:
        # Laplace's method is for a network that is trained already; here none is.
        return methods[name].default_epochs or Method.default_epochs

    given = by_name(_for_reference(epochs, label), list(methods), "epochs", own)
    everywhere = not isinstance(epochs, Mapping)
    found = {
        name: own(name)
        if value is None or (everywhere and methods[name].needs_all_data)
        else int(value)
        for name, value in given.items()
    }
    for name, value in found.items():
        if value < 1:
            raise DataError(f"epochs of {name!r} must be at least 1, but it is {value}")
    return found


def _schedules(schedule: Any, names: list[str], label: str | None) -> dict[str, ScheduleSpec]:
    if isinstance(schedule, Mapping) and schedule.keys() <= {"mean", "scale"} - set(names):
        return dict.fromkeys(names, schedule)
    return by_name(_for_reference(schedule, label), names, "schedule", lambda name: "cosine")


def _rates(
    schedules: Mapping[str, ScheduleSpec],
    methods: Mapping[str, Method[Any]],
    make_model: MakeModel,
    seed: int,
    sets: Sets,
) -> dict[str, ScheduleSpec]:
    """The schedules, but constant for methods whose rates are not in an optimizer's hands."""
    found = dict(schedules)
    for name, spec in schedules.items():
        if spec == "constant":
            continue
        model, method = fresh_model(make_model, seed), methods[name]
        trial_outputs(model, like_weights(first_few(as_inputs(sets.inputs)), model.like))
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                state = method.init(model, sets.num_train, torch.Generator().manual_seed(seed))
                if method.optimizer_of(state) is None:
                    found[name] = "constant"
        except Exception:
            continue  # whatever it is: the run will fail by it, and be a row that says why
    return found


def _for_reference(given: Any, label: str | None) -> Any:
    """The user calls it "reference"."""
    if not isinstance(given, Mapping) or label is None:
        return given
    return {label if name == "reference" else name: value for name, value in given.items()}


# --- the folder -----------------------------------------------------------------------------------


def _call(task: Task, model: Model) -> Json:
    """What a later call must ask for again."""
    return {
        "methods": {name: task.settings(name) for name in task.methods},
        "model": {
            "network": repr(model.net).splitlines(),
            "weights": [[s.name, list(s.shape)] for s in model.segments],
            "random": [s.name for s in model.random.segments],
            "likelihood": model.likelihood.config(),
            "prior": model.prior.config(),
        },
        "data": fingerprint(task.sets),
    }


def _begin(home: Path, call: Json, facts: Json, sets: Sets, resume: bool) -> None:
    """Write down what is asked for, unless the folder holds something else."""
    call = json.loads(json.dumps(call))
    stored = _stored(home)
    if stored is not None and not resume:
        shutil.rmtree(home / "runs", ignore_errors=True)
    elif stored is not None:
        _refuse_other(home, stored["call"], call)
        call["methods"] = {**stored["call"]["methods"], **call["methods"]}
    content = {"version": 1, "call": call, **facts}
    tensors = {"targets": torch.from_numpy(np.ascontiguousarray(sets.targets))}
    inputs = _shown_inputs(sets)
    if inputs is not None:
        tensors["inputs"] = torch.from_numpy(np.ascontiguousarray(inputs))
    storage.write_tensors(home / "examples.safetensors", tensors, {"kind": "examples"})
    text = json.dumps(content, indent=2) + "\n"
    storage.write_atomically(home / "comparison.json", text.encode())


def _stored(home: Path) -> Json | None:
    path = home / "comparison.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path} can't be read ({error}); use another folder") from error
    if not isinstance(content, dict) or not {"call", "kind", "about"} <= content.keys():
        raise FileFormatError(f"{path} is not what credo.compare writes; use another folder")
    return content


def _refuse_other(home: Path, stored: Json, asked: Json) -> None:
    common = stored["methods"].keys() & asked["methods"].keys()
    before, now = (
        {**each, "methods": {name: each["methods"][name] for name in sorted(common)}}
        for each in (stored, asked)
    )
    different = differences(before, now)
    if different:
        raise CheckpointError(
            f"{home} holds a comparison that was asked for otherwise: {'; '.join(different[:5])}"
            f"{' …' if len(different) > 5 else ''}. Seeds and methods may be added, nothing else "
            "may change. Use another folder, or resume=False to start anew."
        )


def _label(trial: Json) -> str:
    return f"{trial['method']}-seed-{trial['seed']}"


def _notice(outcome: Outcome) -> str:
    trial = outcome.trial
    how = "failed" if outcome.result is None else f"NLL {outcome.result['scores']['nll']:.3f}"
    return f"{trial['method']}, seed {trial['seed']}: {how}"


def _places(runs: Sequence[Run], home: Path) -> dict[tuple[str, int], Path]:
    return {
        (run.method, run.seed): _place(home, {"method": run.method, "seed": run.seed})
        for run in runs
        if run.error is None
    }


def _place(home: Path, trial: Json) -> Path:
    return place_of(trial, home / "runs", _label)


def _outcome(trial: Json, place: Path) -> Outcome:
    result = stored_result(place)
    return Outcome(trial, result, None if result is not None else stored_error(place))


def _run(outcome: Outcome, home: Path) -> Run:
    trial = outcome.trial
    if outcome.result is None:
        return Run(trial["method"], trial["seed"], error=outcome.error or "it did not finish")
    return read_run(trial, outcome.result, _place(home, trial))


def _in_order(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
    place = {name: index for index, name in enumerate(names)}
    return sorted(runs, key=lambda run: (place.get(run.method, len(place)), run.seed))


def _shown_inputs(sets: Sets) -> Any:
    inputs = sets.inputs
    return inputs if isinstance(inputs, np.ndarray) and inputs.size <= MOST_INPUTS else None


def _about(task: Task, model: Model, seeds: Sequence[int], classes: Sequence[str]) -> Json:
    """What a reader needs to repeat it."""
    sets = task.sets
    return {
        "train": sets.num_train,
        "test": len(sets.targets),
        "ood": {name: _examples(inputs) for name, inputs in sets.ood.items()},
        "shifts": {name: list(levels) for name, levels in sets.shifts.items()},
        "seeds": list(seeds),
        "classes": list(classes),
        "network": repr(model.net),
        "weights": sum(s.size for s in model.segments),
        "likelihood": as_json(model.likelihood.config()),
        "prior": as_json(model.prior.config()),
        "samples": task.samples,
        "batch_size": task.batch_size,
        "environment": storage.environment(),
    }


def _examples(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        inputs = next(iter(inputs.values()))
    return len(inputs[0] if isinstance(inputs, tuple) else inputs)
