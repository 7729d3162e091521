"""The studies that `credo sweep` knows, each in a module of its own.

A module is imported when its study is asked for: a worker of a sweep starts with no more than its
own study needs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from importlib import import_module

from credo.errors import DataError
from credo.sweep import Study


def _study(module: str, name: str) -> Study:
    study = import_module(f"credo_papers.{module}").STUDIES[name]
    assert isinstance(study, Study)
    return study


MODULES = {
    "vi-digits": "vi_digits",
    "continual-split-mnist": "continual_strengths",
    "continual-permuted-mnist": "continual_strengths",
    "continual-split-cifar": "continual_strengths",
}

STUDIES: dict[str, Callable[[], Study]] = {
    name: partial(_study, module, name) for name, module in MODULES.items()
}


def find_study(name: str) -> Study:
    """The study of this name, or a `DataError` that names those there are.

    >>> find_study("vi-digits").objective
    'val_nll'
    """
    if name in STUDIES:
        return STUDIES[name]()
    near = difflib.get_close_matches(name, STUDIES, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise DataError(
        f"no study is called {name!r}.{hint} There are {', '.join(STUDIES)}. Experiments, which "
        "have no space to search, are for `credo run`."
    )
