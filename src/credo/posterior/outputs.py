r"""The predictive of the network made linear in its weights around q's mean.

    f(x; θ) ≈ f(x; m) + J(x)(θ − m),   θ ~ N(m, Σ)     ⟹     f(x) ~ N(f(x; m), J(x) Σ J(x)ᵀ)

One forward pass, and one backward pass per output, give the distribution of the outputs themselves:
no weights are sampled. For curvatures made of JᵀΛJ (Gauss–Newton, Fisher) it is the model of which
Laplace's approximation is the posterior, and predicts better than sampled weights do.

===========  ================================  ===================================================
likelihood   ``link``                          p(y | x)
===========  ================================  ===================================================
Gaussian     None                              N(y; f, JΣJᵀ + scale²), exactly
Categorical  "probit"                          softmax(f_c / √(1 + π/8 · (JΣJᵀ)_cc))
Bernoulli    "probit"                          σ(f / √(1 + π/8 · JΣJᵀ))
any          "samples"; None where no formula  (1/S) Σ_s p(y | f_s), f_s drawn from the Gaussian
===========  ================================  ===================================================

MacKay's probit formula for one logit is within 0.018 of the exact probability for any mean and
variance. That for several logits is a heuristic: it uses the variances alone.

Outputs with positions, (B, C, H, W), have one covariance (C, C) per position: what joins different
positions is left out, so quantities of one pixel are right and ``log_prob`` of a whole image treats
its pixels as independent given the input.

References: MacKay, "The evidence framework applied to classification networks", 1992; Khan, Immer,
Abedi & Korzepa, "Approximate inference turns deep networks into Gaussian processes", 2019
(arXiv:1906.01930); Immer, Korzepa & Bauer, "Improving predictions of Bayesian neural nets via local
linearization", 2021 (arXiv:2008.08400).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from credo.autodiff.jacobians import Jacobians
from credo.errors import UnsupportedError
from credo.families import Family
from credo.model import Model
from credo.network import FlatParams
from credo.network.batches import input_rows
from credo.posterior.covariance import weight_covariance
from credo.types import Inputs

BATCH_BYTES = 200 * 2**20
"""What the temporaries of one batch may take."""

MAX_EXAMPLE_BYTES = 4 * 2**30
"""What those of a single example may take before it is refused."""

MAX_BATCH_SIZE = 1024
MAX_OUTPUTS = 4096
"""Up to how many numbers per example, each one a backward pass, outputs with positions may have."""

# g, the same turned into another basis, and a product of the two.
_COPIES = 3


@dataclass(frozen=True)
class OutputGaussian:
    """f ~ N(mean, covariance), of every example.

    Args:
        mean: (B,), (B, K) or (B, C, *positions).
        covariance: (B, *positions, K, K).
    """

    mean: Tensor
    covariance: Tensor

    @classmethod
    def concatenate(cls, parts: Iterable[OutputGaussian]) -> OutputGaussian:
        """The examples of all parts, in their order.

        Args:
            parts: Of other examples each.
        """
        parts = list(parts)
        return cls(torch.cat([p.mean for p in parts]), torch.cat([p.covariance for p in parts]))

    @property
    def variance(self) -> Tensor:
        """Of every output by itself, in the mean's shape."""
        return self._outputs_second(self.covariance.diagonal(dim1=-2, dim2=-1))

    def draws(self, n: int, generator: Generator) -> Iterator[Tensor]:
        """n draws, each in the mean's shape.

        Args:
            n: How many.
            generator: Where the randomness comes from.
        """
        root = _root(self.covariance)
        for _ in range(n):
            eps = torch.randn(
                root.shape[:-1], generator=generator, dtype=root.dtype, device=root.device
            )
            yield self.mean + self._outputs_second((root @ eps.unsqueeze(-1)).squeeze(-1))

    def log_density(self, y: Tensor, noise_variance: Tensor) -> Tensor:
        """log N(y; mean, covariance + diag(noise)), (B,): summed over the positions.

        Args:
            y: Targets in the mean's shape.
            noise_variance: Of every output, in the mean's shape.
        """
        error, noise = self._outputs_last(y - self.mean), self._outputs_last(noise_variance)
        factor = torch.linalg.cholesky(self.covariance + torch.diag_embed(noise))
        white = torch.linalg.solve_triangular(factor, error.unsqueeze(-1), upper=False).squeeze(-1)
        terms = -0.5 * white.square() - 0.5 * math.log(2 * math.pi)
        terms = terms - factor.diagonal(dim1=-2, dim2=-1).log()
        return terms.flatten(1).sum(1)

    def _outputs_last(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1) if x.dim() == 1 else x.movedim(1, -1)

    def _outputs_second(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1).reshape(self.mean.shape)


class Linearisation:
    """The network in linear form around the weights that ``flat`` holds, which are q's mean.

    Args:
        model: The network, of whose weights some are random.
        flat: Its parameters, which hold q's mean.
        q: A Gaussian over the random weights.
    """

    def __init__(self, model: Model, flat: FlatParams, q: Family) -> None:
        self._net, self._flat, self._selection = model.net, flat, model.random
        self._covariance = weight_covariance(q)

    def at(self, inputs: Inputs) -> OutputGaussian:
        """The outputs' distribution for one batch of inputs.

        Args:
            inputs: Inputs, examples first.
        """
        jacobians = self._jacobians(inputs)
        outputs = jacobians.outputs
        with torch.no_grad():
            if outputs.dim() <= 2:
                return OutputGaussian(outputs, self._covariance.of_outputs(jacobians))
            places = [self._covariance.of_outputs(jacobians, d) for d in _directions(outputs)]
            covariance = torch.stack(places, dim=1)
        return OutputGaussian(outputs, covariance.unflatten(1, outputs.shape[2:]))

    def batch_size(self, inputs: Inputs) -> int:
        """How many of these examples `at` can take within `BATCH_BYTES`, at most 1024.

        Args:
            inputs: Inputs, examples first.
        """
        jacobians = self._jacobians(input_rows(inputs, slice(1)))
        outputs = jacobians.outputs
        if outputs.dim() > 2 and jacobians.num_outputs > MAX_OUTPUTS:
            raise UnsupportedError(
                f"outputs of shape (B, {', '.join(map(str, outputs.shape[1:]))}) are "
                f"{jacobians.num_outputs} numbers per example, and each needs a backward pass of "
                f'its own; up to {MAX_OUTPUTS} are linearised. Predict with at="samples".'
            )
        directions = jacobians.num_outputs if outputs.dim() <= 2 else outputs.shape[1]
        numbers = _COPIES * jacobians.numbers(directions)
        if self._covariance.forms_rows:
            numbers += _COPIES * directions * self._selection.size
        needed = numbers * outputs.element_size()
        if needed > MAX_EXAMPLE_BYTES:
            raise UnsupportedError(
                f"the linearised predictive of one example needs {needed / 1e9:.1f} GB for "
                f'{directions} outputs. Predict with at="samples", or make only the last layer '
                'random: credo.Model(..., random="last_layer")'
            )
        return max(1, min(MAX_BATCH_SIZE, BATCH_BYTES // needed))

    def _jacobians(self, inputs: Inputs) -> Jacobians:
        return Jacobians.at(self._net, self._flat, self._selection, inputs)


def _directions(outputs: Tensor) -> Iterator[Tensor]:
    """For each position of (B, C, *positions) the cotangents of its C outputs."""
    classes = outputs.shape[1]
    flat = outputs.flatten(2)
    one = torch.eye(classes, dtype=outputs.dtype, device=outputs.device).unsqueeze(1)
    for position in range(flat.shape[2]):
        directions = outputs.new_zeros(classes, *flat.shape)
        directions[..., position] = one
        yield directions.view(classes, *outputs.shape)


def _root(covariance: Tensor) -> Tensor:
    """R with RRᵀ = covariance, which may be singular."""
    root, info = torch.linalg.cholesky_ex(covariance)
    failed = info > 0
    if bool(failed.any()):
        values, vectors = torch.linalg.eigh(covariance[failed])
        root[failed] = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return root
