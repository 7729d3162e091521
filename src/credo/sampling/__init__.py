"""Markov chains whose draws are the posterior."""

from credo.sampling.hmc import HMC, MALA
from credo.sampling.sghmc import SGHMC
from credo.sampling.sgld import SGLD

__all__ = ["HMC", "MALA", "SGHMC", "SGLD"]
