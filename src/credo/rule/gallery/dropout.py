r"""Dropout: the rule for a mixture of spike and slab, looked at from the means of its components.

Let θ_u be the weights that leave unit u of a network, dropped together. q is a product over units

    q(θ) = Π_u [(1 − p)N(θ_u; c·m_u, s⁻¹I) + pN(θ_u; 0, s₀⁻¹I)]

with a slab whose mean is learned and a fixed spike, and z_u = 1 where θ_u comes from the slab. By
the identities of a mixture (`credo.rule.gallery.newton_ensemble`, whose Fisher matrix it has)

    ∂L/∂m_u = c·E_z[z_u E_{N_z}∇_u(ℓ + log q)],        F = (1 − p)s·c²,       m ← m − ρF⁻¹∂L/∂m

In the first z_u is what a draw is responsible for: a unit drawn from its spike tells nothing about
its slab. Three approximations make this stochastic gradient descent on the masked network,

    m ← m − ρF⁻¹·c·z∘∇ℓ(c·z∘m)

one draw of the mask z; E_{N_z} by the value at the means c·m_u or 0 of the drawn components; and
∇ log q dropped. At the slab's mean that gradient is −r·s₀·c·m_u, with r the responsibility of the
spike there: it vanishes while spike and slab are narrow against their distance, and where m_u is so
close to 0 that they overlap, dropout is not the rule. F = 1 is SGD as torch does it.

c = 1 is dropout as first published: the prediction from the mean of q then uses (1 − p)m. Inverted
dropout has c = 1/(1 − p), so that E_q[θ] = m and the trained m is used as it is.

A mask for each example, as torch.nn.Dropout draws, estimates E_q Σ_i ℓ_i(θ) by a draw for each ℓ_i.

    >>> import torch
    >>> method = Dropout(units=torch.tensor([0, 1, -1]), drop=0.5, rate=0.1)
    >>> loss = Loss.of(lambda theta: 0.5 * (theta - 3).square().sum())
    >>> q = FixedGaussian(torch.ones(3), precision=torch.tensor(1.0))
    >>> method.update(q, loss, kept=torch.tensor([True, False])).mean    # unit 1 was dropped
    tensor([1.2000, 1.0000, 1.2000])

Reference: Srivastava et al., 2014; Gal & Ghahramani, 2016 (arXiv:1506.02142).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from credo.autodiff.loss import Loss
from credo.checks import Decay, checked
from credo.errors import DataError
from credo.families import FixedGaussian
from credo.rule.gallery.entry import Entry
from credo.rule.rule import step
from credo.types import Vector

ENTRY = Entry(
    algorithm="dropout",
    family="spike and slab for each unit, spike fixed",
    expectation="one mask, at the means of its components",
    curvature="none",
    step="S fixed",
    approximates="E_q by one mask and the means; the overlap of spike and slab",
    test="tests/theorems/test_gallery_search.py"
    "::test_dropout_is_sgd_on_the_network_with_torchs_own_dropout_layer",
)


@checked
@dataclass(frozen=True, eq=False)
class Dropout:
    """Drop each unit with probability ``drop``; p, c and F are in the module's docstring.

    ``units`` (P,) says which unit's output each weight multiplies, −1 for weights that stay.
    """

    units: Tensor
    drop: Decay
    rate: float
    inverted: bool = True

    def __post_init__(self) -> None:
        if self.units.dim() != 1 or self.units.is_floating_point() or int(self.units.max()) < 0:
            raise DataError("units must be integers (P,), at least one of them not negative")

    @property
    def count(self) -> int:
        """U, the number of units."""
        return int(self.units.max()) + 1

    def draw(self, generator: Generator, examples: int | None = None) -> Tensor:
        """Which units are kept, (U,), or (B, U) if each of B examples has its own mask."""
        shape = (self.count,) if examples is None else (examples, self.count)
        draws = torch.rand(shape, generator=generator, device=self.units.device)
        return draws >= self.drop

    def update(self, q: FixedGaussian, loss: Loss, kept: Tensor) -> FixedGaussian:
        """One step of the rule, given the mask; ``q`` is N(m, F⁻¹)."""
        gradient = self.masked(loss, kept, q.mean).gradient(q.mean)
        return step(q, (gradient,), self.rate)

    def masked(self, loss: Loss, kept: Tensor, like: Vector) -> Loss:
        """m ↦ ℓ(c·z∘m): the loss of the masked network, in the dtype of ``like``."""
        if kept.shape[-1:] != (self.count,) or kept.dim() > 2:
            raise DataError(
                f"kept must be ({self.count},) or (B, {self.count}), got {tuple(kept.shape)}"
            )
        slab = 1 / (1 - self.drop) if self.inverted else 1.0
        factors = slab * kept[..., self.units.clamp(min=0)].to(like.dtype)
        factors = torch.where(self.units < 0, torch.ones_like(factors), factors)
        if kept.dim() == 1:
            return Loss.of(lambda theta: loss.value(factors * theta))
        one = loss.one
        if one is None or len(kept) != len(loss.data[0]):
            raise DataError(
                f"{len(kept)} masks need a loss of {len(kept)} examples, built by "
                "Loss.over_examples or Loss.of_model"
            )
        return Loss.over_examples(
            lambda theta, factor, *data: one(factor * theta, *data),
            (factors, *loss.data),
            loss.weight,
        )
