"""`credo demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from credo.checks import import_extra
from credo.cli.options import OutputFolder


def demo(
    folder: OutputFolder = Path("credo-demo"),
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.", min=0)] = 0,
    epochs: Annotated[int, typer.Option(help="Passes over the training digits.", min=1)] = 60,
) -> None:
    """Compare several methods on handwritten digits; writes figures and a page to look at.

    Args:
        folder: Where figures, ``results.json`` and ``index.html`` are written.
        seed: Same seed, same numbers.
        epochs: Passes over the training digits.
    """
    import_extra("matplotlib", extra="plots", purpose="credo demo")  # before anything is trained
    from credo.cli import demo_contest

    demo_contest.run(folder, seed, epochs)
