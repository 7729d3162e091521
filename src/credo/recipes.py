r"""Settings that belong together, each as the model and the method to give to `credo.fit`.

The cold posterior, density ∝ (likelihood × prior)^{1/T}. Tempering the KL by T < 1 alone weakens
the pull of the prior by T as well, which is seldom meant: weight decay λ that served a point
estimate is then all but gone. A prior that is narrower by √T,

    N(0, T/(nλ)),        λ weight decay, n training examples

keeps the pull at full strength, so that T cools the entropy alone. docs/concepts/optimizers.md has
its runs against a tuned Adam and SGD at equal time, and where it does not win.

Reference: Wenzel et al., "How good is the Bayes posterior in deep neural networks really?", 2020
(arXiv:2002.02405).
"""

from __future__ import annotations

import math

from torch import nn

from credo.checks import Count, Positive, checked
from credo.model import Model
from credo.priors import Normal
from credo.types import Likelihood
from credo.variational.natural import EVON

LR = 0.1
"""Half of EVON's own: runs of this length are long enough for it, and less sure in the end."""

REFRESH = 30
"""Steps between refreshes of EVON's bases; of 10 and 30 the cheaper one was no worse."""


@checked
def cold_posterior(
    net: nn.Module,
    likelihood: Likelihood,
    num_data: Count,
    weight_decay: Positive = 1e-3,
    temperature: Positive = 0.1,
) -> tuple[Model, EVON]:
    """A network under weight decay, to be trained to a cold posterior by `credo.EVON`.

    Give `credo.fit` a falling rate with it, ``schedule="cosine"``. Choose ``weight_decay`` as for
    Adam, and then ``temperature``: higher where confidence exceeds accuracy on held-out data.

    Args:
        net: The network.
        likelihood: How targets follow from its outputs.
        num_data: Training examples.
        weight_decay: λ, of a loss with ½λ‖w‖² beside the mean over examples.
        temperature: T.

    Returns:
        The model and the method.

    >>> import torch, credo
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    >>> data = credo.data.digits()
    >>> n = len(data.train[0])
    >>> model, method = cold_posterior(net, credo.likelihoods.Categorical(), n)
    >>> posterior = credo.fit(
    ...     model, method, data.train, epochs=3, schedule="cosine", progress=False
    ... )
    >>> posterior.predict(data.test[0], samples=4).probs.shape[1]
    10
    """
    prior = Normal(scale=math.sqrt(temperature / (num_data * weight_decay)))
    return Model(net, likelihood, prior), EVON(lr=LR, temperature=temperature, refresh=REFRESH)
