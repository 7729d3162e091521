"""Rates, optimizer and temperature of VI on the embedded digits: a study for `credo sweep`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from credo.data import digits
from credo.likelihoods import Categorical
from credo.metrics import accuracy, ece
from credo.model import Model
from credo.sweep import Choice, LogUniform, Space, Study
from credo.temperature import Balanced
from credo.train import fit
from credo.types import Json
from credo.variational import VI

EPOCHS = 15
VALIDATION = 297


def vi_digits(settings: Json, seed: int, folder: Path) -> Json:
    """One VI training on the embedded digits; a part of the training digits judges it."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    method = VI(
        optimizer=settings["optimizer"],
        lr=settings["lr"],
        scale_lr=settings["scale_ratio"] * settings["lr"],
        temperature=Balanced(tau=settings["tau"]),
    )
    x, y = digits().train
    posterior = fit(
        Model(net, Categorical()),
        method,
        (x[VALIDATION:], y[VALIDATION:]),
        epochs=EPOCHS,
        batch_size=100,
        seed=seed,
        folder=folder / "run",
        progress=False,
    )
    x, y = x[:VALIDATION], y[:VALIDATION]
    generator = torch.Generator().manual_seed(seed)
    predictive = posterior.predict(x, samples=32, generator=generator)
    return {
        "val_nll": -float(predictive.log_prob(y).mean()),
        "val_accuracy": accuracy(predictive.probs, y),
        "val_ece": float(ece(predictive.probs, y)),
        "kl": posterior.history[-1]["kl"],
    }


VI_DIGITS = Study(
    name="vi-digits",
    about="Rates, optimizer and temperature of VI on the embedded digits, by validation NLL.",
    space=Space(
        {
            "lr": LogUniform(1e-4, 1e-1),
            "scale_ratio": LogUniform(0.1, 10.0),
            "tau": LogUniform(1e-3, 1.0),
            "optimizer": Choice(("adam", "rmsprop", "sgd")),
        }
    ),
    run=vi_digits,
    objective="val_nll",
)

STUDIES = {VI_DIGITS.name: VI_DIGITS}
