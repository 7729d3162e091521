r"""The batch with the largest determinant: information about the weights of a linearised network.

    I(y_A; θ) = ½ log det(I + K_AA),     K_ij = R_iᵀ J_i Σ J_jᵀ R_j,     R_i R_iᵀ = Λ_i

symbols: A the batch, J_i = ∂f(x_i)/∂θ at the mean of q = N(m, Σ), Λ_i the likelihood's curvature
at f(x_i), so that a label is taken as a Gaussian measurement of f with precision Λ. For a Gaussian
likelihood and outputs linear in the weights it is exact: BatchBALD without a sample. A batch of
similar examples has a small determinant, so the rule spreads.

Greedy: each step takes the example that adds most, ½ log det(I + K_ii | A), and conditions the
others on it. That is exact for one example and where K_ij = 0 between examples, and reaches
at least 1 − 1/e of the best batch otherwise (the information is submodular).

    >>> import torch
    >>> kernel = torch.tensor([[4.0, 4.0, 0.0], [4.0, 4.0, 0.0], [0.0, 0.0, 1.0]])
    >>> chosen, gains = greedy_determinant(kernel.diagonal()[:, None, None],
    ...                                    lambda i: kernel[:, i, None, None], 2)
    >>> chosen, [round(gain, 4) for gain in gains]       # the copy of the first adds less
    ([0, 2], [0.8047, 0.3466])

References: MacKay, "Information-based objective functions for active data selection", 1992;
Krause, Singh & Guestrin, "Near-optimal sensor placements in Gaussian processes", 2008.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from credo.autodiff.jacobians import Jacobians
from credo.errors import DataError
from credo.families import Family, Gaussian
from credo.likelihoods.curvature import curvature_roots
from credo.model import Model
from credo.network import FlatParams
from credo.network.batches import chunks, input_rows, number_of_examples
from credo.posterior.covariance import weight_covariance
from credo.posterior.outputs import Linearisation
from credo.posterior.posterior import Posterior
from credo.types import Inputs

KEPT_BYTES = 256 * 2**20
"""Up to here the rows RᵀJ of all candidates are kept; beyond it they are made again each step."""


def greedy_determinant(
    own: Tensor, cross: Callable[[int], Tensor], count: int
) -> tuple[list[int], list[float]]:
    """Rows of the chosen examples, best first, and what each adds, in nats.

    Args:
        own: K_ii of every example, (B, R, R).
        cross: From an example j to K_ij of every i with it, (B, R, R).
        count: How many to choose.
    """
    if not 1 <= count <= len(own):
        raise DataError(f"count={count} must be between 1 and the {len(own)} examples there are")
    own = own.double()
    one = torch.eye(own.shape[-1], dtype=own.dtype, device=own.device)
    explained: list[Tensor] = []  # V_t (B, R, R): what is known of each example from the t-th
    chosen: list[int] = []
    gains: list[float] = []
    for _ in range(count):
        # What rounding makes negative adds nothing.
        gain = 0.5 * torch.linalg.eigvalsh(own).clamp_min(0).log1p().sum(-1)
        gain[chosen] = -torch.inf
        best = int(gain.argmax())
        chosen.append(best)
        gains.append(float(gain[best]))
        if len(chosen) == count:
            break
        given = cross(best).double() - sum(v @ v[best].mT for v in explained)
        values, vectors = torch.linalg.eigh(own[best])
        factor = torch.linalg.cholesky(one + (vectors * values.clamp_min(0)) @ vectors.mT)
        v = torch.linalg.solve_triangular(factor.mT, given, upper=True, left=False)
        explained.append(v)
        own = own - v @ v.mT
    return chosen, gains


def choose(posterior: Posterior, inputs: Inputs, count: int) -> tuple[list[int], list[float]]:
    """`greedy_determinant` for the kernel of a Gaussian posterior.

    Args:
        posterior: What is known of the weights so far.
        inputs: Those that may be chosen.
        count: How many to choose.
    """
    with posterior.on_copy() as (model, flat):
        kernel = _Kernel(model, posterior.q, flat, inputs)
        with torch.no_grad():
            return greedy_determinant(kernel.own(), kernel.cross, count)


class _Kernel:
    """K between examples of a pool, at the weights that ``flat`` holds."""

    def __init__(self, model: Model, q: Family, flat: FlatParams, inputs: Inputs) -> None:
        assert isinstance(q, Gaussian)
        self.model, self.q, self.flat, self.inputs = model, q, flat, inputs
        first = next(chunks(inputs, 1, flat.vector))
        self.length = Linearisation(self.model, flat, self.q).batch_size(first)
        _, roots = self._at(first)
        needed = number_of_examples(inputs) * len(roots) * self.q.size * flat.vector.element_size()
        self.kept = needed <= KEPT_BYTES
        self._rows = torch.empty(0)

    def own(self) -> Tensor:
        """K_ii, (B, R, R)."""
        if self.kept:
            pulled = [jacobians.pull(roots).movedim(0, 1) for jacobians, roots in self._chunks()]
            self._rows = torch.cat(pulled)  # (B, R, P)
            return torch.cat([self.q.solve(rows) @ rows.mT for rows in pulled])
        covariance = weight_covariance(self.q)
        return torch.cat([covariance.of_outputs(*chunk) for chunk in self._chunks()])

    def cross(self, chosen: int) -> Tensor:
        """K_ij of every i with j = chosen, (B, R, R)."""
        if self.kept:
            return self._rows @ self.q.solve(self._rows[chosen]).mT
        example = input_rows(self.inputs, torch.tensor([chosen]))
        jacobians, roots = self._at(next(chunks(example, 1, self.flat.vector)))
        columns = self.q.solve(jacobians.pull(roots)[:, 0]).mT
        return torch.cat([jacobians.times(columns, roots) for jacobians, roots in self._chunks()])

    def _chunks(self) -> Iterator[tuple[Jacobians, Tensor]]:
        for piece in chunks(self.inputs, self.length, self.flat.vector):
            yield self._at(piece)

    def _at(self, inputs: Inputs) -> tuple[Jacobians, Tensor]:
        jacobians = Jacobians.at(self.model.net, self.flat, self.model.random, inputs)
        # No label is known, so none is ignored.
        return jacobians, curvature_roots("ggn", self.model.likelihood, jacobians.outputs, None)
