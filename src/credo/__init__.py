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
    from credo import continual as continual
    from credo import data as data
    from credo import families as families
    from credo import functionspace as functionspace
    from credo import likelihoods as likelihoods
    from credo import metrics as metrics
    from credo import optim as optim
    from credo import params as params
    from credo import penalties as penalties
    from credo import priors as priors
    from credo import schedules as schedules
    from credo.methods import HMC as HMC
    from credo.methods import IVON as IVON
    from credo.methods import MAP as MAP
    from credo.methods import MLE as MLE
    from credo.methods import SGLD as SGLD
    from credo.methods import VI as VI
    from credo.methods import VOGN as VOGN
    from credo.methods import Laplace as Laplace
    from credo.methods import Vadam as Vadam
    from credo.methods import VariationalLaplace as VariationalLaplace
    from credo.model import Model as Model
    from credo.objectives import Balanced as Balanced
    from credo.posterior import Posterior as Posterior
    from credo.posterior import load as load
    from credo.predictive import Predictive as Predictive
    from credo.smoothing import smooth as smooth
    from credo.tools import diagnose as diagnose
    from credo.tools import lr_range_test as lr_range_test
    from credo.tools import tune_temperature as tune_temperature
    from credo.train import fit as fit

_HOMES = {
    "HMC": "methods",
    "IVON": "methods",
    "MAP": "methods",
    "MLE": "methods",
    "SGLD": "methods",
    "VI": "methods",
    "VOGN": "methods",
    "Laplace": "methods",
    "Vadam": "methods",
    "VariationalLaplace": "methods",
    "Balanced": "objectives",
    "Model": "model",
    "Posterior": "posterior",
    "Predictive": "predictive",
    "diagnose": "tools",
    "fit": "train",
    "load": "posterior",
    "lr_range_test": "tools",
    "smooth": "smoothing",
    "tune_temperature": "tools",
}
_MODULES = (
    "active",
    "continual",
    "data",
    "families",
    "functionspace",
    "likelihoods",
    "metrics",
    "optim",
    "params",
    "penalties",
    "priors",
    "schedules",
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
