"""Variational inference: q is moved until E_q[loss] + temperature · KL(q‖prior) is smallest."""

from credo.variational.full_variational_laplace import FullVariationalLaplace
from credo.variational.gradient_penalty import GradientPenalty
from credo.variational.kl_weights import kl_weights
from credo.variational.natural import IVON, VOGN, Vadam
from credo.variational.scale_convergence import scale_convergence
from credo.variational.variational_laplace import VariationalLaplace
from credo.variational.vi import VI

__all__ = [
    "IVON",
    "VI",
    "VOGN",
    "FullVariationalLaplace",
    "GradientPenalty",
    "Vadam",
    "VariationalLaplace",
    "kl_weights",
    "scale_convergence",
]
