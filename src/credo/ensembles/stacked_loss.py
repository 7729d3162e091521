"""The training loss of several members at once, each with its own learned noise.

An example's loss does not depend on the others', so that the mean over the examples of all members
is the mean of the members' losses: likelihoods of which we know it are given all examples as one
batch. A Gaussian with a learned scale takes a member as one example, because its scale may have any
shape that broadcasts. Other likelihoods, which may compare the examples of a batch, are asked
member by member.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from credo.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from credo.model import Model
from credo.types import Likelihood

BY_EXAMPLE = (Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian)
"""Likelihoods whose loss is a mean over examples; by their very class."""


@final
class StackedLoss:
    """The mean of the members' losses.

    ``leaves`` are what autograd differentiates by, and `gradients` puts that into the stacked form.

    Args:
        models: The members'.
        noise: Their learned noise: for every parameter of a likelihood one tensor (M, *shape), read
            whenever the loss is taken.
    """

    def __init__(self, models: Sequence[Model], noise: Sequence[Tensor]) -> None:
        self._each: list[Likelihood] = [model.likelihood for model in models]
        self._parameters = [model.noise_parameters() for model in models]
        self._noise = noise
        first = self._each[0]
        self._all = first if type(first) in BY_EXAMPLE and not noise else None
        self._gaussian: Gaussian | None = None
        if type(first) is Gaussian and noise:
            self._gaussian = copy.deepcopy(first)
            self.leaves: list[Tensor] = [nn.Parameter(noise[0].detach())]
        else:
            self.leaves = [p for column in zip(*self._parameters, strict=True) for p in column]

    def mean(self, outputs: Tensor, targets: Tensor, common: bool) -> Tensor:
        """The mean of all members' mean NLL, a scalar.

        Args:
            outputs: (M, B, ...).
            targets: (B, ...) if ``common``, else (M, B, ...).
            common: Whether all members see the same examples.
        """
        members, examples = outputs.shape[:2]
        if self._all is None and self._gaussian is None:
            self._show_noise()
            each = [
                likelihood.mean_nll(outputs[k], targets if common else targets[k])
                for k, likelihood in enumerate(self._each)
            ]
            return torch.stack(each).mean()
        if common:
            targets = targets.expand(members, *targets.shape)
        if self._all is not None:
            return self._all.mean_nll(outputs.flatten(0, 1), targets.flatten(0, 1))
        assert self._gaussian is not None
        shape = members, *(1,) * (outputs.dim() - 1)
        # A parameter's place takes parameters only; the view must keep its way to the leaf.
        self._gaussian._parameters["log_scale"] = self.leaves[0].view(shape)  # type: ignore[assignment]
        return -self._gaussian.log_prob(outputs, targets).mean() / examples

    def of_member(self, k: int, outputs: Tensor, targets: Tensor, common: bool) -> float:
        """Member k's own mean NLL."""
        self._show_noise()
        own = targets if common else targets[k]
        return float(self._each[k].mean_nll(outputs[k].detach(), own).detach())

    def gradients(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Those of the noise, (M, *shape) each, from those of ``leaves``."""
        if self._gaussian is not None:
            return list(found)
        members = len(self._each)
        return [torch.stack(list(found[i : i + members])) for i in range(0, len(found), members)]

    def _show_noise(self) -> None:
        """Give every member's likelihood its own noise, of which the stacked one is the truth."""
        with torch.no_grad():
            for k, parameters in enumerate(self._parameters):
                for parameter, values in zip(parameters, self._noise, strict=True):
                    parameter.copy_(values[k])
