"""Variational inference: q is moved until E_q[loss] + temperature · KL(q‖prior) is smallest."""

from credo.variational.elbo import elbo, kl_weights
from credo.variational.natural import EVON, IVON, VOGN, Vadam
from credo.variational.scales import scale_convergence
from credo.variational.variational_laplace import VariationalLaplace
from credo.variational.vi import VI

__all__ = [
    "EVON",
    "IVON",
    "VI",
    "VOGN",
    "Vadam",
    "VariationalLaplace",
    "elbo",
    "kl_weights",
    "scale_convergence",
]
