r"""The Gaussian process with the moments of a posterior's own functions: for ensembles and chains.

    f ~ GP( E_q f(x; w),  Cov_q[f(x; w), f(x'; w)] )

A bag of networks has no mean to linearise at: halfway between two trained networks lies a third,
untrained one. Its functions have a mean and a covariance all the same, and no Jacobian is needed.
For a linear model and a Gaussian q it is `to_gp`'s process, up to the noise of the draws; of a
network under such a q it leaves the linearisation out.

=======  ==================  =================================================================
symbol   argument            meaning
=======  ==================  =================================================================
q        ``posterior.q``     any family: `Empirical`, a mixture, signs, Gaussians
S        ``samples``         draws; every member of a bag with equal weights once
=======  ==================  =================================================================

Covariances are those of the bag itself (over S), or estimates from draws (over S − 1). For classes
``predict`` has the probabilities' own variance beside E[p − p²]; of a bag they add up to p̄ − p̄².

    >>> import torch, credo
    >>> model = credo.Model(torch.nn.Linear(1, 1), credo.likelihoods.Gaussian(scale=0.1))
    >>> bag = credo.families.Empirical(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    >>> gp = SampledGP(credo.Posterior.at_network(model, bag))
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> gp.mean(x).flatten(), gp.kernel(x).round(decimals=4)
    (tensor([2., 4.]), tensor([[1., 2.],
        [2., 4.]]))
"""

from __future__ import annotations

import torch
from torch import Tensor

from credo.checks import Count, checked
from credo.errors import DataError, UnsupportedError
from credo.families import Delta, Empirical, Family, Gaussian
from credo.functionspace.gp import GPPrediction
from credo.functionspace.kernels import Of
from credo.likelihoods.base import Classification, Regression
from credo.likelihoods.curvature import output_hessian, output_hessian_trace
from credo.posterior.features import Outputs, rows_kernel
from credo.posterior.outputs import OutputGaussian
from credo.posterior.posterior import Posterior
from credo.types import Inputs

DRAWS = 64
"""How many functions are drawn where a posterior does not have a number of its own."""


def has_centre(q: Family) -> bool:
    """Whether the network at q's mean stands for q: of a Gaussian or a point, not of a bag."""
    return isinstance(q, Gaussian | Delta)


@checked
class SampledGP:
    """Mean and covariance of the functions that a posterior draws.

    Args:
        posterior: Any posterior: of an ensemble, a chain, a mixture.
        samples: How many functions are drawn; None takes every member of a bag once, or 64.
    """

    def __init__(self, posterior: Posterior, samples: Count | None = None) -> None:
        q = posterior.q
        members = len(q) if isinstance(q, Empirical) and q.weights is None else None
        wanted = samples or members or DRAWS
        self.posterior, self.samples = posterior, min(wanted, members or wanted)
        self._freedom = self.samples if self.samples == members else self.samples - 1
        if self._freedom < 1:
            raise DataError(f"samples={samples}: one draw has no covariance; take two or more")

    def functions(self, x: Inputs) -> Tensor:
        """f_s(x), (S, B) or (S, B, K): at any inputs the same S functions.

        Args:
            x: Inputs, examples first.
        """
        return self.posterior.predict(x, samples=self.samples, at="samples").outputs

    def mean(self, x: Inputs) -> Tensor:
        """E f(x), in the outputs' shape.

        Args:
            x: Inputs, examples first.
        """
        return self.functions(x).mean(0)

    @checked
    def kernel(
        self, x: Inputs, other: Inputs | None = None, outputs: Outputs = "sum", of: Of = "outputs"
    ) -> Tensor:
        """Cov[f(x), f(x')], between two sets of inputs.

        Args:
            x: Inputs, examples first.
            other: Those on the other side; None for the same.
            outputs: "sum", "each" or "joint", with the shapes of `NetworkGP.kernel`.
            of: "outputs" or "probs".
        """
        mine = self._deviations(self._values(x, of))
        theirs = mine if other is None else self._deviations(self._values(other, of))
        return rows_kernel(mine, theirs, outputs)

    def output_gaussian(self, x: Inputs) -> OutputGaussian:
        """Mean and covariance of the outputs of every input by itself.

        Args:
            x: Inputs, examples first.
        """
        f = self.functions(x)
        rows = self._deviations(f)
        return OutputGaussian(f.mean(0), rows @ rows.mT)

    def predict(self, x: Inputs) -> GPPrediction:
        """Mean, model variance and noise variance of every target, each in its shape.

        Args:
            x: Inputs, examples first.
        """
        likelihood, f = self.posterior.model.likelihood, self.functions(x)
        if isinstance(likelihood, Regression):
            means = torch.stack([likelihood.mean(each) for each in f])
            noise = torch.stack([likelihood.variance(each) for each in f]).mean(0)
            return GPPrediction(means.mean(0), self._variance(means), noise)
        if isinstance(likelihood, Classification) and f.dim() <= 3:
            probs = likelihood.probs(f.flatten(0, 1)).view_as(f)
            noise = (probs - probs.square()).mean(0)
            return GPPrediction(probs.mean(0), self._variance(probs), noise)
        raise UnsupportedError(
            f"{type(likelihood).__name__} with outputs {tuple(f.shape[1:])} has no noise to set "
            "apart; posterior.predict(x) gives its predictive"
        )

    def relevance(self, x: Inputs, targets: Tensor | None = None) -> Tensor:
        """E tr Λ of every example, (B,).

        Args:
            x: Inputs, examples first.
            targets: The targets, where the likelihood ignores some or is a loss.
        """
        likelihood = self.posterior.model.likelihood
        traces = [output_hessian_trace(likelihood, f, targets) for f in self.functions(x)]
        return torch.stack(traces).mean(0)

    def leverage(self, x: Inputs, targets: Tensor | None = None) -> Tensor:
        """tr(E[Λ] Cov f) of every example, (B,).

        Args:
            x: Inputs, examples first.
            targets: The targets, where the likelihood is a loss.
        """
        likelihood, f = self.posterior.model.likelihood, self.functions(x)
        hessian = torch.stack([output_hessian(likelihood, each, targets) for each in f]).mean(0)
        rows = self._deviations(f)
        return (rows * (hessian @ rows)).sum((1, 2))

    def _variance(self, values: Tensor) -> Tensor:
        return (values - values.mean(0)).square().sum(0) / self._freedom

    def _values(self, x: Inputs, of: Of) -> Tensor:
        values, likelihood = self.functions(x), self.posterior.model.likelihood
        if of == "outputs":
            return values
        if not isinstance(likelihood, Classification):
            raise UnsupportedError(f'of="probs" is for classes, not {type(likelihood).__name__}')
        return likelihood.probs(values.flatten(0, 1)).view_as(values)

    def _deviations(self, values: Tensor) -> Tensor:
        """What, times itself transposed, is the covariance: (B, K, S)."""
        flat = values.flatten(2) if values.dim() > 2 else values.unsqueeze(2)
        return (flat - flat.mean(0)).permute(1, 2, 0) / self._freedom**0.5
