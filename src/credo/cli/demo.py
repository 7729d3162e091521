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
    epochs: Annotated[int, typer.Option(help="Passes over the training digits.", min=1)] = 30,
    jobs: Annotated[int, typer.Option(help="Methods trained at a time.", min=1)] = 2,
) -> None:
    """Compare eight methods on handwritten digits; writes a page to look at.

    Args:
        folder: Where ``index.html``, ``results.json`` and the comparison are written.
        seed: Same seed, same numbers.
        epochs: Passes over the training digits.
        jobs: Methods trained at a time, each in a process of its own if there are several.
    """
    import_extra("matplotlib", extra="plots", purpose="credo demo")  # before anything is trained
    from credo.cli import demo_contest

    demo_contest.run(folder, seed, epochs, jobs)
