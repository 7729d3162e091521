r"""A trained network as a Gaussian process (DNN2GP), from any Gaussian posterior over its weights.

    f(x) ~ GP( f(x; m),  J(x) Σ J(x')ᵀ )        prior: GP( J(x)v,  J(x) V J(x')ᵀ )

======  ====================================  =================================================
symbol  argument                              shape
======  ====================================  =================================================
m, Σ    ``posterior.q``                       (P,), (P, P): Laplace's of any structure, VI's,
                                              VOGN's, IVON's, Vadam's; Σ is never formed
v, V    ``posterior.model.prior``             N(0, 1/δ), or the Gaussian of a convex prior at m
J(x)    the network at m                      (K, P)
======  ====================================  =================================================

=============  =================  ======================  ==============
likelihood     mean               model variance          noise variance
=============  =================  ======================  ==============
Gaussian       f                  diag JΣJᵀ               scale²
Bernoulli      p = σ(f)           (Λ JΣJᵀ Λ), Λ = p − p²  p − p²
Categorical    p = softmax(f)     diag ΛJΣJᵀΛ             p − p²
=============  =================  ======================  ==============

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 50)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    >>> laplace = credo.Laplace(structure="full", train=credo.MAP(lr=0.02))
    >>> posterior = credo.fit(model, laplace, (x, x.sin()), epochs=100, progress=False)
    >>> gp = to_gp(posterior)
    >>> gp.kernel(x[:3], x[:5]).shape
    torch.Size([3, 5])
    >>> near, far = gp.predict(torch.tensor([[0.0], [6.0]])).model_variance.flatten()
    >>> bool(far > near)
    True

Reference: Khan, Immer, Abedi & Korzepa, "Approximate inference turns deep networks into Gaussian
processes", 2019 (arXiv:1906.01930).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.checks import Positive, checked
from credo.errors import UnsupportedError
from credo.families import Family, Gaussian
from credo.functionspace.convex_priors import prior_at
from credo.functionspace.kernels import (
    MAX_MEMORY,
    Kernel,
    KernelBlock,
    Of,
)
from credo.functionspace.pseudo_data import PseudoData
from credo.likelihoods.base import Classification, Regression
from credo.likelihoods.curvature import output_hessian
from credo.network.batches import as_inputs, chunks, like_weights
from credo.posterior.covariance import weight_covariance
from credo.posterior.features import Outputs
from credo.posterior.outputs import Linearisation, OutputGaussian
from credo.posterior.posterior import Posterior
from credo.types import Batch, Inputs


@dataclass(frozen=True, eq=False)
class GPPrediction:
    """Mean and variances of every example and output, (B, K).

    Args:
        mean: E[y], (B, K); for classes the probabilities.
        model_variance: What more data would remove.
        noise_variance: What is the data's own.
    """

    mean: Tensor
    model_variance: Tensor
    noise_variance: Tensor

    @property
    def variance(self) -> Tensor:
        """Of a target: the sum of both."""
        return self.model_variance + self.noise_variance

    @property
    def std(self) -> Tensor:
        """Its root."""
        return self.variance.sqrt()


@checked
class NetworkGP:
    """The Gaussian process that a network and a Gaussian over its weights are; see `to_gp`.

    Args:
        posterior: A network and a Gaussian over its weights.
        max_memory: Bytes that what is kept of the inputs may take.
    """

    def __init__(self, posterior: Posterior, max_memory: Positive = MAX_MEMORY) -> None:
        weight_covariance(posterior.q)  # refuses what is no Gaussian
        self.posterior, self._max_memory = posterior, max_memory

    @property
    def prior(self) -> Gaussian:
        """The prior over the weights, as the Gaussian it is (at the mean)."""
        return prior_at(self.posterior.model.prior_over_weights(), self.posterior.mean)

    @torch.no_grad()
    def mean(self, x: Inputs) -> Tensor:
        """f(x; m), the network's outputs.

        Args:
            x: Inputs, examples first.
        """
        with self.posterior.on_copy() as (model, flat):
            return model.outputs(like_weights(as_inputs(x), flat.vector))

    def kernel(
        self, x: Inputs, other: Inputs | None = None, outputs: Outputs = "sum", of: Of = "outputs"
    ) -> Tensor:
        """JΣJ'ᵀ between two sets of inputs, as data to plot or to give to another library.

        Args:
            x: Inputs, examples first.
            other: Those on the other side; None for the same.
            outputs: "sum" adds up the K outputs with themselves, (n, m); "each" keeps them apart,
                (K, n, m); "joint" has every pair, (n, K, m, K).
            of: "outputs", or "probs" for the kernel of the probabilities, ΛJΣJ'ᵀΛ'.
        """
        return self._kernel(self.posterior.q, x, other, outputs, of)

    def prior_kernel(
        self, x: Inputs, other: Inputs | None = None, outputs: Outputs = "sum", of: Of = "outputs"
    ) -> Tensor:
        """JVJ'ᵀ, JJ'ᵀ/δ for an isotropic prior: the tangent kernel, scaled.

        Args:
            x: Inputs, examples first.
            other: Those on the other side; None for the same.
            outputs: "sum", "each" or "joint", with the shapes of `kernel`.
            of: "outputs" or "probs".
        """
        return self._kernel(self.prior, x, other, outputs, of)

    def kernel_blocks(
        self, x: Inputs, other: Inputs | None = None, outputs: Outputs = "sum", of: Of = "outputs"
    ) -> Iterator[KernelBlock]:
        """The kernel tile by tile, for a matrix that does not fit; lazily.

        With ``other=None`` only tiles on and above the diagonal come.

        Args:
            x: Inputs, examples first.
            other: Those on the other side; None for the same.
            outputs: "sum", "each" or "joint", with the shapes of `kernel`.
            of: "outputs" or "probs".
        """
        with self.posterior.on_copy() as (model, flat):
            kernel = Kernel(model, flat, self.posterior.q, of, self._max_memory)
            paired = None if other is None else as_inputs(other)
            yield from kernel.blocks(as_inputs(x), paired, outputs)

    @torch.no_grad()
    def predict(self, x: Inputs) -> GPPrediction:
        """Mean, model variance and noise variance at every input, each in the outputs' shape.

        Args:
            x: Inputs, examples first.
        """
        likelihood = self.posterior.model.likelihood
        outputs = self.output_gaussian(x)
        f, covariance = outputs.mean, outputs.covariance
        if isinstance(likelihood, Regression):
            mean, _ = likelihood.mean_and_scale(f)
            if mean.shape != f.shape:
                raise UnsupportedError(
                    f"{type(likelihood).__name__} reads mean and noise from the network; their "
                    'uncertainty is not one variance. Use posterior.predict(x, at="linearised")'
                )
            noise = likelihood.variance(f).expand_as(f)
            return GPPrediction(f, outputs.variance, noise)
        if isinstance(likelihood, Classification) and f.dim() <= 2:
            probs = likelihood.probs(f)
            hessian = output_hessian(likelihood, f)
            variance = (hessian @ covariance @ hessian).diagonal(dim1=-2, dim2=-1).reshape(f.shape)
            return GPPrediction(probs, variance, probs - probs.square())
        raise UnsupportedError(
            f"{type(likelihood).__name__} with outputs {tuple(f.shape)} has no noise to set apart; "
            "output_gaussian(x) gives the outputs' mean and covariance"
        )

    @torch.no_grad()
    def output_gaussian(self, x: Inputs) -> OutputGaussian:
        """N(f, JΣJᵀ) of every input by itself: the linearised network's outputs.

        Args:
            x: Inputs, examples first.
        """
        with self.posterior.on_copy() as (model, flat):
            inputs = like_weights(as_inputs(x), flat.vector)
            linear = Linearisation(model, flat, self.posterior.q)
            size = linear.batch_size(inputs)
            parts = [linear.at(chunk) for chunk in chunks(inputs, size)]
        return OutputGaussian.concatenate(parts)

    def pseudo_data(self, data: Batch) -> PseudoData:
        """The regression problem of which this is the posterior; see `PseudoData`.

        Args:
            data: (inputs, targets).
        """
        return PseudoData(self.posterior, data, self.prior)

    def log_marginal_likelihood(
        self, data: Batch, prior_precision: float | None = None, noise_scale: float | None = None
    ) -> float:
        """How well prior and noise explain the data; `PseudoData.log_marginal_likelihood`.

        Args:
            data: (inputs, targets).
            prior_precision: δ of a prior N(0, 1/δ) for all weights; None takes the model's prior.
            noise_scale: Another noise of a Gaussian likelihood.
        """
        return self.pseudo_data(data).log_marginal_likelihood(prior_precision, noise_scale)

    def _kernel(
        self, q: Family, x: Inputs, other: Inputs | None, outputs: Outputs, of: Of
    ) -> Tensor:
        with self.posterior.on_copy() as (model, flat), torch.no_grad():
            kernel = Kernel(model, flat, q, of, self._max_memory)
            paired = None if other is None else as_inputs(other)
            return kernel.matrix(as_inputs(x), paired, outputs)


@checked
def to_gp(posterior: Posterior, max_memory: Positive = MAX_MEMORY) -> NetworkGP:
    """The Gaussian process of a posterior.

    Args:
        posterior: A network and a Gaussian over its weights: Laplace's of any structure, VI's,
            VOGN's, IVON's.
        max_memory: Bytes that what is kept of the inputs may take.
    """
    return NetworkGP(posterior, max_memory)
