r"""A penalty on what a network says at remembered inputs: functional regularisation.

    R(w) = ½ Σ_t Σ_c d_tcᵀ K_tc⁻¹ d_tc,        d_tc = p_c(X_t; w) − p_c(X_t; w_old)
    K_tc = J_tc diag(v) J_tcᵀ + εI,            J_tc = ∂p_c(X_t; w_old)/∂w

One block for each old task t and each output c: p_c is the probability of class c (for regression
the c-th mean), so J = ∂p/∂w has the softmax's Λ inside. The kernels are constants: nothing is
differentiated through them.

======  ==================  ====================================================================
symbol  argument            meaning, shape
======  ==================  ====================================================================
X_t     ``inputs``          remembered inputs of task t, (M, …)
v       ``variance``        posterior variance of every random weight, (P,)
ε       ``jitter``          added to the kernel's diagonal
K_tc    `prediction_kernels`  (C, M, M), in float64
L⁻¹     `whiteners`         inverse Cholesky factors, K⁻¹ = L⁻ᵀL⁻¹; None for K = I (L2 variant)
======  ==================  ====================================================================

Kept are the L⁻¹, so that R = ½‖L⁻¹d‖² can't become negative by rounding and a step costs two
products with small matrices. K itself is summed in float64: with ε = 1e-6 it would not be positive
definite in float32. All tasks' memories pass through the network in one batch.

    >>> import torch, credo
    >>> model = credo.Model(torch.nn.Linear(2, 2), credo.likelihoods.Categorical())
    >>> x = torch.randn(5, 2)
    >>> kernels = prediction_kernels(model, x, torch.ones(6), jitter=1e-6)
    >>> kernels.shape
    torch.Size([2, 5, 5])
    >>> penalty = FunctionalPenalty([Anchor.at(model, x, whiteners(kernels))])
    >>> penalty.value(model.outputs(penalty.inputs), model.likelihood).item()
    0.0

Reference: Pan et al., "Continual deep learning by functional regularisation of memorable past",
2020 (arXiv:2004.14070). For a linear model with memory of full rank R is ½dᵀ(Σ + εG⁻¹)⁻¹d with
d = w − w_old and G = XᵀX: as ε → 0 the penalty of elastic weight consolidation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.autodiff.jacobians import Jacobians
from credo.errors import DataError, UnsupportedError
from credo.likelihoods.base import Classification, Regression
from credo.model import Model
from credo.network.batches import joined
from credo.network.selection import Selection
from credo.network.state import evaluating
from credo.types import Inputs, Likelihood, Segment, Vector

MAX_NUMBERS = 2**26
"""How many entries of Jacobians are held at once, a single larger tensor excepted: 256 MB."""
COLUMNS = 2**15
"""How many weights of all examples are taken to float64 at once."""


def predictions(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """What is remembered of outputs f: probabilities of classes, or means of targets; (B, C)."""
    if isinstance(likelihood, Classification):
        return likelihood.probs(outputs).flatten(1) if outputs.dim() > 1 else (
            likelihood.probs(outputs).unsqueeze(1)
        )  # fmt: skip
    if isinstance(likelihood, Regression):
        return likelihood.mean(outputs).reshape(len(outputs), -1)
    raise UnsupportedError(
        "functional regularisation compares probabilities or means, and "
        f"{type(likelihood).__name__} has neither; use a classification or regression likelihood"
    )


def count_examples(inputs: Inputs) -> int:
    """How many there are.

    >>> count_examples((torch.zeros(3, 2), torch.zeros(3)))
    3
    """
    if isinstance(inputs, Tensor):
        return len(inputs)
    return len(next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs)))


def prediction_kernels(
    model: Model, inputs: Inputs, variance: Vector, jitter: float = 1e-6
) -> Tensor:
    """K_c = J_c diag(v) J_cᵀ + εI for every output c at the present weights, (C, M, M), float64.

    The network is in eval mode. The Jacobians are formed parameter by parameter, so that
    ``MAX_NUMBERS`` bounds the memory unless one tensor alone exceeds it.
    """
    if variance.shape != (model.random.size,):
        raise DataError(
            f"variance has shape {tuple(variance.shape)}, but {model.random.size} weights are "
            "random: one number for each is needed"
        )
    total: Tensor | None = None
    with evaluating(model.net):
        for part, place in _parts(model.random.segments, count_examples(inputs)):
            jacobians = Jacobians.at(model.net, model.bind(), part, inputs)
            kernels = _kernels(jacobians, model.likelihood, variance[place].double())
            total = kernels if total is None else total + kernels
    assert total is not None
    total.diagonal(dim1=1, dim2=2).add_(jitter)
    return total


def whiteners(kernels: Tensor) -> Tensor:
    """L⁻¹ of every kernel K = LLᵀ, (C, M, M)."""
    roots, info = torch.linalg.cholesky_ex(kernels)
    if bool(info.any()):
        raise DataError(
            f"{int((info > 0).sum())} of {len(kernels)} kernels are not positive definite: "
            "remembered inputs repeat, or the jitter is too small for them; raise jitter"
        )
    identity = torch.eye(kernels.shape[-1], dtype=kernels.dtype, device=kernels.device)
    return torch.linalg.solve_triangular(roots, identity.expand_as(kernels), upper=False)


@dataclass(frozen=True)
class Anchor:
    """What one old task holds fast: its inputs (M, …), old predictions (M, C), L⁻¹ (C, M, M)."""

    inputs: Inputs
    predictions: Tensor
    whiteners: Tensor | None = None

    @classmethod
    def at(cls, model: Model, inputs: Inputs, whiteners: Tensor | None = None) -> Anchor:
        """With the model's present predictions, in eval mode."""
        with evaluating(model.net), torch.no_grad():
            predicted = predictions(model.likelihood, model.outputs(inputs))
        return cls(inputs, predicted, whiteners)

    @property
    def kind(self) -> tuple[int, int, bool]:
        """What anchors that are computed together have in common."""
        size, outputs = self.predictions.shape
        return size, outputs, self.whiteners is None


class FunctionalPenalty:
    """R(w) over the anchors of all old tasks, from one pass over ``inputs``.

    Anchors with equally many inputs and outputs are one batch of matrices.
    """

    def __init__(self, anchors: Sequence[Anchor]) -> None:
        if not anchors:
            raise DataError("a functional penalty needs the memory of at least one old task")
        kinds: dict[tuple[int, int, bool], list[Anchor]] = {}
        for anchor in anchors:
            kinds.setdefault(anchor.kind, []).append(anchor)
        ordered = [anchor for same in kinds.values() for anchor in same]
        self.inputs, self._old = joined([(a.inputs, a.predictions) for a in ordered])
        self._stacks = [_Stack.of(same) for same in kinds.values()]

    def value(self, outputs: Tensor, likelihood: Likelihood) -> Tensor:
        """R from the network's outputs at ``inputs``: a scalar that can be differentiated."""
        change = predictions(likelihood, outputs) - self._old
        parts = change.split([stack.size for stack in self._stacks])
        values = [stack.value(part) for stack, part in zip(self._stacks, parts, strict=True)]
        return values[0] if len(values) == 1 else torch.stack(values).sum()


@dataclass(frozen=True)
class _Stack:
    """T anchors of one shape, whose L⁻¹ are (T, C, M, M)."""

    shape: tuple[int, int, int]
    whiteners: Tensor | None

    @classmethod
    def of(cls, anchors: Sequence[Anchor]) -> _Stack:
        old = anchors[0].predictions
        factors = [a.whiteners for a in anchors if a.whiteners is not None]
        return cls((len(anchors), *old.shape), torch.stack(factors).to(old) if factors else None)

    @property
    def size(self) -> int:
        """T·M."""
        return self.shape[0] * self.shape[1]

    def value(self, change: Tensor) -> Tensor:
        """½ Σ_t Σ_c |L⁻¹d|² for changes (T·M, C)."""
        if self.whiteners is not None:
            change = self.whiteners @ change.view(self.shape).mT.unsqueeze(-1)
        return 0.5 * change.square().sum()


def _kernels(jacobians: Jacobians, likelihood: Likelihood, variance: Vector) -> Tensor:
    """J_c diag(v) J_cᵀ of the weights that these Jacobians are of, (C, M, M)."""
    kernels = []
    for root in _cotangents(likelihood, jacobians.outputs):
        rows = jacobians.pull(root.unsqueeze(0))[0]
        kernel = variance.new_zeros(len(rows), len(rows))
        for part, v in zip(rows.split(COLUMNS, dim=1), variance.split(COLUMNS), strict=True):
            scaled = part.double() * v.sqrt()
            kernel.addmm_(scaled, scaled.mT)
        kernels.append(kernel)
    return torch.stack(kernels)


def _cotangents(likelihood: Likelihood, outputs: Tensor) -> Iterator[Tensor]:
    """∂p_c/∂f for one output c after the other, each in the outputs' shape."""
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        predicted = predictions(likelihood, leaf)
        for c in range(predicted.shape[1]):
            yield torch.autograd.grad(predicted[:, c].sum(), leaf, retain_graph=True)[0]


def _parts(segments: Sequence[Segment], examples: int) -> Iterator[tuple[Selection, slice]]:
    """Selections of neighbouring parameters that fit the memory, with their place in (P,)."""
    start, stop = 0, 0
    waiting: list[Segment] = []
    for segment in segments:
        if waiting and (stop - start + segment.size) * examples > MAX_NUMBERS:
            yield Selection.of(waiting), slice(start, stop)
            waiting, start = [], stop
        waiting.append(segment)
        stop += segment.size
    yield Selection.of(waiting), slice(start, stop)
