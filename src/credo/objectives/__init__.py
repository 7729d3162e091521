"""What is minimised: the tempered ELBO and how its KL is weighted."""

from credo.objectives.kl_weights import kl_weights
from credo.objectives.temperature import Balanced

__all__ = ["Balanced", "kl_weights"]
