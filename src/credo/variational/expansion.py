r"""The loss expected under q by an expansion to second order, and its gradient by two routes.

Expanding the log-likelihood to second order at the mean μ and averaging over q = N(μ, diag σ²)
leaves E_q[mean NLL] ≈ mean NLL(μ) + penalty, and no weights are ever drawn:

============== =========================================== ===================================
``curvature``  penalty of a batch of S examples            gradient ḡ, Hessian h
============== =========================================== ===================================
``fisher``     (S/2) Σ_λ σ_λ² ḡ_λ²                         of mean NLL on labels ỹ ~ p(· | x, μ)
``empirical``  (S/2) Σ_λ σ_λ² ḡ_λ²                         of mean NLL on the true labels
``hessian``    ½ Σ_λ σ_λ² h_λλ                             of mean NLL on the true labels
============== =========================================== ===================================

Scores of drawn labels are independent between examples and have mean zero, so the square of the
batch's gradient is unbiased for the sum of the examples' Fisher information, also with batch
norm; with true labels it contains the squared mean gradient too. Drawn labels are constants when
the penalty is differentiated (the score of the draw is left out, as in the paper), except that a
learned noise scale moves them along: ỹ = f + scale·ε. The Hessian's diagonal is estimated with one
vector of signs z per step, Σ σ²h_λλ = E[wᵀhw] with w = σ∘z: unbiased, exact where h is diagonal.

The gradient of the penalty with respect to μ is S·H̃v, H̃ the Hessian of mean NLL(ỹ) and v = σ²∘ḡ:

``exact``       backward through ḡ·v (`torch.autograd` twice), with the true labels' gradient in the
                same pass.
``difference``  S·[∇(μ + tv) − ∇(μ)]/t of mean NLL(ỹ), the true labels' gradient taken at μ + tv in
                the same pass. That adds tHv, of which mean NLL(ỹ) knows nearly all: t(H − H̃)v is
                left, less than t/S of the penalty's gradient. Two ordinary passes in all.

Reference: Unlu & Aitchison 2021. Corrected: the prior's s² stands in both slots of eq. 30.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

import torch
from torch import Generator, Tensor

from credo.autodiff.smoothing import graph, refuse_kinks
from credo.autodiff.twice_differentiable import plain_attention, twice_differentiable
from credo.errors import UnsupportedError
from credo.likelihoods.labels import Labels, draw_labels
from credo.model import Model
from credo.network import FlatParams, Selection
from credo.network.batches import batch_rows
from credo.network.state import ForwardState
from credo.types import Batch, Likelihood, Vector

Curvature: TypeAlias = Literal["fisher", "hessian", "empirical"]
Route: TypeAlias = Literal["difference", "exact"]

SHIFT = 0.25
"""How far the difference route moves: by so many √(machine epsilon) nats of each drawn label's
log-probability, as its gradient foretells. There truncation meets rounding: errors of 1e-3 of the
penalty's gradient, on all networks, stages of training and scales tried."""
LARGEST_STEP = 15.0
"""The most that t/S may be, again in √(machine epsilon). With scales so tiny that it is reached,
t(H − H̃)v meets rounding there; the error stays below 1e-2."""
BLOCK = 1 << 16
"""Weights that one pass of `SquaredGradientPenalty` treats at a time."""


@final
@dataclass(frozen=True)
class ExpandedLoss:
    """Mean NLL of the batch and the penalty, as numbers."""

    nll: float
    penalty: float


@final
@dataclass
class ExpansionStep:
    """One evaluation at q = N(mean, scale²) of the ``random`` weights, where the network stands.

    ``mean`` may be the network's own memory. To be filled in are the gradients of mean NLL +
    penalty: ``grad_mean`` and ``grad_scale`` (P,), ``grad_point`` for the ``fixed`` weights,
    ``.grad`` for learned noise. ``rows`` are the examples that the penalty is estimated on, None
    for all.
    """

    model: Model
    flat: FlatParams
    random: Selection
    fixed: Selection
    mean: Vector
    scale: Vector
    batch: Batch
    generator: Generator
    grad_mean: Vector
    grad_scale: Vector
    grad_point: Vector
    rows: Tensor | None = None

    @property
    def penalised_batch(self) -> Batch:
        """The examples that the penalty is estimated on."""
        return self.batch if self.rows is None else batch_rows(self.batch, self.rows)

    def gather(self, of_random: Vector, of_fixed: Vector) -> None:
        """Move the gradients that a backward pass left in the network into these vectors."""
        self.flat.gradient(self.random, out=of_random)
        if self.fixed.size:
            self.flat.gradient(self.fixed, out=of_fixed)


@final
@dataclass
class SquaredGradientPenalty:
    """(S/2) Σ σ²ḡ² of drawn (``fisher``) or true (``empirical``) labels, by one of the routes."""

    curvature: Curvature
    route: Route
    _couples_examples: bool | None = field(default=None, init=False)
    _sampled: Vector | None = field(default=None, init=False)
    _direction: Vector | None = field(default=None, init=False)

    def gradients(self, step: ExpansionStep) -> ExpandedLoss:
        """Fill in the step's gradients; return what was differentiated."""
        if self.route == "exact":
            return self._twice_backward(step)
        return self._difference(step)

    def labels(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, generator: Generator
    ) -> Labels:  # fmt: skip
        """The targets whose gradient is squared."""
        if self.curvature == "empirical":
            return lambda: targets
        return draw_labels(likelihood, outputs, targets, generator)

    def _difference(self, step: ExpansionStep) -> ExpandedLoss:
        model, flat, likelihood = step.model, step.flat, step.model.likelihood
        _refuse_low_precision(flat.vector)
        replay = ForwardState(model.net, flat.vector.device)
        inputs, targets = step.penalised_batch
        outputs = model.outputs(inputs)
        self._examine(outputs)
        labels = self.labels(likelihood, outputs, targets, step.generator)
        likelihood.mean_nll(outputs, labels()).backward()
        sampled = self._buffer("_sampled", step.mean)
        sampled_point = torch.empty_like(step.grad_point)
        step.gather(sampled, sampled_point)
        sampled_noise = _take_noise_gradients(model)
        penalty, direction = self._penalty(step, sampled, len(targets))
        # Moving by t·v with t = ratio·m lowers log p(ỹ) by 2·ratio·penalty, of an example's labels.
        rounding = math.sqrt(torch.finfo(flat.vector.dtype).eps)
        nats = SHIFT * rounding * targets.numel() / len(targets)
        ratio = min(LARGEST_STEP * rounding, 0.5 * nats / penalty) if penalty else 0.0
        extra = 1 / ratio - 1 if ratio else 0.0
        randomness = step.rows is not None and replay.was_random()
        with _shifted(step, direction, ratio):
            replay.rewind()
            if step.rows is None or not (self._couples_examples or randomness):
                nll = self._in_one_pass(step, labels, extra)
            else:
                nll = self._in_two_parts(step, labels, extra)
        step.gather(step.grad_mean, step.grad_point)
        step.grad_mean.sub_(sampled, alpha=extra)
        step.grad_point.sub_(sampled_point, alpha=extra)
        for parameter, first in zip(model.noise_parameters(), sampled_noise, strict=True):
            if parameter.grad is not None and first is not None:
                parameter.grad.sub_(first, alpha=extra)
        return ExpandedLoss(nll, penalty)

    def _in_one_pass(self, step: ExpansionStep, labels: Labels, extra: float) -> float:
        inputs, targets = step.batch
        likelihood = step.model.likelihood
        outputs = step.model.outputs(inputs)
        chosen = outputs if step.rows is None else outputs[step.rows]
        nll = likelihood.mean_nll(outputs, targets)
        (nll + extra * likelihood.mean_nll(chosen, labels())).backward()
        return nll.item()

    def _in_two_parts(self, step: ExpansionStep, labels: Labels, extra: float) -> float:
        """The chosen examples by themselves, as the first pass saw them, and then the others.

        Batch norm couples examples and dropout counts them, so the pass must be repeated as it was.
        """
        assert step.rows is not None
        size = len(step.batch[1])
        others = torch.ones(size, dtype=torch.bool, device=step.rows.device)
        others[step.rows] = False
        likelihood, total = step.model.likelihood, 0.0
        for rows, weight in ((step.rows, extra), (others.nonzero()[:, 0], 0.0)):
            inputs, targets = batch_rows(step.batch, rows)
            outputs = step.model.outputs(inputs)
            nll = likelihood.mean_nll(outputs, targets) * (len(rows) / size)
            (nll + weight * likelihood.mean_nll(outputs, labels()) if weight else nll).backward()
            total += nll.item()
        return total

    def _twice_backward(self, step: ExpansionStep) -> ExpandedLoss:
        model, flat, likelihood = step.model, step.flat, step.model.likelihood
        inputs, targets = step.batch
        with twice_differentiable():
            outputs = model.outputs(inputs)
        self._examine(outputs)
        nll = likelihood.mean_nll(outputs, targets)
        if step.rows is not None:
            replay = ForwardState(model.net, flat.vector.device)
            inputs, targets = step.penalised_batch
            with twice_differentiable():
                outputs = model.outputs(inputs)
            replay.restore_buffers()
        labels = self.labels(likelihood, outputs, targets, step.generator)
        parameters = [flat.parameter_at[s.start] for s in step.random.segments]
        gradients = torch.autograd.grad(
            likelihood.mean_nll(outputs, labels()), parameters, create_graph=True, allow_unused=True
        )
        sampled = _joined(gradients, parameters)
        penalty, direction = self._penalty(step, sampled, len(targets))
        _backward_along(nll, gradients, direction, step.random)
        step.gather(step.grad_mean, step.grad_point)
        return ExpandedLoss(nll.item(), penalty)

    def _penalty(self, step: ExpansionStep, sampled: Vector, size: int) -> tuple[float, Vector]:
        """(m/2) Σ σ²ḡ² over m examples, and m·v = m·σ²ḡ; fills in ∂/∂σ = m·σ·ḡ²."""
        direction = self._buffer("_direction", step.scale)
        zero = direction.new_zeros(())
        total = 0.0
        # In blocks that stay in cache: each is read and written several times.
        for start in range(0, len(sampled), BLOCK):
            place = slice(start, start + BLOCK)
            scale, gradient = step.scale[place], sampled[place]
            scaled = torch.mul(scale, gradient, out=step.grad_scale[place])
            torch.addcmul(zero, scale, scaled, value=size, out=direction[place])
            total += float(torch.dot(scaled, scaled))
            torch.addcmul(zero, scaled, gradient, value=size, out=scaled)
        return 0.5 * size * total, direction

    def _examine(self, outputs: Tensor) -> None:
        """Once: refuse kinks, and find out whether examples of a batch see each other."""
        if self._couples_examples is None:
            refuse_kinks(outputs, "Variational Laplace")
            self._couples_examples = any("BatchNorm" in node.name() for node in graph(outputs))

    def _buffer(self, name: str, like: Vector) -> Vector:
        if getattr(self, name) is None:
            setattr(self, name, torch.empty_like(like))
        buffer: Vector = getattr(self, name)
        return buffer


@final
@dataclass
class HessianPenalty:
    """½ Σ σ²h_λλ on true labels, by wᵀhw with w = σ∘z and signs z; differentiated exactly."""

    _examined: bool = field(default=False, init=False)

    def gradients(self, step: ExpansionStep) -> ExpandedLoss:
        """Fill in the step's gradients; ∂/∂σ is z∘(hw)."""
        model, flat = step.model, step.flat
        inputs, targets = step.batch
        with plain_attention():
            outputs = model.outputs(inputs)
        if not self._examined:
            refuse_kinks(outputs, 'VariationalLaplace(curvature="hessian")')
            self._examined = True
        nll = model.likelihood.mean_nll(outputs, targets)
        if step.rows is not None:
            replay = ForwardState(model.net, flat.vector.device)
            inputs, targets = step.penalised_batch
            with plain_attention():
                curved = model.likelihood.mean_nll(model.outputs(inputs), targets)
            replay.restore_buffers()
        else:
            curved = nll
        parameters = [flat.parameter_at[s.start] for s in step.random.segments]
        shape, device = step.scale.shape, step.scale.device
        coins = torch.randint(2, shape, generator=step.generator, device=device)
        signs = (2 * coins - 1).to(step.scale)
        probe = step.scale * signs
        first = torch.autograd.grad(curved, parameters, create_graph=True, allow_unused=True)
        reached = [(g, v) for g, v in _pieces(first, probe, step.random) if g.requires_grad]
        second = torch.autograd.grad(
            [g for g, _ in reached], parameters, [v for _, v in reached],
            create_graph=True, allow_unused=True,
        )  # fmt: skip
        product = _joined(second, parameters)
        torch.mul(signs, product, out=step.grad_scale)
        penalty = 0.5 * float(torch.dot(probe, product))
        _backward_along(nll, second, 0.5 * probe, step.random)
        step.gather(step.grad_mean, step.grad_point)
        return ExpandedLoss(nll.item(), penalty)


@contextmanager
def _shifted(step: ExpansionStep, direction: Vector, length: float) -> Iterator[None]:
    """The network with its random weights moved from the mean, and back there afterwards."""
    center = step.mean.clone()
    try:
        with step.flat.writing() as vector:
            if step.random.is_one_run:
                torch.add(center, direction, alpha=length, out=step.random.view(vector))
            else:
                step.random.write(vector, torch.add(center, direction, alpha=length))
        yield
    finally:
        with step.flat.writing() as vector:
            step.random.write(vector, center)


def _backward_along(
    nll: Tensor, gradients: tuple[Tensor | None, ...], direction: Vector, random: Selection
) -> None:
    """Backward of nll + gradients·direction in one pass."""
    reached = [(g, v) for g, v in _pieces(gradients, direction, random) if g.requires_grad]
    torch.autograd.backward(
        [nll, *(g for g, _ in reached)], [torch.ones_like(nll), *(v for _, v in reached)]
    )


def _pieces(
    gradients: tuple[Tensor | None, ...], vector: Vector, random: Selection
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each gradient that there is, with its piece of a vector (P,)."""
    places = random.slices().values()
    for gradient, place in zip(gradients, places, strict=True):
        if gradient is not None:
            yield gradient, vector[place].view_as(gradient)


def _joined(gradients: tuple[Tensor | None, ...], parameters: list[torch.nn.Parameter]) -> Vector:
    """Gradients as one vector; what the loss did not reach counts as zero."""
    return torch.cat([
        torch.zeros_like(p).reshape(-1) if g is None else g.detach().reshape(-1)
        for g, p in zip(gradients, parameters, strict=True)
    ])  # fmt: skip


def _take_noise_gradients(model: Model) -> list[Tensor | None]:
    taken = []
    for parameter in model.noise_parameters():
        taken.append(parameter.grad)
        parameter.grad = None
    return taken


def _refuse_low_precision(vector: Vector) -> None:
    plain = vector.dtype in (torch.float32, torch.float64)
    if not plain or torch.is_autocast_enabled(vector.device.type):
        what = f"weights of {vector.dtype}" if not plain else "autocast"
        raise UnsupportedError(
            f'route="difference" subtracts gradients that nearly agree, of which {what} would '
            'leave nothing but rounding: use route="exact", or float32 throughout'
        )
