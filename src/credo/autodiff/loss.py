r"""ℓ(θ) = w·Σ_i ℓ_i(θ) as a function of one flat vector, with the derivatives the rule asks for.

A loss comes from a function or from a network and a batch of data. It has no prior in it: the prior
enters the learning rule exactly (see `credo.rule.learner`).

    >>> import torch
    >>> loss = Loss.of(lambda theta: (theta**4).sum())
    >>> theta = torch.tensor([1.0, 2.0])
    >>> loss.gradient(theta), loss.hessian_diagonal(theta)
    (tensor([ 4., 32.]), tensor([12., 48.]))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeAlias

import torch
from torch import Tensor, nn

from credo.errors import DataError, UnsupportedError
from credo.network import Selection
from credo.types import Batch, Likelihood, Vector

_PRODUCTS = 256
"""How many Hessian products are taken at once."""

_MAX_NUMBERS = 2**24
"""How many gradient entries of single examples are held at once: 64 MB in float32."""

ExampleLoss: TypeAlias = Callable[..., Tensor]
"""θ (P,) and one example's tensors, without a batch dimension → that example's loss, 0-dim."""


class ModelLike(Protocol):
    """What of a `credo.Model` makes a loss."""

    net: nn.Module
    likelihood: Likelihood

    @property
    def random(self) -> Selection:
        """The weights that θ stands for."""
        ...


@dataclass(frozen=True)
class Loss:
    """A loss and its derivatives at any θ (P,).

    Where what they need is not given, derivatives are refused.

    Args:
        examples: θ → the losses of all examples, (B,).
        weight: How often each counts: num_data/B makes a minibatch stand for all data.
        one: The loss of a single example, for per-example gradients.
        data: The tensors, each with a batch dimension, that ``one`` takes.
        outputs: θ → the network's outputs, which Gauss–Newton needs.
        likelihood: p(y | f), which Gauss–Newton needs.
    """

    examples: Callable[[Vector], Tensor]
    weight: float = 1.0
    one: ExampleLoss | None = None
    data: tuple[Tensor, ...] = field(default=(), repr=False)
    outputs: Callable[[Vector], Tensor] | None = None
    likelihood: Likelihood | None = None

    @classmethod
    def of(cls, function: Callable[[Vector], Tensor]) -> Self:
        """The loss that is this scalar function of θ.

        Args:
            function: θ (P,) → 0-dim.
        """
        return cls(lambda theta: function(theta).reshape(1))

    @classmethod
    def over_examples(cls, one: ExampleLoss, data: tuple[Tensor, ...], weight: float = 1.0) -> Self:
        """w·Σ_i one(θ, x_i, y_i, …), of tensors whose first dimension counts the examples.

        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 1.0])
        >>> loss = Loss.over_examples(lambda w, x, y: 0.5 * (y - x @ w).square(), (x, y))
        >>> loss.value(torch.zeros(1)), loss.example_squares(torch.zeros(1))
        (tensor(1.), (tensor([-3.]), tensor([5.])))

        Args:
            one: θ and one example's tensors → its loss.
            data: Those tensors, examples first.
            weight: How often each example counts.
        """
        every = torch.func.vmap(one, (None, *(0 for _ in data)), randomness="different")
        return cls(lambda theta: every(theta, *data), weight, one, data)

    @classmethod
    def of_model(cls, model: ModelLike, batch: Batch, num_data: int | None = None) -> Self:
        """The negative log-likelihood of a batch, of the network's random weights θ.

        Args:
            model: The network and its likelihood.
            batch: (inputs, targets).
            num_data: For how many examples the batch stands; None takes the mean over the batch, as
                deep learning does.
        """
        inputs, targets = batch
        if not isinstance(inputs, Tensor):
            raise UnsupportedError("the learning rule takes networks of a single input tensor")
        segments = model.random.segments
        shapes = [(s.name, s.shape, s.size) for s in segments]

        def outputs(theta: Vector, x: Tensor) -> Tensor:
            pieces = theta.split([size for _, _, size in shapes])
            weights = {
                name: piece.view(shape)
                for (name, shape, _), piece in zip(shapes, pieces, strict=True)
            }
            return torch.func.functional_call(model.net, weights, (x,))

        def one(theta: Vector, x: Tensor, y: Tensor) -> Tensor:
            logits = outputs(theta, x.unsqueeze(0))
            return -model.likelihood.log_prob(logits, y.unsqueeze(0)).squeeze(0)

        return cls(
            examples=lambda theta: -model.likelihood.log_prob(outputs(theta, inputs), targets),
            weight=(1 if num_data is None else num_data) / len(targets),
            one=one,
            data=(inputs, targets),
            outputs=lambda theta: outputs(theta, inputs),
            likelihood=model.likelihood,
        )

    def smoothed(self, weights: Tensor, offsets: Tensor) -> Self:
        """θ ↦ Σ_s w_s ℓ(θ + δ_s), of weights (S,) and offsets (S, P), evaluated all at once.

        Its derivatives are the averages of ℓ's derivatives.

        Args:
            weights: w, (S,).
            offsets: δ, (S, P).
        """
        values = torch.func.vmap(self.value)
        return type(self).of(lambda theta: weights @ values(theta + offsets))

    def value(self, theta: Vector) -> Tensor:
        """ℓ(θ), 0-dim.

        Args:
            theta: θ, (P,).
        """
        return self.weight * self.examples(theta).sum()

    def gradient(self, theta: Vector) -> Vector:
        """∇ℓ(θ), (P,).

        Args:
            theta: θ, (P,).
        """
        leaf = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.value(leaf), leaf)
        return gradient

    def hessian(self, theta: Vector) -> Tensor:
        """∇²ℓ(θ), (P, P), by reverse over reverse mode.

        Args:
            theta: θ, (P,).
        """
        # torch's forward mode compiles its rules by torch.jit, which warns that it is going away.
        hessian: Tensor = torch.func.jacrev(torch.func.grad(self.value))(theta.detach())
        return hessian

    def hessian_product(self, theta: Vector, vector: Vector) -> tuple[Vector, Vector]:
        """∇ℓ(θ) and ∇²ℓ(θ)v, both (P,), by one double backward pass.

        Args:
            theta: θ, (P,).
            vector: v, (P,).
        """
        leaf = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.value(leaf), leaf, create_graph=True)
        if not gradient.requires_grad:  # a linear loss
            return gradient, torch.zeros_like(vector)
        (product,) = torch.autograd.grad(gradient, leaf, vector, materialize_grads=True)
        return gradient.detach(), product

    def hessian_diagonal(self, theta: Vector) -> Vector:
        """The diagonal of ∇²ℓ(θ), (P,), by P Hessian products: exact, and for small P only.

        Args:
            theta: θ, (P,).
        """
        product = torch.func.vjp(torch.func.grad(self.value), theta.detach())[1]
        basis = torch.eye(theta.numel(), dtype=theta.dtype, device=theta.device)
        diagonal: Vector = torch.func.vmap(lambda v: product(v)[0] @ v, chunk_size=_PRODUCTS)(basis)
        return diagonal

    def example_gradients(self, theta: Vector) -> Tensor:
        """∇ℓ_i(θ) of every example, unweighted, (B, P).

        Args:
            theta: θ, (P,).
        """
        return _gradients(self._one(), theta.detach(), self.data)

    def example_squares(self, theta: Vector) -> tuple[Vector, Vector]:
        """∇ℓ(θ) and w·Σ_i ∇ℓ_i∘∇ℓ_i, both (P,), in bounded memory.

        Args:
            theta: θ, (P,).
        """
        one, theta = self._one(), theta.detach()
        total, squared = torch.zeros_like(theta), torch.zeros_like(theta)
        chunk = max(1, _MAX_NUMBERS // theta.numel())
        for parts in zip(*(tensor.split(chunk) for tensor in self.data), strict=True):
            gradients = _gradients(one, theta, parts)
            total += gradients.sum(0)
            squared += gradients.square().sum(0)
        return self.weight * total, self.weight * squared

    def gauss_newton(self, theta: Vector) -> Tensor:
        """w·Σ_i J_iᵀΛ_iJ_i, (P, P), with J_i = ∂f_i/∂θ and Λ_i = −∂² log p/∂f² at f_i.

        Args:
            theta: θ, (P,).
        """
        if self.outputs is None or self.likelihood is None:
            raise UnsupportedError(
                "Gauss–Newton needs to know what of the loss is the network and what the "
                "likelihood: build it by Loss.of_model, or give outputs= and likelihood="
            )
        theta = theta.detach()
        outputs = self.outputs(theta)
        inner = self.likelihood.hessian(outputs)
        if inner.dim() != 3:
            raise UnsupportedError(
                f"Gauss–Newton here takes outputs (B, C), got shape {tuple(outputs.shape)}"
            )
        jacobian = torch.func.jacrev(self.outputs)(theta).flatten(1, -2)
        matrix: Tensor = self.weight * torch.einsum("bcp,bcd,bdq->pq", jacobian, inner, jacobian)
        return matrix

    def _one(self) -> ExampleLoss:
        if self.one is None:
            raise DataError(
                "per-example gradients need a loss that is a sum over examples: build it by "
                "Loss.over_examples or Loss.of_model"
            )
        return self.one


def _gradients(one: ExampleLoss, theta: Vector, examples: tuple[Tensor, ...]) -> Tensor:
    """∇ℓ_i(θ) of these examples, (B, P), without a loop over them."""
    in_dims = (None, *(0 for _ in examples))
    return torch.func.vmap(torch.func.grad(one), in_dims, randomness="different")(theta, *examples)
