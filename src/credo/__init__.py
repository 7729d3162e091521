"""Credo: Bayesian neural networks at nearly the price of Adam.

Hand it a network you already have, get calibrated predictions with uncertainty:

    model = credo.Model(net, credo.likelihoods.Categorical())
    posterior = credo.fit(model, credo.VI(), (x_train, y_train), epochs=20)
    pred = posterior.predict(x_test)        # pred.probs, pred.entropy, pred.mutual_information
"""

from credo import data, families, likelihoods, metrics, params, priors
from credo.methods import MAP, MLE, VI
from credo.model import Model
from credo.objectives import Balanced
from credo.posterior import Posterior, load
from credo.predictive import Predictive
from credo.train import fit
from credo.version import __version__

__all__ = [
    "MAP",
    "MLE",
    "VI",
    "Balanced",
    "Model",
    "Posterior",
    "Predictive",
    "__version__",
    "data",
    "families",
    "fit",
    "likelihoods",
    "load",
    "metrics",
    "params",
    "priors",
]
