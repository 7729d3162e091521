"""Drop-in torch optimizers that learn a distribution: the learning rule for a diagonal Gaussian."""

from credo.optim.base import NaturalOptimizer
from credo.optim.ivon import IVON
from credo.optim.vadam import Vadam
from credo.optim.vogn import VOGN
from credo.optim.von import VON

__all__ = ["IVON", "VOGN", "VON", "NaturalOptimizer", "Vadam"]
