r"""VON: variational online Newton, with the true diagonal of the Hessian.

    θ = m + σε,   σ² = 1/(N(h + δ)),        ḡ = ∇ℓ̄(θ),  ĥ = diag ∇²ℓ̄(θ)
    h ← h + x + x²/(2(h + δ)),              x = (1 − β₂)(ĥ − h)
    g ← β₁g + (1 − β₁)(ḡ + δm)
    m ← m − ξ g/((1 − β₁ᵗ)(h + δ + γ))

Its resting point is the best q of all Gaussians with independent weights: E_q[∇ℓ̄] + δm = 0 and
h = E_q[diag ∇²ℓ̄]. The price is the Hessian: ``hessian="exact"`` takes P Hessian products a draw
and is meant for small networks and for checking the others; ``"hutchinson"`` takes ``probes`` of
them, v∘(∇²ℓ̄ v) for random signs v, unbiased but noisy. The second-order term keeps h + δ positive
where the loss is not convex.

A Hessian needs the loss with its graph, so ``optimizer.backward(loss)`` takes the place of
``loss.backward()``, and a closure for ``step`` returns the loss *without* a backward pass.

Symbols and arguments: `credo.optim.base`. Reference: Khan et al., 2018 (arXiv:1806.04854); the
positive step is Lin et al., 2020.

    >>> import torch, credo.optim
    >>> net = torch.nn.Linear(2, 1).double()
    >>> opt = credo.optim.VON(net, lr=0.5, num_data=10, betas=(0.0, 0.5))
    >>> x, y = torch.randn(10, 2).double(), torch.randn(10, 1).double()
    >>> for _ in range(50):
    ...     with opt.sampled():
    ...         opt.backward(0.5 * (net(x) - y).square().mean())
    ...     opt.step()
    >>> q = opt.posterior(net, credo.likelihoods.Gaussian(1.0)).q
    >>> bool(torch.allclose(q.precision[:2], x.square().sum(0) + 1.0))
    True
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from credo.checks import Count, Decay, NotNegative, Positive, checked
from credo.errors import DataError, UnsupportedError
from credo.noise import key_to_seed
from credo.optim.base import NaturalOptimizer
from credo.optim.groups import Group, Params, Shared, prior_options
from credo.optim.ivon import absorb_curvature_
from credo.optim.ranks import NOTHING
from credo.types import Vector

_PRODUCTS = 256
"""How many Hessian products are taken at once."""


@checked
class VON(NaturalOptimizer):
    """Variational online Newton (Khan et al., 2018); the equations are in the module's docstring.

    What all natural-gradient optimizers share (``temperature``, ``augmentation``, ``kl_warmup``,
    ``samples``, ``debias``, ``draws``, ``seed``, ``accumulation``, ``process_group``,
    ``shared_noise``, ``module``) is explained at `NaturalOptimizer`.

    Args:
        params: The network itself (its norm layers become a deterministic group without a prior),
            its parameters, or groups of them with options of their own.
        lr: Step size ξ of the mean.
        num_data: Number of training examples, which is required.
        betas: Shares that the running averages of gradient and curvature keep.
        prior_precision: 1/variance of the prior around zero; 1 if that and ``weight_decay`` are
            None.
        weight_decay: The same as a share, prior_precision/(num_data·augmentation).
        hess_init: The curvature h₀ to start from.
        damping: Added to the mean's denominator only; the noise stays the posterior's.
        hessian: "exact" takes P Hessian products a draw, "hutchinson" as many as ``probes``.
        probes: Random directions of each draw for "hutchinson".
    """

    _unscales = False

    def __init__(
        self,
        params: Params,
        lr: NotNegative = 0.1,
        num_data: Positive | None = None,
        *,
        betas: tuple[Decay, Decay] = (0.9, 0.9),
        prior_precision: NotNegative | None = None,
        weight_decay: NotNegative | None = None,
        hess_init: Positive = 1.0,
        damping: NotNegative = 0.0,
        hessian: Literal["exact", "hutchinson"] = "exact",
        probes: Count = 1,
        **shared: Unpack[Shared],
    ) -> None:
        own: Group = {
            "lr": lr,
            "num_data": num_data,
            "betas": betas,
            **prior_options(prior_precision, weight_decay, {"prior_precision": 1.0}),
            "hess_init": hess_init,
            "damping": damping,
        }
        super().__init__(params, own, **shared)
        self.hessian, self.probes = hessian, probes
        self._diagonal = torch.zeros_like(self._gradient)
        self._block = torch.zeros_like(self._gradient)
        self._backwards = 0

    def backward(self, loss: Tensor) -> None:
        """Add ∇loss to ``.grad`` and the Hessian's diagonal to what the block collects.

        Args:
            loss: The mean loss of the batch, with its graph.
        """
        if not self._is_sampling:
            raise UnsupportedError("backward() belongs inside `with optimizer.sampled():`")
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise DataError(
                "backward() takes the loss: a scalar tensor that depends on the parameters and "
                "whose own backward() was not called. A closure for step() returns just that"
            )
        parameters = self._layout.parameters
        grads = torch.autograd.grad(
            loss, parameters, create_graph=True, allow_unused=True, materialize_grads=True
        )
        gradient = torch.cat([g.reshape(-1) for g in grads])
        self._block += self._hessian_diagonal(gradient)
        self._backwards += 1
        for parameter, grad in zip(parameters, grads, strict=True):
            slope = grad.detach()
            parameter.grad = slope if parameter.grad is None else parameter.grad + slope

    def _hessian_diagonal(self, gradient: Vector) -> Vector:
        if not gradient.requires_grad:  # a loss linear in all weights
            return torch.zeros_like(gradient)
        if self.hessian == "exact":
            size = gradient.numel()
            diagonal = torch.empty_like(self._block)
            for start in range(0, size, _PRODUCTS):
                rows = torch.zeros(
                    min(_PRODUCTS, size - start), size, dtype=gradient.dtype, device=gradient.device
                )
                rows.diagonal(start).fill_(1.0)
                products = self._products(gradient, rows, batched=True)
                diagonal[start : start + len(rows)] = products.diagonal(start)
            return diagonal
        step, draw, _ = self._noise_key()
        seed = key_to_seed(self.param_groups[0]["seed"] + 1, step, draw, self._backwards)
        generator = torch.Generator(gradient.device).manual_seed(seed)
        total = torch.zeros_like(self._block)
        for _ in range(self.probes):
            bits = torch.randint(2, total.shape, generator=generator, device=total.device)
            signs = bits.to(total.dtype).mul_(2).sub_(1)
            total += signs * self._products(gradient, signs, batched=False)
        return total / self.probes

    def _products(self, gradient: Vector, vectors: Tensor, batched: bool) -> Tensor:
        """∇²ℓ̄ times each row."""
        pieces = torch.autograd.grad(
            gradient,
            self._layout.parameters,
            vectors,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=batched,
        )
        shape = (*vectors.shape[:-1], -1)
        rows = [
            (vectors.new_zeros(vectors[..., 0].numel(), p.numel()) if piece is None else piece)
            for piece, p in zip(pieces, self._layout.parameters, strict=True)
        ]
        return torch.cat([row.reshape(shape) for row in rows], dim=-1)

    def _call(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.backward(loss)
        return loss.detach()

    def _before_forward(self) -> AbstractContextManager[None]:
        self._block.zero_()
        self._backwards = 0
        return NOTHING

    def _harvest(self, gradient: Vector, draw: Vector) -> None:
        if not self._backwards:
            raise UnsupportedError(
                "VON needs the Hessian of the loss: call optimizer.backward(loss) instead of "
                "loss.backward()"
            )
        if not self._samples:
            self._diagonal.zero_()
        self._diagonal.add_(self._block)

    def _collected(self) -> dict[str, Vector]:
        return {"Hessian": self._diagonal}

    def _average(self, samples: float, unit: float) -> None:
        self._diagonal.div_(samples * unit)

    def _update(self, group: Group, mean: Vector, where: slice, delta: float) -> None:
        beta1, beta2 = group["betas"]
        gradient = self._gradient[where]
        momentum, h = self._memory["momentum"][where], self._memory["curvature"][where]
        scratch = self._scratch[where]
        surplus = torch.sub(h, self._diagonal[where], out=self._diagonal[where])
        absorb_curvature_(h, surplus, delta, 1.0 - beta2, scratch)
        momentum.lerp_(gradient.add_(mean, alpha=delta), 1.0 - beta1)
        weight = 1.0 - beta1 ** group["step"] if group["debias"] else 1.0
        denominator = self._denominator(group, where, delta)
        mean.addcdiv_(momentum, denominator, value=-group["lr"] / weight)
