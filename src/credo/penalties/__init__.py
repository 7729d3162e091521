r"""What people put in a loss, with the factors that make each a prior.

    loss = mean NLL + λ Σ_ℓ λ_ℓ·r(θ_ℓ)

symbols: θ_ℓ the weights of layer ℓ, r the penalty ``kind``, λ_ℓ the layer's factor, λ ``lam``. The
posterior's mode is the minimum of this loss at **λ = 1/num_data** if e^(−λ_ℓ r) is layer ℓ's prior;
``factors="bayesian"`` gives that prior the variance 1/fan-in that networks are initialised with:

| kind | r(θ) | variance under e^(−λr) | Bayesian λ_ℓ, P = fan-in | usual λ_ℓ |
|---|---|---|---|---|
| ``l2`` | ‖θ‖₂² | 1/(2λ) | P/2 | 1 |
| ``l1`` | ‖θ‖₁ | 2/λ² | √(2P) | 1 |
| ``group_lasso`` | Σ over units of ‖incoming weights‖₂ | (n+1)/λ², n = P | √(P(P+1)) | √n |
| ``group_lasso_transposed`` | Σ over inputs of ‖outgoing weights‖₂ | (n+1)/λ² | √((n+1)P) | √n |
| ``elastic_net`` | ρ‖θ‖₁ + (1−ρ)‖θ‖₂² | see `credo.priors.ElasticNet` | by root finding | 1 |

Penalised are matrices and kernels, the weights of Linear, convolutional and other layers. Biases
and other vectors, normalisation layers and frozen weights are not, unless ``weights`` names them.

    >>> import torch, credo
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> credo.penalties.layer_factors(net, "l1")
    {'0.weight': 4.0, '2.weight': 2.828...}
    >>> x, y = torch.randn(5, 8), torch.tensor([0, 1, 0, 1, 1])
    >>> loss = torch.nn.functional.cross_entropy(net(x), y)
    >>> loss = loss + credo.penalties.penalty(net, "group_lasso", num_data=50_000)
    >>> loss.backward()

In `credo.fit`: ``credo.MAP(penalty="group_lasso")``. The priors themselves, for methods that need
more than a pull: `credo.priors.Normal.fan_in`, `Laplace.fan_in`, `GroupLasso.fan_in`,
`ElasticNet.fan_in`. Reference: P. Wolinski, G. Charpiat
and Y. Ollivier, "Interpreting a penalty as the influence of a Bayesian prior", 2020.
"""

from credo.penalties.factors import KINDS, Kind
from credo.penalties.pruning import prune
from credo.penalties.spec import FlatPenalty, Penalty, layer_factors, penalty

__all__ = ["KINDS", "FlatPenalty", "Kind", "Penalty", "layer_factors", "penalty", "prune"]
