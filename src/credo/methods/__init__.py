"""Algorithms that turn a model and data into a posterior."""

from credo.methods.full_variational_laplace import FullVariationalLaplace
from credo.methods.gradient_penalty import GradientPenalty
from credo.methods.hmc import HMC, MALA
from credo.methods.laplace import Laplace
from credo.methods.map import MAP, MLE
from credo.methods.natural import IVON, VOGN, Vadam
from credo.methods.scale_convergence import scale_convergence
from credo.methods.sgld import SGLD
from credo.methods.variational_laplace import VariationalLaplace
from credo.methods.vi import VI

__all__ = [
    "HMC",
    "IVON",
    "MALA",
    "MAP",
    "MLE",
    "SGLD",
    "VI",
    "VOGN",
    "FullVariationalLaplace",
    "GradientPenalty",
    "Laplace",
    "Vadam",
    "VariationalLaplace",
    "scale_convergence",
]
