"""The bar of training: at 80 columns all of it is seen, and only what is known is taken."""

import io

import pytest
import rich.console
import torch
from rich.console import Console
from torch import nn

import credo
from credo.errors import DataError
from credo.train import Reporter, progress

DATA = torch.randn(8, 2), torch.randint(3, (8,))


def console(width=80):
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def last_line(out: Console) -> str:
    lines = out.file.getvalue().replace("\r", "\n").replace("\x1b[2K", "").splitlines()
    return next(line for line in reversed(lines) if "━" in line or "epoch" in line)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_bar_losses_and_time_are_seen_at_any_width(width):
    out = console(width)
    with progress.progress_bar(True, 2000, console=out) as bar:
        training = progress.TrainingBar(bar, 1000, 2)
        record = {"epoch": 998, "nll": 12.3456, "kl": 12345.0, "temperature": 0.0123}
        training.epoch({**record, "val_nll": 2.3456, "val_accuracy": 0.98765})
        training.step(999, 1, 12.3456)
    line = last_line(out)
    assert len(line) <= width
    assert "epoch 1000/1000" in line
    assert "━" * 10 in line
    assert ":" in line.split("━")[-1]
    if width >= 80:
        assert "nll 12.3456 · val_nll 2.346" in line
    assert ("kl 1.234e+04" in line) == (width == 200)


def test_a_long_name_is_cut_and_brackets_are_no_markup():
    out = console()
    with progress.progress_bar(True, 10, "[red]", counted=True, console=out) as bar:
        bar.advance("[red] " + "a long name of a trial " * 5)
    line = last_line(out)
    assert len(line) <= 80
    assert line.startswith("[red] a long name")
    assert "1/10" in line


def test_nothing_is_shown_where_nothing_is_asked_for(capsys):
    with progress.progress_bar(False, 3, "quiet") as bar:
        bar.advance("still quiet")
    assert capsys.readouterr().err == ""


def test_fit_shows_validation_beside_the_bar(monkeypatch):
    out = console()
    monkeypatch.setattr(progress, "_console", lambda: out)
    model = credo.Model(nn.Linear(2, 3), credo.likelihoods.Categorical())
    credo.fit(model, credo.VI(), DATA, epochs=2, val_data=DATA)
    line = last_line(out)
    assert "epoch 2/2 · nll" in line
    assert "val_nll" in line
    assert "━" * 20 in line


def test_a_notebook_without_widgets_has_a_bar_all_the_same(monkeypatch):
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    plain = progress._console()
    assert not plain.is_jupyter
    assert plain.is_terminal
    monkeypatch.setattr(progress, "find_spec", lambda name: object())
    assert progress._console().is_jupyter


class Listener(Reporter):
    def __init__(self):
        self.steps, self.epochs = 0, []

    def step(self, epoch, batch, nll):
        self.steps += 1

    def epoch(self, record):
        self.epochs.append(record["epoch"])


def test_a_reporter_of_ones_own_hears_everything():
    listener = Listener()
    model = credo.Model(nn.Linear(2, 3), credo.likelihoods.Categorical())
    credo.fit(model, credo.MAP(), DATA, epochs=3, batch_size=4, progress=listener)
    assert (listener.steps, listener.epochs) == (6, [0, 1, 2])


@pytest.mark.parametrize("given", [1, "bar", None, print])
def test_anything_else_is_refused(given):
    model = credo.Model(nn.Linear(2, 3), credo.likelihoods.Categorical())
    with pytest.raises(DataError, match=r"progress must be True or False or a Report"):
        credo.fit(model, credo.MAP(), DATA, epochs=1, progress=given)
