"""Ranks that are started once and then do what they are told: starting them is what takes time."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 240.0
"""Seconds; ranks take their time on a machine that is busy with other things."""


@dataclass
class Raised:
    """An exception of a rank, which need not survive pickling itself."""

    kind: str
    message: str


def _serve(rank: int, size: int, meeting: str, orders: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )
    warnings.simplefilter("error")
    while True:
        order = orders.recv()
        if order is None:
            break
        work, args = order
        try:
            orders.send(work(*args))
        except Exception as error:
            orders.send(Raised(type(error).__name__, str(error)))
    dist.destroy_process_group()


class Crew:
    """``size`` processes joined by gloo; work is a function of an importable module."""

    def __init__(self, size: int, folder: Path) -> None:
        # BLAS threads of several ranks would fight for the cores of a small machine.
        before, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "1"
        context = multiprocessing.get_context("spawn")
        meeting = (folder / "meeting").as_uri()
        self.processes, self.lines = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, meeting, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.lines.append(ours)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What every rank returned or raised, None where it died."""
        for line in self.lines:
            line.send((work, args))
        answers: list[Any] = []
        for rank, line in enumerate(self.lines):
            assert line.poll(PATIENCE), f"rank {rank} hangs"
            try:
                answers.append(line.recv())
            except EOFError:
                answers.append(None)
        return answers

    def close(self) -> None:
        for process, line in zip(self.processes, self.lines, strict=True):
            # One that is about to die is alive still, and does not read any more.
            if process.is_alive():
                with suppress(BrokenPipeError):
                    line.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
