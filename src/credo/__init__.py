"""Credo: Bayesian neural networks at nearly the price of Adam.

Hand it a network you already have, get calibrated predictions with uncertainty:

    model = credo.Model(net, credo.likelihoods.Categorical())
    posterior = credo.fit(model, credo.VI(), (x_train, y_train), epochs=20)
    pred = posterior.predict(x_test)        # pred.probs, pred.entropy, pred.mutual_information

The names are imported when first used, so that ``credo --help`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from credo.version import __version__

if TYPE_CHECKING:
    from credo import active as active
    from credo import autodiff as autodiff
    from credo import continual as continual
    from credo import data as data
    from credo import ensembles as ensembles
    from credo import errors as errors
    from credo import families as families
    from credo import functionspace as functionspace
    from credo import laplace as laplace
    from credo import likelihoods as likelihoods
    from credo import metrics as metrics
    from credo import network as network
    from credo import noise as noise
    from credo import optim as optim
    from credo import penalties as penalties
    from credo import posterior as posterior
    from credo import priors as priors
    from credo import recipes as recipes
    from credo import report as report
    from credo import rule as rule
    from credo import sampling as sampling
    from credo import schedules as schedules
    from credo import sweep as sweep
    from credo import tools as tools
    from credo import train as train
    from credo import trials as trials
    from credo import variational as variational
    from credo.autodiff.smoothing import smooth as smooth
    from credo.ensembles import SWAG as SWAG
    from credo.ensembles import Ensemble as Ensemble
    from credo.ensembles import MCDropout as MCDropout
    from credo.laplace import Laplace as Laplace
    from credo.map import MAP as MAP
    from credo.map import MLE as MLE
    from credo.model import Model as Model
    from credo.network import unbind as unbind
    from credo.posterior import Posterior as Posterior
    from credo.posterior import Predictive as Predictive
    from credo.posterior import load as load
    from credo.posterior import merge as merge
    from credo.sampling import HMC as HMC
    from credo.sampling import MALA as MALA
    from credo.sampling import SGHMC as SGHMC
    from credo.sampling import SGLD as SGLD
    from credo.temperature import Balanced as Balanced
    from credo.tools import compare as compare
    from credo.tools import diagnose as diagnose
    from credo.tools import lr_range_test as lr_range_test
    from credo.tools import tune_temperature as tune_temperature
    from credo.train import fit as fit
    from credo.variational import EVON as EVON
    from credo.variational import IVON as IVON
    from credo.variational import VI as VI
    from credo.variational import VOGN as VOGN
    from credo.variational import Vadam as Vadam
    from credo.variational import VariationalLaplace as VariationalLaplace

_HOMES = {
    # the job: a model, a method, a posterior
    "Model": "model",
    "fit": "train",
    "Posterior": "posterior",
    "Predictive": "posterior",
    "load": "posterior",
    "merge": "posterior",
    # methods
    "MAP": "map",
    "MLE": "map",
    "VI": "variational",
    "IVON": "variational",
    "EVON": "variational",
    "VOGN": "variational",
    "Vadam": "variational",
    "VariationalLaplace": "variational",
    "Laplace": "laplace",
    "Ensemble": "ensembles",
    "MCDropout": "ensembles",
    "SWAG": "ensembles",
    "HMC": "sampling",
    "MALA": "sampling",
    "SGHMC": "sampling",
    "SGLD": "sampling",
    # what helps them
    "Balanced": "temperature",
    "compare": "tools",
    "diagnose": "tools",
    "lr_range_test": "tools",
    "tune_temperature": "tools",
    "smooth": "autodiff.smoothing",
    "unbind": "network",
}
_MODULES = (
    # what a model is made of
    "likelihoods",
    "priors",
    "penalties",
    "families",
    "network",
    # how it is trained
    "train",
    "optim",
    "schedules",
    "variational",
    "laplace",
    "sampling",
    "ensembles",
    # what comes out
    "posterior",
    "metrics",
    "report",
    # what is built on top
    "recipes",
    "tools",
    "continual",
    "active",
    "functionspace",
    "sweep",
    "data",
    # what is underneath
    "autodiff",
    "noise",
    "trials",
    "errors",
    "rule",
)

__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"credo.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'credo' has no attribute {name!r}")
    value = getattr(import_module(f"credo.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
