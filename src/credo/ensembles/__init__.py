"""Several modes of the posterior, thinned networks, averaged ones: ensembles, dropout, SWAG."""

from credo.ensembles.ensemble import Ensemble
from credo.ensembles.mc_dropout import MCDropout
from credo.ensembles.swag import SWAG

__all__ = ["SWAG", "Ensemble", "MCDropout"]
