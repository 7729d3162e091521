"""Where trials run: joblib on processes of this machine, on Ray, or on Dask.

"local"  joblib's own worker processes (loky).
"ray"    Ray through `ray.util.joblib`: the cluster of RAY_ADDRESS, or one started on this machine.
"dask"   Dask through joblib's backend: the scheduler of DASK_SCHEDULER_ADDRESS, or one started on
         this machine.

A cluster's machines must share the folder of the sweep and have Credo installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import joblib

from credo.checks import Count, checked, import_extra

EngineName: TypeAlias = Literal["local", "ray", "dask"]

Pool: TypeAlias = Callable[[Sequence[Any], int], list[Any]]
"""``pool(calls, at_once)``: the results of joblib's delayed calls, in order."""


@checked
@contextmanager
def start(engine: EngineName, jobs: Count, isolated: bool) -> Iterator[Pool]:
    """A pool on this engine; what had to be started for it is stopped again.

    Args:
        engine: "local", "ray" or "dask".
        jobs: Calls at a time; one runs in this process, unless ``isolated``.
        isolated: Whether one call at a time, too, gets a worker process that may die.
    """
    in_this_process = engine == "local" and jobs == 1 and not isolated
    # A single worker process is something joblib does not offer: it would use this process. So
    # there are two, of which one stays idle because no more than ``at_once`` calls are handed out.
    workers = 1 if in_this_process else max(2, jobs)

    def pool(calls: Sequence[Any], at_once: int) -> list[Any]:
        return joblib.Parallel(workers, pre_dispatch=at_once, batch_size=1)(calls)

    if engine == "local":
        with joblib.parallel_config("sequential" if in_this_process else "loky"):
            yield pool
    else:
        with {"ray": _ray, "dask": _dask}[engine](jobs), joblib.parallel_config(engine):
            yield pool


@contextmanager
def _ray(jobs: int) -> Iterator[None]:
    ray = _engine("ray", "ray")
    _engine("ray.util.joblib", "ray").register_ray()
    ours = not ray.is_initialized()
    if ours:
        options = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": max(2, jobs)}
        ray.init(log_to_driver=False, include_dashboard=False, logging_level="error", **options)
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


@contextmanager
def _dask(jobs: int) -> Iterator[None]:
    distributed, dask = _engine("distributed", "dask"), _engine("dask", "dask")
    if _has_client(distributed):
        yield
        return
    if dask.config.get("scheduler-address", None):
        with distributed.Client(set_as_default=True):
            yield
        return
    # A trial that killed its worker is for the sweep to try again, not for Dask.
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.Client(
            n_workers=max(2, jobs), threads_per_worker=1, dashboard_address=None,
            silence_logs="CRITICAL",
        ),
    ):  # fmt: skip
        yield


def _has_client(distributed: Any) -> bool:
    try:
        distributed.default_client()
    except ValueError:
        return False
    return True


def _engine(module: str, engine: EngineName) -> Any:
    return import_extra(module, engine, f'engine="{engine}"', 'use engine="local"')
