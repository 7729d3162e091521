"""Sixteen short trainings, two at a time on two cores or one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import nn

import credo
from bench.timing import Row
from credo.sweep import run_many
from credo.types import Json

TRIALS = 16
ROUNDS = 3
EPOCHS = 250
"""A trial takes a few seconds."""


def train(epochs: int, trial: Json, folder: Path | None) -> Json:
    torch.manual_seed(trial["seed"])
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    model = credo.Model(net, credo.likelihoods.Categorical())
    posterior = credo.fit(
        model, credo.VI(), credo.data.digits().train, epochs=epochs, seed=trial["seed"],
        progress=False,
    )  # fmt: skip
    return {"nll": posterior.history[-1]["nll"]}


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def stop_workers() -> None:
    """So that the next pool has to start its own."""
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True)


def many_runs() -> list[Row]:
    """Wall-clock of all trials, start of the workers included, relative to one process."""
    trials = [{"seed": seed} for seed in range(TRIALS)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(1, trials[0], None)
        ratios: dict[str, list[float]] = {"two processes": [], "start of two workers": []}
        for _ in range(ROUNDS):
            stop_workers()
            serial = timed(lambda: [train(EPOCHS, trial, None) for trial in trials])
            parallel = timed(
                lambda: run_many(partial(train, EPOCHS), trials, jobs=2, progress=False)
            )
            stop_workers()
            start = timed(lambda: run_many(partial(train, 0), trials[:2], jobs=2, progress=False))
            ratios["two processes"].append(parallel / serial)
            ratios["start of two workers"].append(start / serial)
            print(
                f"  {TRIALS} trials of {serial / TRIALS:.1f} s, one thread each: {serial:.1f} s in "
                f"turn, {parallel:.1f} s two at a time ({serial / parallel:.2f}x), of which "
                f"{start:.1f} s are start-up"
            )
    finally:
        torch.set_num_threads(threads)
    return [
        Row("sweep", f"{TRIALS} trials", name, round(median(found), 3),
            tuple(quantiles(found, n=4)[::2]), "one after the other")
        for name, found in ratios.items()
    ]  # fmt: skip
