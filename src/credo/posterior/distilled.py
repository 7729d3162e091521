r"""One network in place of a posterior: probabilities and what the posterior is unsure of, in one
pass.

The outputs of a distilled network are the parameters of a distribution over predictions:

=============  ==================  ==========================================================
likelihood     outputs             read as
=============  ==================  ==========================================================
Categorical    z, as many          Dirichlet with concentrations α_c = e^{z_c}: probabilities
                                   softmax(z), and Σα how much the samples agree
Bernoulli      z₁, z₀, twice       Beta(e^{z₁}, e^{z₀}), of every output
regression     m, a, b, three of   mean m, epistemic_std e^a, aleatoric_std e^b
               each target
=============  ==================  ==========================================================

With m_c = α_c/Σα and ψ the digamma function, the Dirichlet's expected entropy is
Σ_c m_c (ψ(Σα + 1) − ψ(α_c + 1)); what it lacks to the entropy of m is the mutual information.

Malinin, Mlodozeniec & Gales, "Ensemble distribution distillation", 2020 (arXiv:1905.00076).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cached_property
from statistics import NormalDist
from typing import Any, Never

import torch
from torch import Generator, Tensor, nn

from credo.checks import Probability, checked
from credo.display import Display
from credo.errors import DataError, UnsupportedError
from credo.families import Delta
from credo.likelihoods import Bernoulli, Categorical
from credo.likelihoods.base import match_shape, per_example_sum
from credo.network.batches import (
    BATCH_SIZE,
    as_inputs,
    chunks,
    inputs_alone,
    is_loader,
    like_weights,
)
from credo.posterior.link import Link
from credo.posterior.posterior import At, Posterior
from credo.posterior.predictive import Moments, Predictive, PredictiveError
from credo.types import Inputs, Json, Likelihood


class DistilledPredictive(Predictive):
    """What a distilled network predicts: no samples, but both parts of the uncertainty.

    It has what a `Predictive` of the likelihood's kind has, without ``outputs`` and
    ``sample_probs``. Of regression the predictive is taken as normal.

    >>> z = torch.log(torch.tensor([[2.0, 2.0], [200.0, 200.0]]))
    >>> pred = DistilledPredictive(z, Categorical())
    >>> pred.probs[0], pred.mutual_information  # of the second more is known
    (tensor([0.5000, 0.5000]), tensor([0.1098, 0.0012]))

    Args:
        parameters: The network's outputs, (B, …), as the table above reads them.
        likelihood: p(y | f) of the posterior that was distilled.
    """

    _parameters: Tensor

    def __init__(self, parameters: Tensor, likelihood: Likelihood) -> None:
        self.__dict__.update(likelihood=likelihood, _kept=None, _parameters=parameters.detach())

    @classmethod
    def concatenate(cls, parts: Iterable[Predictive]) -> Predictive:
        """One predictive for the examples of all parts, in their order.

        Args:
            parts: Predictives of distilled networks.
        """
        same = [part for part in parts if isinstance(part, DistilledPredictive)]
        if not same:
            raise DataError("There is nothing to concatenate: give at least one Predictive.")
        return cls(torch.cat([part._parameters for part in same]), same[0].likelihood)

    @property
    def samples(self) -> int:
        """None were drawn."""
        return 0

    @property
    def outputs(self) -> Tensor:
        """Refused: there are no samples."""
        self._refuse("outputs")

    @cached_property
    def sample_probs(self) -> Tensor:
        """Refused: there are no samples."""
        self._refuse("sample_probs")

    @checked
    def interval(self, level: Probability = 0.9) -> tuple[Tensor, Tensor]:
        """The ends of the central interval of each dimension by itself: mean ± z·std.

        Args:
            level: The probability that the interval holds, between 0 and 1.
        """
        self._regression("interval")
        width = NormalDist().inv_cdf((1 + level) / 2) * self.std
        return self.mean - width, self.mean + width

    @torch.no_grad()
    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of each example, (B,).

        Args:
            y: The targets, (B, ...).
        """
        y = torch.as_tensor(y, device=self._parameters.device)
        if isinstance(self.likelihood, Categorical):
            self.likelihood.check(self._parameters, y)
            return self.likelihood.log_prob(self._parameters, y)
        if isinstance(self.likelihood, Bernoulli):
            first, second = self._parameters.chunk(2, -1)
            self.likelihood.check(first - second, y)
            return self.likelihood.log_prob(first - second, y)
        mean = self.mean
        noise = torch.distributions.Normal(mean, self.std)
        return per_example_sum(noise.log_prob(match_shape(mean, y).to(mean.dtype)))

    @cached_property
    @torch.no_grad()
    def _moments(self) -> Moments:
        z = self._parameters
        if isinstance(self.likelihood, Categorical):
            probs, total = z.softmax(1), z.exp().sum(1, keepdim=True)
            return Moments(0, probs, probs * (1 - probs) / (total + 1), within_dirichlet(z))
        if isinstance(self.likelihood, Bernoulli):
            both = torch.stack(z.chunk(2, -1), 1)
            probs, total = both.softmax(1)[:, 0], both.exp().sum(1)
            return Moments(0, probs, probs * (1 - probs) / (total + 1), within_dirichlet(both))
        mean, epistemic, aleatoric = z.chunk(3, -1)
        return Moments(0, mean, (2 * epistemic).exp(), (2 * aleatoric).exp())

    def _display(self) -> Display:
        kind, shape = self.likelihood.kind, tuple(self._moments.centre.shape)
        offers = "probs, mutual_information" if kind == "classification" else "mean, epistemic_std"
        return Display(
            f"{type(self).__name__}: {kind} in one pass, shape={shape}", f"pred.{offers}"
        )

    def _refuse(self, name: str) -> Never:
        raise PredictiveError(
            f"A distilled network has no {name}: it predicts the samples' average and spread, not "
            "the samples. The posterior that was distilled has them."
        )


def within_dirichlet(z: Tensor) -> Tensor:
    """The expected entropy of a Dirichlet with ln α = z over dim 1, (B, …).

    Args:
        z: Logarithms of the concentrations, (B, C, …).
    """
    alpha = z.exp()
    total = alpha.sum(1, keepdim=True)
    terms = z.softmax(1) * (torch.digamma(total + 1) - torch.digamma(alpha + 1))
    return terms.sum(1)


class DistilledPosterior(Posterior):
    """A network whose outputs are the parameters of a distribution over predictions.

    `credo.tools.distil` makes it; ``save`` and `credo.load` keep it like any posterior. ``mean``
    are its weights, and ``predict`` runs it once.

    Args: as `Posterior`.
    """

    head: str | None = None
    """The path of the layer that was given more outputs; None if none was."""
    outputs: int = 0
    """How many it has now."""

    @classmethod
    def of(
        cls, posterior: Posterior, likelihood: Likelihood, head: str | None, outputs: int
    ) -> DistilledPosterior:
        """The trained network, with the likelihood of the posterior that it stands for.

        Args:
            posterior: A point mass at the trained weights.
            likelihood: p(y | f) of the posterior that was distilled.
            head: The path of the layer that was given more outputs, if one was.
            outputs: How many it has.
        """
        assert isinstance(posterior.q, Delta)
        model = posterior.model.replace(likelihood=likelihood)
        found = cls(model, posterior.q, posterior.point, posterior.buffers, posterior.draws)
        found.head, found.outputs, found.history = head, outputs, posterior.history
        return found

    def predict(
        self,
        x: Inputs | Any,
        samples: int | None = None,
        batch_size: int | None = None,
        generator: Generator | None = None,
        *,
        at: At | None = None,
        link: Link | None = None,
        keep_samples: bool = True,
    ) -> Predictive:
        """The predictive in one pass through the network; nothing is drawn.

        Args:
            x: As `Posterior.predict` takes them.
            samples: Of no effect.
            batch_size: Inputs that pass at once.
            generator: Of no effect.
            at: Of no effect but for "linearised", which is refused.
            link: For "linearised".
            keep_samples: Of no effect.
        """
        if at == "linearised" or link is not None:
            raise UnsupportedError(
                "a distilled network has no distribution of weights to make linear: predict(x) "
                "gives both parts of the uncertainty in one pass"
            )
        with self.on_copy() as (model, flat), torch.no_grad():
            batches = (inputs_alone(b) for b in x) if is_loader(x) else (as_inputs(x),)
            found = [
                model.outputs(part)
                for batch in batches
                for part in chunks(like_weights(batch, flat.vector), batch_size or BATCH_SIZE)
            ]
        if not found:
            raise DataError("the loader yields no batches: there is nothing to predict")
        return DistilledPredictive(torch.cat(found), self.model.likelihood)

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """Everything that `save` writes."""
        tensors, meta = super().pack()
        return tensors, {**meta, "kind": "distilled", "head": self.head, "outputs": self.outputs}


def widened(net: nn.Module, path: str, outputs: int) -> nn.Module:
    """A copy of the network whose layer ``path`` has so many outputs, the first as they were.

    Args:
        net: The network; it is not changed.
        path: Of an ``nn.Linear``.
        outputs: How many it shall have.
    """
    copied = copy.deepcopy(net)
    layer = copied.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    if layer.out_features == outputs:
        return copied
    like = layer.weight
    wide = nn.Linear(layer.in_features, outputs, device=like.device, dtype=like.dtype)
    same = min(outputs, layer.out_features)
    with torch.no_grad():
        wide.weight.zero_()
        wide.bias.zero_()
        wide.weight[:same] = layer.weight[:same]
        if layer.bias is not None:
            wide.bias[:same] = layer.bias[:same]
    if not path:
        return wide
    parent, _, name = path.rpartition(".")
    setattr(copied.get_submodule(parent), name, wide)
    return copied
