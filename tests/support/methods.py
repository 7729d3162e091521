"""Every method, one row each: the table that all contract tests go through.

A new method is a file and a row here. `tests/contract/test_training_survives.py` then kills and
resumes it, `tests/contract/test_posteriors.py` fits it to every kind of network, saves and loads,
and `tests/contract/test_methods.py` holds it to what `credo.Method` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import credo
from credo.method import Method


@dataclass(frozen=True)
class Row:
    """How to make it, and what it is tried on.

    Args:
        make: The method with settings that a handful of small steps can bear.
        on_every_network: Whether it is fitted to every kind of network; a variant need not be.
        smooth: Whether it refuses ReLUs, which `credo.smooth` then replaces.
        plain: Whether it refuses dropout and running statistics, which its network then has not.
    """

    make: Callable[[], Method[Any]]
    on_every_network: bool = True
    smooth: bool = False
    plain: bool = False


METHODS: dict[str, Row] = {
    "MAP": Row(lambda: credo.MAP(lr=0.01)),
    "MLE": Row(lambda: credo.MLE(lr=0.01)),
    "MAP, penalty": Row(lambda: credo.MAP(lr=0.01, penalty="group_lasso"), False),
    "VI": Row(lambda: credo.VI(lr=0.01)),
    "VI, local": Row(lambda: credo.VI(lr=0.01, noise="local")),
    "VI, flipout": Row(lambda: credo.VI(lr=0.01, noise="flipout")),
    "VI, two samples": Row(lambda: credo.VI(lr=0.01, samples=2, kl_weights=0.5, warmup=1.0), False),
    "VI, sgd": Row(lambda: credo.VI(lr=0.01, optimizer="sgd"), False),
    "VI, score": Row(lambda: credo.VI(lr=0.01, estimator="score", samples=4), False),
    "IVON": Row(lambda: credo.IVON()),
    "IVON, two samples": Row(lambda: credo.IVON(samples=2), False),
    "EVON": Row(lambda: credo.EVON(refresh=2)),
    "EVON, one-sided": Row(lambda: credo.EVON(refresh=2, one_sided=True, hess_clip=10.0), False),
    "VOGN": Row(lambda: credo.VOGN()),
    "Vadam": Row(lambda: credo.Vadam(lr=0.02)),
    "VariationalLaplace": Row(lambda: credo.VariationalLaplace(lr=0.01), smooth=True),
    "VariationalLaplace, fixed point": Row(
        lambda: credo.VariationalLaplace(lr=0.01, scales="fixed_point", route="exact"),
        False,
        smooth=True,
    ),
    "Laplace": Row(lambda: credo.Laplace(train=credo.MAP(lr=0.01))),
    "Laplace, diag": Row(
        lambda: credo.Laplace(structure="diag", curvature="fisher", train=credo.MAP(lr=0.01))
    ),
    "Laplace, last layer": Row(lambda: credo.Laplace(structure="full", subset="last_layer")),
    "Laplace, low rank": Row(lambda: credo.Laplace(structure="low_rank", rank=5)),
    "Laplace, online": Row(
        lambda: credo.Laplace(structure="diag", train=credo.MAP(lr=0.01), evidence_every=2), False
    ),
    "Ensemble": Row(lambda: credo.Ensemble(credo.MAP(lr=0.01), members=3)),
    "Ensemble, together": Row(
        lambda: credo.Ensemble(credo.MAP(lr=0.01), members=3, training="together"),
        False,
        plain=True,
    ),
    "Ensemble, in turn": Row(
        lambda: credo.Ensemble(credo.MAP(lr=0.01), members=2, training="in_turn"), False
    ),
    "Ensemble, common order": Row(
        lambda: credo.Ensemble(credo.MLE(lr=0.01), members=2, order="common"), False
    ),
    "Ensemble, VI": Row(lambda: credo.Ensemble(credo.VI(lr=0.01), members=2), False),
    "Ensemble, IVON": Row(lambda: credo.Ensemble(credo.IVON(lr=1.0), members=2), False),
    "Ensemble, Laplace": Row(
        lambda: credo.Ensemble(credo.Laplace(train=credo.MAP(lr=0.01)), members=2), False
    ),
    "Ensemble, bootstrap": Row(
        lambda: credo.Ensemble(credo.MAP(lr=0.01), members=2, bootstrap=True), False
    ),
    "Ensemble, SGLD": Row(
        lambda: credo.Ensemble(credo.SGLD(lr=0.02, warmup=1, thin=2, keep=5, chains=2), members=2),
        False,
    ),
    "MCDropout": Row(lambda: credo.MCDropout(p=0.1, train=credo.MAP(lr=0.01)), False),
    "Ensemble, MCDropout": Row(
        lambda: credo.Ensemble(credo.MCDropout(p=0.1, train=credo.MAP(lr=0.01)), members=2), False
    ),
    "SWAG": Row(lambda: credo.SWAG(train=credo.MAP(lr=0.01), start=0.25, rank=5, draws=3)),
    "SWAG, sgd": Row(
        lambda: credo.SWAG(
            train=credo.MAP(lr=0.05, optimizer="sgd"), start=0.5, rate=1.0, iterates=4, rank=2
        ),
        False,
    ),
    "Ensemble, SWAG": Row(
        lambda: credo.Ensemble(credo.SWAG(train=credo.MAP(lr=0.01), start=0.25, draws=3), members=2)
    ),
    "HMC": Row(lambda: credo.HMC(max_depth=2, warmup=1, chains=2)),
    "HMC, fixed length": Row(lambda: credo.HMC(leapfrog=2, warmup=1, chains=2), False),
    "MALA": Row(lambda: credo.MALA(warmup=2, chains=3, spread=0.0)),
    "SGHMC": Row(lambda: credo.SGHMC(lr=0.005, warmup=1, thin=2, keep=5, chains=2)),
    "SGHMC, cycles": Row(lambda: credo.SGHMC(lr=0.005, thin=1, keep=6, chains=2, cycles=2), False),
    "SGLD": Row(lambda: credo.SGLD(lr=0.02, warmup=1, thin=2, keep=5, chains=2)),
    "SGLD, cycles": Row(
        lambda: credo.SGLD(lr=0.02, thin=1, keep=6, chains=2, cycles=2, explore=0.5), False
    ),
    "SGLD, a quarter of warm-up": Row(lambda: credo.SGLD(lr=0.02, thin=2, chains=1), False),
}

WARNINGS = (
    "ignore:the chains disagree:UserWarning",
    "ignore:all of training was warm-up:UserWarning",
    "ignore:.* trajectories were cut:UserWarning",
    "ignore:.* trajectories diverged:UserWarning",
    "ignore:the network does not look trained:UserWarning",
    "ignore:SWAG collected the weights of:UserWarning",
)
"""A handful of steps is no training and no sampling, and methods say so."""
