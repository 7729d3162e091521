"""Several modes of the posterior, and networks that were thinned: ensembles and MC dropout."""

from credo.ensembles.ensemble import Ensemble
from credo.ensembles.mc_dropout import MCDropout

__all__ = ["Ensemble", "MCDropout"]
