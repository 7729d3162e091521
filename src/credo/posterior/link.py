"""From the distribution of the outputs to that of the targets, by a formula or by draws."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from credo.checks import check
from credo.errors import UnsupportedError
from credo.likelihoods import Bernoulli, Categorical, Gaussian
from credo.posterior.closed_form import NormalPredictive, ProbitPredictive
from credo.posterior.outputs import OutputGaussian
from credo.posterior.predictive import Predictive
from credo.types import Likelihood

Link: TypeAlias = Literal["samples", "probit"]


def predictive(
    outputs: OutputGaussian,
    likelihood: Likelihood,
    link: Link | None,
    samples: int,
    seed: int,
    keep_samples: bool,
) -> Predictive:
    """p(y | x) from the distribution of the outputs; see the package's table.

    Args:
        outputs: The distribution of the outputs.
        likelihood: p(y | f).
        link: "probit", "samples", or None for a formula where there is an exact one.
        samples: How many draws "samples" takes.
        seed: Of those draws.
        keep_samples: Whether the draws are kept, or only their moments.
    """
    check_link(link, likelihood)
    if link == "probit":
        return ProbitPredictive(outputs, likelihood)
    if link is None and isinstance(likelihood, Gaussian):
        return NormalPredictive(outputs, likelihood)
    generator = torch.Generator(outputs.mean.device).manual_seed(seed)
    stream = outputs.draws(samples, generator)
    if keep_samples:
        return Predictive(torch.stack(list(stream)), likelihood)
    return Predictive.from_stream(stream, likelihood)


def check_link(link: Link | None, likelihood: Likelihood) -> None:
    """Raise unless there is such a link, and for this likelihood.

    Args:
        link: What was asked for.
        likelihood: p(y | f).
    """
    check("link", link, Link | None)
    if link == "probit" and not isinstance(likelihood, Categorical | Bernoulli):
        raise UnsupportedError(
            f'link="probit" is a formula for Categorical and Bernoulli, not for '
            f'{type(likelihood).__name__}. Use link="samples"; with link=None a Gaussian '
            "likelihood is integrated exactly."
        )
