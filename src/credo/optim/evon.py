r"""EVON: IVON in the eigenbases of the gradients, so that weights of a layer are correlated.

    θ = M + Q_L(Σ∘E)Q_Rᵀ,   Σ² = 1/(N(H + δ)),     G° = Q_Lᵀ∇ℓ̄(θ)Q_R,   Ĥ = G°∘E/Σ
    Ḡ ← β₁Ḡ + (1 − β₁)G°
    H ← H + X + X²/(2(H + δ)),              X = (1 − β₂)(Ĥ − H)
    M ← M − ξ(h₀ + δ)·Q_L clip((Ḡ/(1 − β₁ᵗ) + δQ_LᵀMQ_R)/(H + δ + γ), ±c)Q_Rᵀ

for a weight matrix M (a, b), a convolution as (channels out, rest): `credo.optim.ivon` with a
curvature for each direction of the basis in place of each weight. The bases follow the gradients'
second moments (`credo.optim.eigenbasis`). q is the `EigenKroneckerGaussian` of these bases.
Vectors, embeddings, deterministic groups and axes longer than ``max_size`` are IVON's, bit for bit.

====== ===================== ===================================================================
symbol argument              meaning
====== ===================== ===================================================================
ξ      ``lr``                as IVON's
β₁, β₂ ``betas``             shares that the gradient's and the curvature's averages keep
β₃     ``basis_beta``        share that the gradients' second moments keep
h₀     ``hess_init``         first curvature
δ      ``weight_decay``      prior_precision/N, see `credo.optim.base` for N and the rest
c      ``clip_radius``       largest natural gradient, in the basis
       ``hess_clip``         Ĥ is held within this times H + δ
       ``refresh``           steps from one refresh of the bases to the next
====== ===================== ===================================================================

What it costs. A basis of an axis of length n takes 2n² numbers, and a step four products of n²·m
multiplications for a layer of n·m weights: noise, gradient and step are rotated, and the gradient's
second moment is taken. Forward and backward passes of B examples (or tokens) take 3B·nm. So EVON is
nearly as cheap as IVON where a batch has many more examples or tokens than layers have units, and
several times as expensive where it has fewer: ``max_size`` and ``one_sided`` bound it.

Ĥ's clip keeps a noisy curvature's steps small but biases it: where the gradient's own noise is much
larger than what the draws cause, the clipped Ĥ has mean zero and H decays. It is off by default.

Embeddings are known by their layers: give the network itself rather than its parameters.

Reference: Minut et al., "SOAP-Bubbles", 2026 (arXiv:2606.23357); SOAP's bases are Vyas et al., 2024
(arXiv:2409.11321).

    >>> import torch, credo.optim
    >>> net = torch.nn.Linear(3, 2)
    >>> opt = credo.optim.EVON(net, lr=0.1, num_data=100, refresh=2)
    >>> x, y = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    >>> for _ in range(4):
    ...     with opt.sampled():
    ...         torch.nn.functional.cross_entropy(net(x), y).backward()
    ...     opt.step(); opt.zero_grad()
    >>> opt.posterior(net, credo.likelihoods.Categorical()).q.shapes
    ((2, 3), (2, 1))
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from credo.checks import Count, Decay, NotNegative, Positive, Radius, checked
from credo.families import EigenBlock, EigenKroneckerGaussian
from credo.optim.eigenbasis import EigenMatrix, pieces, sides
from credo.optim.groups import Group, Params, Shared
from credo.optim.ivon import IVON
from credo.types import Segment, Vector

_MUCH_MEMORY = 2**30
_EMBEDDINGS = ("Embedding", "EmbeddingBag")


@checked
class EVON(IVON):
    """Eigenspace variational online Newton (Minut et al., 2026).

    The equations and what a step costs are in the module's docstring.

    What all natural-gradient optimizers share (``temperature``, ``augmentation``, ``kl_warmup``,
    ``samples``, ``debias``, ``draws``, ``seed``, ``accumulation``, ``process_group``,
    ``shared_noise``, ``module``) is explained at `NaturalOptimizer`.

    Args:
        params: The network itself (its norm layers become a deterministic group without a prior),
            its parameters, or groups of them with options of their own.
        lr: Step size ξ; twice IVON's, because a bound on a direction holds many weights at once.
        num_data: Number of training examples; it says how much the data weigh against the prior,
            and is required.
        betas: Shares that the running averages of gradient and curvature keep.
        basis_beta: Share that the running averages of the gradients' second moments keep.
        refresh: Steps from one refresh of the bases to the next; None leaves them the identity.
        max_size: The longest axis that gets a basis. One of length n takes 2n² numbers, which are
            allocated here; where all of them take more than 1 GiB, a warning says so before.
        one_sided: Give a basis to the shorter axis of a matrix only.
        hess_clip: Hold the curvature of a step within this times H + δ; None doesn't.
        prior_precision: 1/variance of the prior around zero; None takes half of each layer's
            fan-in.
        weight_decay: The same as a share, prior_precision/(num_data·augmentation); give one of the
            two.
        hess_init: The curvature h₀ to start from; None makes the first noise a tenth of the layer's
            scale, a number is the published start, as for `IVON`.
        damping: Added to the mean's denominator only; the noise stays the posterior's.
        clip_radius: Where natural gradients are cut, in the basis; infinity doesn't. None is 0.01,
            or infinity if ``hess_init`` is given.
        rescale_lr: Multiply ``lr`` by h₀ + δ, which makes it comparable to SGD's; None does so if
            ``hess_init`` is given.
    """

    def __init__(
        self,
        params: Params,
        lr: NotNegative = 0.2,
        num_data: Positive | None = None,
        *,
        betas: tuple[Decay, Decay] = (0.9, 0.99999),
        basis_beta: Decay = 0.95,
        refresh: Count | None = 10,
        max_size: Count = 256,
        one_sided: bool = False,
        hess_clip: Positive | None = None,
        prior_precision: NotNegative | None = None,
        weight_decay: NotNegative | None = None,
        hess_init: Positive | None = None,
        damping: NotNegative = 0.0,
        clip_radius: Radius | None = None,
        rescale_lr: bool | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        self._own: Group = {
            "basis_beta": basis_beta,
            "refresh": refresh,
            "max_size": max_size,
            "one_sided": one_sided,
            "hess_clip": hess_clip,
        }
        self._matrices: list[EigenMatrix] = []
        super().__init__(
            params,
            lr,
            num_data,
            betas=betas,
            prior_precision=prior_precision,
            weight_decay=weight_decay,
            hess_init=hess_init,
            damping=damping,
            clip_radius=clip_radius,
            rescale_lr=rescale_lr,
            **shared,
        )
        self._matrices = self._make_matrices()
        self._matrix_of = {matrix.where.start: matrix for matrix in self._matrices}
        self._pieces: dict[tuple[int, int], list[tuple[slice, EigenMatrix | None]]] = {}
        self._point_state_at_memory()
        like = self._layout.like
        self._turned = torch.empty_like(self._eps) if self._matrices else self._eps[:0]
        self._turned_from: int | None = None
        self._between = like.new_empty(max((len(m.mean) for m in self._matrices), default=0))

    def _options(self) -> Group:
        return self._own

    def _can_merge(self, group: Group) -> bool:
        # A step goes from matrix to matrix.
        return False

    # --- the block --------------------------------------------------------------------------------

    def _coloured(self, where: slice, noise: Vector, out: Vector) -> Vector:
        if not self._matrices:
            return noise
        for place, matrix in self._pieces_of(where):
            here = slice(place.start - where.start, place.stop - where.start)
            if matrix is None:
                out[here] = noise[here]
            else:
                matrix.out_of(noise[here], out[here], self._between)
        return out

    def _harvest(self, gradient: Vector, draw: Vector) -> None:
        """Products with the noise are taken in the basis, where weights are independent."""
        if self._matrices:
            gradient = self._turn(gradient)
            self._turned_from = self._gradient._version
        super()._harvest(gradient, draw)

    def _turn(self, gradient: Vector) -> Vector:
        """The gradient of the random weights in the basis."""
        for place, matrix in self._pieces_of(slice(0, self._num_random)):
            if matrix is None:
                self._turned[place] = gradient[place]
            else:
                matrix.into(gradient[place], self._turned[place], self._between)
        return self._turned

    # --- the step ---------------------------------------------------------------------------------

    def _average(self, samples: float, unit: float) -> None:
        """The mean gradient goes into the moments, and then into the basis."""
        super()._average(samples, unit)
        if not self._matrices:
            return
        for group in self.param_groups:
            for matrix in self._matrices_of(group):
                matrix.absorb(self._gradient[matrix.where], group["basis_beta"])
        # With one block nothing has changed it since.
        if self._turned_from != self._gradient._version:
            self._turn(self._gradient)
        self._gradient[: self._num_random].copy_(self._turned)

    def _learn(self, group: Group, where: slice, delta: float) -> None:
        if group["hess_clip"] is not None and not group["deterministic"]:
            bound = group["hess_clip"] / (math.sqrt(self._n) * self._share)
            self._products[where].clamp_(-bound, bound)
        super()._learn(group, where, delta)

    def _move(self, group: Group, mean: Vector, where: slice, delta: float) -> Vector:
        for place, matrix in self._pieces_of(where):
            part = mean[place.start - where.start : place.stop - where.start]
            if matrix is None:
                super()._move(group, part, place, delta)
                continue
            if group["step"] == 1:
                matrix.into(part, matrix.mean, self._between)
            direction = super()._move(group, matrix.mean, place, delta)
            step = matrix.out_of(direction, self._scratch[place], self._between)
            part.sub_(step, alpha=self._rate(group, delta))
            if group["refresh"] and group["step"] % group["refresh"] == 0:
                matrix.refresh(part, *(self._memory[name][place] for name in self.vectors))
        return self._gradient[where]

    # --- what it remembers ------------------------------------------------------------------------

    def _make_matrices(self) -> list[EigenMatrix]:
        found: list[tuple[Segment, tuple[int, int], tuple[bool, bool]]] = []
        for group in self.param_groups:
            if group["deterministic"] or group["refresh"] is None:
                continue
            for parameter in group["params"]:
                segment = self._layout.place(parameter)
                if parameter.dim() >= 2 and segment.layer_type not in _EMBEDDINGS:
                    shape = (len(parameter), parameter.numel() // len(parameter))
                    axes = sides(shape, group["max_size"], group["one_sided"])
                    if any(axes):
                        found.append((segment, shape, axes))
        found.sort(key=lambda item: item[0].start)
        _say_memory(found, self._layout.like.element_size())
        return [EigenMatrix(s.slice, shape, axes, self._layout.like) for s, shape, axes in found]

    def _matrices_of(self, group: Group) -> list[EigenMatrix]:
        starts = [self._layout.place(parameter).start for parameter in group["params"]]
        return [self._matrix_of[start] for start in starts if start in self._matrix_of]

    def _pieces_of(self, where: slice) -> list[tuple[slice, EigenMatrix | None]]:
        key = where.start, where.stop
        if key not in self._pieces:
            self._pieces[key] = list(pieces(self._matrices, where))
        return self._pieces[key]

    def _remembered_of(self, parameter: Tensor) -> dict[str, Tensor]:
        where = self._layout.place(parameter).slice
        own = [m.remembered() for m in self._matrices if m.where == where]
        return {**super()._remembered_of(parameter), **(own[0] if own else {})}

    def _remembered(self) -> list[Tensor]:
        own = [tensor for matrix in self._matrices for tensor in matrix.remembered().values()]
        return [*super()._remembered(), *own]

    def _q(self, mean: Vector, parameters: Sequence[Tensor]) -> EigenKroneckerGaussian:
        blocks = {}
        for group in self.param_groups:
            n = self.effective_data(group)
            for parameter in () if group["deterministic"] else group["params"]:
                h = self._layout.part(self._memory["curvature"], parameter)
                values = (h + group["prior_precision"] / n).mul_(n).reshape(len(h), -1)
                left, right = self._bases_of(parameter)
                blocks[id(parameter)] = EigenBlock(left, right, values)
        return EigenKroneckerGaussian(mean, tuple(blocks[id(p)] for p in parameters))

    def _bases_of(self, parameter: Tensor) -> tuple[Tensor | None, Tensor | None]:
        matrix = self._matrix_of.get(self._layout.place(parameter).start)
        axes = (matrix.left, matrix.right) if matrix is not None else (None, None)
        left, right = (None if axis is None else axis.basis.clone() for axis in axes)
        return left, right


def _say_memory(
    found: Sequence[tuple[Segment, tuple[int, int], tuple[bool, bool]]], each: int
) -> None:
    """Warn before much memory is taken."""

    def of(shape: tuple[int, int], axes: tuple[bool, bool]) -> int:
        bases = sum(2 * n**2 for n, has in zip(shape, axes, strict=True) if has)
        return each * (bases + shape[0] * shape[1])

    sizes = {segment.name: of(shape, axes) for segment, shape, axes in found}
    if sum(sizes.values()) > _MUCH_MEMORY:
        name = max(sizes, key=lambda name: sizes[name])
        warnings.warn(
            f"EVON's bases of {len(sizes)} weight matrices take "
            f"{sum(sizes.values()) / 2**30:.1f} GiB, of which {name} "
            f"{sizes[name] / 2**30:.1f} GiB: lower max_size, or take one_sided=True",
            stacklevel=4,
        )
