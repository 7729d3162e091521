"""Noise on activations instead of weights: local reparameterisation and flipout, for any network.

One draw of the weights serves a whole minibatch under weight noise, so all its examples err
together and the gradient's variance does not fall with the batch size. Two estimators give every
example a draw of its own at the price of a second affine map. For q = N(M, σ²) and out = W∗x + b:

* `LocalReparameterisation` draws the *output*, whose distribution is known (Kingma, Salimans &
  Welling, 2015, arXiv:1506.02557):

      out = M∗x + m_b + √(σ_W² ∗ x² + σ_b²) ∘ ε          ε ~ N(0, 1) for every output element

* `Flipout` draws one perturbation for the batch and flips its signs (Wen et al., 2018,
  arXiv:1803.04386):

      out = M∗x + m_b + ((σ_W∘E) ∗ (x∘r) + σ_b∘e) ∘ s    r, s = ±1 for every example and feature

What is exact. Each *example* sees weights from q, and different examples are independent (local) or
uncorrelated (flipout). Within an example, flipout keeps one weight for all pixels and positions,
provided that examples lie along the first dimension (attention knows better; a linear map on a
sequence-first tensor does not). Local reparameterisation draws every output element apart: the
variances are right, but the covariances between positions of a convolution or sequence, which
weight noise would have, are dropped. It is exact for layers that meet each example once. A loss
that is no mean over examples (batch normalisation, contrastive losses) also sees that examples no
longer err together, under both.

A network is not rewritten: `credo.autodiff.seam` replaces the calls. Segments without a seam
(recurrent kernels, embeddings, tied or reused weights, whose noise must be common to all uses) get
weight noise, W = M + σ∘ε once per draw, and a warning names them once.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.autodiff.layer_calls import Affine
from credo.autodiff.seam import Seam, Survey, survey
from credo.errors import UnsupportedError
from credo.network import FlatParams, Selection
from credo.noise import NoiseSource, key_to_seed
from credo.types import Segment, Vector
from credo.variational.estimators.monte_carlo import GaussianStep


class ActivationNoise(ABC):
    """What both estimators share: the survey of the network, the loop over draws, the fallback.

    ``noise`` supplies normals for weights and activations; signs come from its seed. The flat
    buffer is left at the mean. Activation checkpointing is refused by PyTorch itself (the pass is
    not repeatable), unless it is the re-entrant kind, whose layers get weight noise.
    """

    integrates_kl = False

    def __init__(self, noise: NoiseSource) -> None:
        self.noise = noise
        self._routes: _Routes | None = None

    def gradients(self, step: GaussianStep) -> float:
        """Fill in ``step.grad_mean`` and ``step.grad_scale``; return the mean NLL."""
        with step.flat.writing() as vector:
            step.random.write(vector, step.mean)
        routes = self._routes_of(step)
        sampled_mean = routes.sampled.read(step.mean)
        step.grad_scale.zero_()
        try:
            return sum(self._draw(step, routes, sampled_mean, i) for i in range(step.samples))
        finally:
            routes.put_sampled(sampled_mean)

    @abstractmethod
    def _prepare(self, values: Vector, scale: Vector, key: tuple[int, ...]) -> Vector:
        """Fill the leaves' ``values`` from ``scale``; return ∂ values/∂ scale, elementwise."""

    @abstractmethod
    def _handler(
        self, leaves: dict[int, Tensor], key: tuple[int, ...]
    ) -> Callable[[Affine], Tensor]:
        """What replaces the affine maps in one forward pass; each call draws afresh."""

    def _draw(
        self, step: GaussianStep, routes: _Routes, sampled_mean: Vector, sample: int
    ) -> float:
        key = step.key_of(sample)
        slope = self._prepare(routes.values, part(routes.through, step.scale), key)
        noise = torch.empty_like(sampled_mean)
        if routes.sampled.size:
            noise = self.noise.draw(noise, *key, 0)
            routes.put_sampled(torch.addcmul(sampled_mean, part(routes.sampled, step.scale), noise))
        handler = _OncePerPass(self._handler(routes.leaves, key))
        with Seam(routes.leaves, handler):
            loss = step.energy()
        routes.leaf_grads.zero_()
        torch.autograd.backward(loss if step.samples == 1 else loss / step.samples)
        routes.check_all_passed(handler)

        first = sample == 0
        gradient = step.grad_mean if first else torch.empty_like(step.grad_mean)
        step.flat.gradient(step.random, out=gradient)
        add_product(step.grad_scale, routes.through, slope, routes.leaf_grads)
        if routes.sampled.size:
            add_product(step.grad_scale, routes.sampled, noise, part(routes.sampled, gradient))
        if not first:
            step.grad_mean += gradient
        return float(loss.detach()) / step.samples

    def _routes_of(self, step: GaussianStep) -> _Routes:
        routes = self._routes
        if routes is None or not routes.fit(step):
            surveyed = survey(step.flat, step.random, step.energy)
            _say_what_is_sampled(surveyed)
            routes = self._routes = _Routes(step, surveyed)
        return routes


@final
class LocalReparameterisation(ActivationNoise):
    """Fresh noise for every output element, from the output's own variance.

    ``∂/∂σ`` comes from the leaf v = σ²/4 of each segment: ∂/∂σ = σ/2 · ∂/∂v. With the quarter the
    noise is 2√v ε and its slope ε/√v, which saves a pass over every activation.

        >>> import credo.noise, credo.network, torch
        >>> from credo.variational.estimators import GaussianStep
        >>> net, x = torch.nn.Linear(3, 1), torch.randn(8, 3)
        >>> flat = credo.network.bind(net)
        >>> random = credo.network.select(flat.segments)
        >>> grads = torch.empty(2, 4)
        >>> step = GaussianStep(
        ...     flat, random, flat.vector.clone(), torch.full((4,), 0.1),
        ...     energy=lambda: net(x).square().mean(), kl_weight=1.0, samples=1, key=(0,),
        ...     grad_mean=grads[0], grad_scale=grads[1],
        ... )
        >>> nll = LocalReparameterisation(credo.noise.source("normal", seed=0)).gradients(step)
        >>> bool(grads.isfinite().all()) and nll > 0
        True
    """

    def _prepare(self, values: Vector, scale: Vector, key: tuple[int, ...]) -> Vector:
        half = 0.5 * scale
        torch.square(half, out=values)
        return half

    def _handler(
        self, leaves: dict[int, Tensor], key: tuple[int, ...]
    ) -> Callable[[Affine], Tensor]:
        calls = 0

        def local(call: Affine) -> Tensor:
            nonlocal calls
            calls += 1
            weight, bias = leaves[id(call.weight)], leaves.get(id(call.bias))
            mean = call.apply(call.inputs, call.weight, call.bias)
            device = mean.device.type
            if torch.is_autocast_enabled(device):
                # Squares of half-precision numbers leave its range: stay in the leaves' dtype.
                with torch.autocast(device, enabled=False):
                    squares = call.inputs.to(weight.dtype).square()
                    quarter = call.apply(squares, weight, bias).to(mean.dtype)
            else:
                quarter = call.apply(call.inputs.square(), weight, bias)
            # Dense in any memory format, so it can be drawn as one line of numbers.
            line = torch.empty_like(mean).as_strided((mean.numel(),), (1,))
            line = self.noise.draw(line, *key, calls)
            noise = line.as_strided(mean.shape, mean.stride(), line.storage_offset())
            return _WithNoise.apply(mean, quarter, noise)  # type: ignore[no-untyped-call]

        return local


@final
class Flipout(ActivationNoise):
    """One perturbation of the weights per draw, its signs flipped for each example.

    ``∂/∂σ`` comes from the leaf D = σ∘E of each segment: ∂/∂σ = E ∘ ∂/∂D. The bias is a weight on
    the constant input 1, whose own sign is taken as +1: (W, b) of one example is then still a draw
    from q, and of different examples uncorrelated, since s is in both.
    """

    def _prepare(self, values: Vector, scale: Vector, key: tuple[int, ...]) -> Vector:
        noise = self.noise.draw(torch.empty_like(scale), *key, 1)
        torch.mul(scale, noise, out=values)
        return noise

    def _handler(
        self, leaves: dict[int, Tensor], key: tuple[int, ...]
    ) -> Callable[[Affine], Tensor]:
        generator: torch.Generator | None = None

        def flipped(call: Affine) -> Tensor:
            nonlocal generator
            if generator is None:
                generator = torch.Generator(call.inputs.device)
                generator.manual_seed(key_to_seed(self.noise.seed, *key))
            weight, bias = leaves[id(call.weight)], leaves.get(id(call.bias))
            mean = call.apply(call.inputs, call.weight, call.bias)
            flips = signs(call.per_feature(call.inputs), call.inputs, generator)
            perturbation = call.apply(call.inputs * flips, weight, bias)
            flips = signs(call.per_feature(mean), mean, generator)
            return _Flipped.apply(mean, perturbation, flips)  # type: ignore[no-untyped-call]

        return flipped


class _WithNoise(torch.autograd.Function):
    """mean + 2√quarter ∘ noise, in the memory of ``mean``, which nobody else needs.

    Where the variance is zero (all inputs of a unit are zero) the noise is zero whatever σ is, so
    its derivative is taken as zero: 1/√0 would make NaN of it. Fast convolutions may also round a
    tiny variance below zero; that counts as zero too. Infinity in the place of both makes the slope
    noise/√quarter zero, and with it the noise quarter ∘ slope, without another pass.
    """

    @staticmethod
    def forward(ctx, mean, quarter, noise):  # type: ignore[no-untyped-def]
        root = F.threshold(quarter, 0.0, math.inf).sqrt_()
        slope = torch.div(noise, root, out=root)
        ctx.save_for_backward(slope)
        ctx.mark_dirty(mean)
        return mean.addcmul_(quarter, slope, value=2.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (slope,) = ctx.saved_tensors
        return gradient, gradient * slope, None


class _Flipped(torch.autograd.Function):
    """mean + perturbation ∘ flips, in the memory of ``mean``, which nobody else needs."""

    @staticmethod
    def forward(ctx, mean, perturbation, flips):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(flips)
        ctx.mark_dirty(mean)
        return mean.addcmul_(perturbation, flips)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (flips,) = ctx.saved_tensors
        return gradient, gradient * flips, None


def signs(shape: list[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent fair signs ±1, with the dtype and device of ``like``: eight to a random byte."""
    count = torch.Size(shape).numel()
    numbers = torch.randint(
        256, (-(-count // 8),), generator=generator, dtype=torch.int32, device=like.device
    )
    table = _eight_signs(like.dtype, like.device)
    return table.index_select(0, numbers).view(-1)[:count].view(shape)


@cache
def _eight_signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Row n holds the signs that the bits of n stand for, (256, 8)."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return (2 * bits - 1).to(device=device, dtype=dtype)


def part(selection: Selection, vector: Vector) -> Vector:
    """The selected part, as a view where possible."""
    return selection.view(vector) if selection.is_one_run else selection.read(vector)


def add_product(target: Vector, selection: Selection, a: Vector, b: Vector) -> None:
    """Add a∘b, both of the selection's size, to the selected part of ``target``."""
    offset = 0
    for start, stop in selection.runs:
        here = slice(offset, offset + stop - start)
        target[start:stop].addcmul_(a[here], b[here])
        offset += stop - start


class _OncePerPass:
    """A handler that refuses to answer for the same weight twice in one forward pass."""

    def __init__(self, handler: Callable[[Affine], Tensor]) -> None:
        self._handler = handler
        self._calls: set[tuple[int, int]] = set()
        self.weights: set[int] = set()

    def __call__(self, call: Affine) -> Tensor:
        rows = call.weight_rows
        this = (id(call.weight), 0 if rows is None else rows.start)
        if this in self._calls:
            raise UnsupportedError(f"a weight of shape {tuple(call.weight.shape)} {_CHANGED}")
        self._calls.add(this)
        self.weights.add(this[0])
        return self._handler(call)


_CHANGED = (
    "is used in another way, or more often, than in the first forward pass, on which the choice "
    "between activation and weight noise was made. Use noise='weight' for a network whose graph "
    "changes from batch to batch."
)


class _Routes:
    """Which segments take activation noise (``through``) and which weight noise (``sampled``).

    Both are selections of the *read-out* vectors (mean, scale, …) of size P. Each segment through
    the seam has a leaf, a view of ``values`` whose gradient is a view of ``leaf_grads``: autograd
    then never slices a flat vector.
    """

    def __init__(self, step: GaussianStep, surveyed: Survey) -> None:
        self._flat: FlatParams = step.flat
        self._random = step.random
        places = step.random.slices()
        local = {
            s: dataclasses.replace(s, start=places[s.name].start, stop=places[s.name].stop)
            for s in step.random.segments
        }
        self.through = Selection.of(local[s] for s in surveyed.through)
        self.sampled = Selection.of(local[s] for s in surveyed.elsewhere)
        self._sampled_in_buffer = Selection.of(surveyed.elsewhere)
        self.values = step.scale.new_empty(self.through.size)
        self.leaf_grads = torch.zeros_like(self.values)
        self.leaves: dict[int, Tensor] = {}
        self._weights: dict[int, Segment] = {}
        inside = self.through.slices()
        for segment in surveyed.through:
            parameter = step.flat.parameter_at[segment.start]
            here = inside[segment.name]
            leaf = self.values[here].view(segment.shape).detach().requires_grad_()
            leaf.grad = self.leaf_grads[here].view(segment.shape)
            self.leaves[id(parameter)] = leaf
            if parameter.dim() > 1:
                self._weights[id(parameter)] = segment

    def fit(self, step: GaussianStep) -> bool:
        """Whether they were made for this step's network and selection."""
        return step.flat is self._flat and (
            step.random is self._random or step.random == self._random
        )

    def put_sampled(self, values: Vector) -> None:
        """Write the weights that have no seam."""
        if self.sampled.size:
            with self._flat.writing() as vector:
                self._sampled_in_buffer.write(vector, values)

    def check_all_passed(self, handler: _OncePerPass) -> None:
        """Refuse a weight that got a gradient without having passed the seam."""
        if len(handler.weights) == len(self._weights):
            return
        for parameter, segment in self._weights.items():
            used = self._flat.parameter_at[segment.start].grad is not None
            if used and parameter not in handler.weights:
                raise UnsupportedError(f"{segment.name} {_CHANGED}")


def _say_what_is_sampled(surveyed: Survey) -> None:
    if not surveyed.elsewhere:
        return
    reasons = (f"{segment.name}: {reason}" for segment, reason in surveyed.elsewhere.items())
    listed = "; ".join(reasons)
    warnings.warn(
        "activation noise reaches linear and convolutional layers that are called once per forward "
        f"pass. These parameters get weight noise instead, one draw per sample: {listed}.",
        UserWarning,
        stacklevel=4,
    )
