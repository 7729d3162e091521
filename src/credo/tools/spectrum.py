r"""The extreme curvatures of a loss: eigenvalues of its Hessian or Gauss–Newton matrix, by Lanczos.

    H = ∇²ℓ̄(θ)   or   H = (1/n) Σ_i J_iᵀΛ_iJ_i,      ℓ̄ the mean negative log-likelihood of the data

k products with H make an orthonormal basis V of the Krylov space of a random vector and the
tridiagonal matrix T = VᵀHV, whose eigenvalues (Ritz values) approach those of H from inside, the
extreme ones first. A Ritz value has an eigenvalue of H within its residual, which is reported. The
basis is orthogonalised twice in every step, without which eigenvalues appear several times. Where
k reaches the number of weights the result is exact.

The prior is not in H: a Gaussian one adds temperature/(num_data·scale²) to every eigenvalue. The
network runs in eval mode, at the weights it has, and H is that of its random weights.

What for: SGD's rate and momentum (`credo.tools.robust_region`). The spectrum of a large network
reaches down to zero, so that its smallest positive eigenvalue says what k products can see, not
more; the largest is found to a few percent by about ten.

symbols: k ``products``, θ the network's random weights, J_i the Jacobian of output i, Λ_i =
−∂² log p/∂f².

    >>> import torch, credo
    >>> from credo.tools.spectrum import extreme_eigenvalues
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.zeros(2, 1)
    >>> model = credo.Model(torch.nn.Linear(2, 1, bias=False), credo.likelihoods.Gaussian(1.0))
    >>> extremes = extreme_eigenvalues(model, (x, y))           # of xᵀx/2
    >>> round(extremes.smallest_positive, 4), round(extremes.largest, 4)
    (0.5, 4.5)

Reference: Golub and Van Loan, Matrix Computations, 10.1; for networks Ghorbani et al., 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from credo.autodiff.loss import Loss
from credo.checks import Count, Positive, checked
from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.model import Model
from credo.network.state import evaluating
from credo.types import Batch, Vector


@dataclass(frozen=True)
class ExtremeEigenvalues:
    """What `extreme_eigenvalues` found. Each error is a residual: an eigenvalue lies within it.

    Args:
        largest: The largest Ritz value.
        largest_error: Its residual.
        smallest: The smallest Ritz value, which may be negative.
        smallest_error: Its residual.
        smallest_positive: The least that is positive beyond rounding, None if there is none.
        smallest_positive_error: Its residual.
        products: Products that were taken.
        exact: Whether the Krylov space was all there is.
    """

    largest: float
    largest_error: float
    smallest: float
    smallest_error: float
    smallest_positive: float | None
    smallest_positive_error: float | None
    products: int
    exact: bool


@checked
def extreme_eigenvalues(
    model: Model,
    data: Batch | Iterable[Batch],
    matrix: Literal["hessian", "ggn"] = "hessian",
    *,
    products: Count = 32,
    generator: Generator | None = None,
    max_memory: Positive = 2e9,
) -> ExtremeEigenvalues:
    """The extreme eigenvalues of a model's curvature on data.

    Args:
        model: At the weights that its network has.
        data: A batch, or batches that can be gone through ``products`` times: a list, a loader.
        matrix: The "hessian" of the loss, or "ggn", its Gauss–Newton matrix.
        products: How many products are taken; the basis has as many vectors of the weights' size.
        generator: Of the first vector.
        max_memory: Bytes that the basis may take.
    """
    theta = model.weights(model.random)
    batches: Iterable[Batch] = [data] if isinstance(data, tuple) else data
    size = theta.numel()
    needed = min(products, size) * size * theta.element_size()
    if needed > max_memory:
        raise UnsupportedError(
            f"{products} vectors of {size} weights take {needed / 1e9:.1f} GB, more than "
            f"max_memory={max_memory / 1e9:.1f} GB: take fewer products (8 find the largest "
            "eigenvalue to a few percent), or choose fewer random weights"
        )
    one = _hessian_product if matrix == "hessian" else _gauss_newton_product

    def product(vector: Vector) -> Vector:
        total, count = torch.zeros_like(vector), 0
        for batch in batches:
            examples = len(batch[1])
            total.add_(one(Loss.of_model(model, batch), theta, vector), alpha=examples)
            count += examples
        if not count:
            raise DataError("there are no data: batches must be such as can be iterated over again")
        return total / count

    start = torch.randn(size, generator=generator, dtype=theta.dtype).to(theta.device)
    with evaluating(model.net):
        diagonal, off, residual = lanczos(product, start, min(products, size))
    return _read(diagonal, off, residual, torch.finfo(theta.dtype).eps)


def lanczos(
    product: Callable[[Vector], Vector], start: Vector, steps: int
) -> tuple[Tensor, Tensor, float]:
    """T's diagonal (k,), its off-diagonal (k − 1,), both float64, and the norm of what is left.

    k is less than ``steps`` if the space was exhausted before.

    Args:
        product: From a vector to its product with the matrix.
        start: The first vector, of any length but 0.
        steps: How many products are taken at most.

    >>> matrix = torch.diag(torch.tensor([1.0, 2.0, 5.0]))
    >>> diagonal, off, left = lanczos(lambda v: matrix @ v, torch.ones(3), 3)
    >>> len(diagonal), round(diagonal.sum().item(), 4), left < 1e-6
    (3, 8.0, True)
    """
    basis = start.new_empty(steps, start.numel())
    diagonal: list[float] = []
    off: list[float] = []
    vector = start / torch.linalg.vector_norm(start)
    left, size = 0.0, 0.0
    for step in range(steps):
        basis[step] = vector
        image = product(vector)
        diagonal.append(float(image @ vector))
        size = max(size, float(torch.linalg.vector_norm(image)))
        known = basis[: step + 1]
        for _ in range(2):
            image = image - known.mT @ (known @ image)
        left = float(torch.linalg.vector_norm(image))
        if not (math.isfinite(left) and math.isfinite(size)):
            raise NonFiniteError(
                "a product with the curvature is not finite: the network's loss or its derivatives "
                "overflow at these weights"
            )
        if left <= 10 * steps * torch.finfo(start.dtype).eps * size:
            left = 0.0
            break
        if step + 1 < steps:
            off.append(left)
            vector = image / left
    both = (torch.tensor(numbers, dtype=torch.float64) for numbers in (diagonal, off))
    return (*both, left)  # type: ignore[return-value]


def _read(diagonal: Tensor, off: Tensor, left: float, eps: float) -> ExtremeEigenvalues:
    values, vectors = torch.linalg.eigh(diagonal.diag() + off.diag(1) + off.diag(-1))
    errors = left * vectors[-1].abs()
    noise = 10 * len(values) * eps * float(values.abs().max())
    positive = (values > noise).nonzero()
    least = int(positive[0]) if len(positive) else None
    return ExtremeEigenvalues(
        largest=float(values[-1]),
        largest_error=float(errors[-1]),
        smallest=float(values[0]),
        smallest_error=float(errors[0]),
        smallest_positive=None if least is None else float(values[least]),
        smallest_positive_error=None if least is None else float(errors[least]),
        products=len(values),
        exact=left == 0.0,
    )


def _hessian_product(loss: Loss, theta: Vector, vector: Vector) -> Vector:
    return loss.hessian_product(theta, vector)[1]


def _gauss_newton_product(loss: Loss, theta: Vector, vector: Vector) -> Vector:
    """JᵀΛJv without J: Jv is the derivative of Jᵀu by u, which takes backward passes only."""
    assert loss.outputs is not None
    assert loss.likelihood is not None
    leaf = theta.detach().requires_grad_()
    outputs = loss.outputs(leaf)
    inner = loss.likelihood.hessian(outputs.detach())
    if inner.dim() != 3:
        raise UnsupportedError(
            f"Gauss–Newton products take outputs (B, C), got shape {tuple(outputs.shape)}: take "
            'matrix="hessian"'
        )
    dummy = torch.zeros_like(outputs, requires_grad=True)
    (pulled,) = torch.autograd.grad(outputs, leaf, dummy, create_graph=True)
    (pushed,) = torch.autograd.grad(pulled, dummy, vector)
    weighted = torch.einsum("bcd,bd->bc", inner, pushed)
    (product,) = torch.autograd.grad(outputs, leaf, weighted)
    return loss.weight * product
