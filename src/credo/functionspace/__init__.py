"""Networks as functions: the Gaussian process of a posterior, and the examples it rests on."""

from credo.functionspace.convex_priors import local_prior
from credo.functionspace.gp import GPPrediction, NetworkGP, to_gp
from credo.functionspace.iterates import iterate_as_gp
from credo.functionspace.kernels import Kernel, KernelBlock
from credo.functionspace.memorable import (
    leave_one_out,
    leverage,
    most_memorable,
    most_memorable_per_class,
    relevance,
)
from credo.functionspace.pseudo_data import FunctionPosterior, PseudoData
from credo.functionspace.sampled import SampledGP

__all__ = [
    "FunctionPosterior",
    "GPPrediction",
    "Kernel",
    "KernelBlock",
    "NetworkGP",
    "PseudoData",
    "SampledGP",
    "iterate_as_gp",
    "leave_one_out",
    "leverage",
    "local_prior",
    "most_memorable",
    "most_memorable_per_class",
    "relevance",
    "to_gp",
]
