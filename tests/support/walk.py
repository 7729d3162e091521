"""Which files of the library one batch opens: the walk that a reader takes with a debugger.

    python tests/support/walk.py

A file counts if a function of it runs between the end of one step and the end of the next, when
everything that happens once is over; the loop around it counts too. Laplace's method takes no step:
its walk is that of one batch through `finish`, the pass over the data.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import credo
from credo.method import Method
from credo.train.progress import Reporter

ROOT = Path(credo.__file__).parent
MOST_FILES = 14
"""What a reader keeps in mind."""


@contextmanager
def opened(files: dict[str, list[str]]) -> Iterator[None]:
    """Note the functions of the library that run inside, by file."""

    def note(frame, event, argument) -> None:
        if event != "call":
            return
        see(frame)

    def see(frame) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            functions = files.setdefault(str(path.relative_to(ROOT)), [])
            if frame.f_code.co_qualname not in functions:
                functions.append(frame.f_code.co_qualname)

    frame = sys._getframe()
    while frame is not None:  # the loop that has led here, but not the check of its arguments
        if Path(frame.f_code.co_filename).name != "checks.py":
            see(frame)
        frame = frame.f_back
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


class Walker(Reporter):
    """Watches one step of a run, from its predecessor's end to its own."""

    def __init__(self, steps: int = 3) -> None:
        self.files: dict[str, list[str]] = {}
        self._left, self._watching = steps, opened(self.files)

    def step(self, epoch: int, batch: int, nll: float) -> None:
        self._left -= 1
        if self._left == 0:
            self._watching.__enter__()
        elif self._left == -1:
            self._watching.__exit__(None, None, None)


def model() -> credo.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return credo.Model(net, credo.likelihoods.Categorical())


def data(count: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def step(method: Callable[[], Method]) -> dict[str, list[str]]:
    """The files, and their functions, of one step through `credo.fit`."""
    walker = Walker()
    credo.fit(model(), method(), data(), epochs=1, batch_size=16, progress=walker)
    return walker.files


def finish() -> dict[str, list[str]]:
    """Those of a batch in Laplace's pass over the data."""
    files: dict[str, list[str]] = {}

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = data(1024)  # as many as the pass takes at once
        yield x, y
        with opened(files):
            yield x, y
        yield x, y

    method = credo.Laplace()
    state = method.init(model(), 3 * 1024, torch.Generator().manual_seed(0))
    method.finish(state, batches())
    return files


WALKS: dict[str, Callable[[], dict[str, list[str]]]] = {
    "MAP": lambda: step(credo.MAP),
    "VI": lambda: step(credo.VI),
    "IVON": lambda: step(credo.IVON),
    "Laplace": finish,
}

if __name__ == "__main__":
    for name, walk in WALKS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            files = walk()
        print(f"{name}: {len(files)} files")
        for file, functions in files.items():
            print(f"  {file:45} {', '.join(functions)}")
