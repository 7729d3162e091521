r"""SGD's rate from the curvature of the loss at hand: the robust region, measured.

    (1 − √μ)²/h₁ ≤ α ≤ (1 + √μ)²/h₂

Within these bounds momentum descent forgets its start at the rate √μ for all curvatures from h₁ to
h₂ (`credo.tools.robust_region`); above them it diverges in the direction of h₂. Here h₁ and h₂
bound the eigenvalues of the Gauss–Newton matrix of the mean NLL plus the prior's own curvature,
temperature/(n·scale²), which is what keeps h₁ above zero in a network with more weights than data.
The spectrum of a network is so wide that there is often no robust rate at all: then ``low`` exceeds
``high``, and ``high`` is still the largest rate that is stable on the quadratic.

symbols: α the rate, μ ``momentum``, n ``num_data``.

    >>> import torch, credo
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.zeros(2, 1)
    >>> model = credo.Model(torch.nn.Linear(2, 1, bias=False), credo.likelihoods.Gaussian(1.0))
    >>> rates = robust_rates(model, (x, y), momentum=0.5, temperature=0.0)    # curvatures ½ and 4½
    >>> round(rates.low, 4), round(rates.high, 4)
    (0.1716, 0.6476)

References: Zhang and Mitliagkas, 2017; Book, 2020 (3.2, figs. 5.4 and 5.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from credo.checks import Count, Decay, NotNegative, checked
from credo.errors import DataError
from credo.model import Model
from credo.network.batches import to_device
from credo.tools.robust_region import RobustRegion, robust_region
from credo.tools.spectrum import extreme_eigenvalues
from credo.train.feed import Feed, make_feed
from credo.types import Batch


@dataclass(frozen=True)
class RobustRates:
    """The bounds of SGD's rate at one momentum.

    Args:
        momentum: The momentum.
        low: The smallest robust rate.
        high: The largest robust rate; below ``low`` where none is.
        region: The rates of other momenta.
    """

    momentum: float
    low: float
    high: float
    region: RobustRegion


@checked
def robust_rates(
    model: Model,
    data: Any,
    momentum: Decay = 0.9,
    *,
    temperature: NotNegative = 1.0,
    products: Count = 32,
    batch_size: Count = 512,
    seed: int = 0,
    num_data: Count | None = None,
) -> RobustRates:
    """Measure the curvature of the MAP loss at the network's weights; what rates are robust?

    Takes ``products`` passes over the data.

    Args:
        model: At the weights that its network has.
        data: What `credo.fit` takes; a part of it will do, as long as ``temperature`` is divided
            accordingly.
        momentum: Of SGD.
        temperature: Weight of the prior; 0 leaves it out.
        products: With the curvature's matrix; see `extreme_eigenvalues`.
        batch_size: Examples at once.
        seed: Of the first vector.
        num_data: That of `credo.fit`.
    """
    feed = make_feed(data, batch_size, model, num_data)
    feed.check(model)
    generator = torch.Generator(model.like.device).manual_seed(seed)
    extremes = extreme_eigenvalues(
        model, _Again(model, feed), "ggn", products=products, generator=generator
    )
    # Eigenvalues of a sum lie between the sums of the extreme ones (Weyl).
    prior = temperature / (feed.num_data * model.prior_over_weights().scale ** 2)
    least = max(0.0, extremes.smallest) + float(prior.min())
    if not temperature:
        least = extremes.smallest_positive or 0.0
    if not least > 0:
        raise DataError("the loss has no curvature at these weights and this temperature")
    region = robust_region(least, extremes.largest + float(prior.max()))
    low, high = region.rates(momentum)
    return RobustRates(momentum, low, high, region)


class _Again:
    """The same batches every time they are gone through."""

    def __init__(self, model: Model, feed: Feed) -> None:
        self.model, self.feed = model, feed

    def __iter__(self) -> Iterator[Batch]:
        device = self.model.like.device
        return (to_device(batch, device) for batch in self.feed.batches(0, 0))
