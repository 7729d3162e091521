r"""Train on the important examples: from every few batches, the share with the largest tr Λ.

    Λ_i = ∇²_ff ℓ(y_i, f(x_i)) = diag(p_i) − p_i p_iᵀ,        tr Λ_i = 1 − Σ_c p_ic²

symbols: f the network's outputs at its present weights, p = softmax(f). An epoch is a permutation
of the data cut into candidate pools of ``pool`` · ``batch_size`` examples; of each the
``batch_size`` with the largest tr Λ become one gradient step. So an epoch has 1/``pool`` of the
usual steps, and each costs ``pool`` forward passes without gradient beside its own.

It is a batch sampler, which torch's DataLoader takes, and with it `credo.fit` and any loop:

    >>> import torch, credo
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> data = credo.data.digits()
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> chosen = ImportantBatches(net, credo.likelihoods.Categorical(), data.train[0],
    ...                           batch_size=32, pool=4)
    >>> loader = DataLoader(TensorDataset(*data.train), batch_sampler=chosen)
    >>> optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    >>> for x, y in loader:                                     # a plain loop
    ...     torch.nn.functional.cross_entropy(net(x), y).backward()
    ...     optimizer.step(); optimizer.zero_grad()
    >>> model = credo.Model(net, credo.likelihoods.Categorical())
    >>> posterior = credo.fit(model, credo.MAP(), loader, epochs=2, progress=False)
    >>> len(loader), chosen.last.shape
    (11, torch.Size([5]))

What is trained is no longer the likelihood of the data: examples near a boundary weigh more. Among
them are those that are ambiguous or wrongly labelled, whose tr Λ no training brings down;
``share`` mixes them with examples chosen at random. Curvature for a posterior (`credo.Laplace`)
belongs to all data: fit it afterwards, on the data themselves. With worker processes the loader
reads ahead of training, and the choice is made by older weights.

Reference: Khan, "Deep learning with Bayesian principles", tutorial, 2019, where active deep
learning selects important examples while training with Adam (a picture without numbers).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from credo.active.acquisitions import largest
from credo.checks import Count, Share, checked
from credo.errors import UnsupportedError
from credo.functionspace import most_memorable
from credo.likelihoods.base import Classification
from credo.likelihoods.curvature import output_hessian_trace
from credo.model import Model
from credo.network.batches import as_inputs, chunks, input_rows, number_of_examples
from credo.network.state import evaluating
from credo.noise import key_to_seed
from credo.types import Inputs, Likelihood

SCORED_AT_ONCE = 1024


def most_relevant(outputs: Tensor, likelihood: Likelihood, count: int) -> Tensor:
    """Rows of the examples with the largest tr Λ, the largest first.

    Args:
        outputs: Of the network, (B, C).
        likelihood: A classifier's.
        count: How many rows.

    >>> from credo.likelihoods import Categorical
    >>> most_relevant(torch.tensor([[5.0, 0.0], [0.0, 0.0], [1.0, 0.0]]), Categorical(), 2)
    tensor([1, 2])
    """
    _refuse_unless_classes(likelihood)
    return most_memorable(output_hessian_trace(likelihood, outputs), count)


@checked
class ImportantBatches(Sampler[list[int]]):
    """Batches of example numbers: the most relevant of each candidate pool.

    ``last`` has the numbers of the latest batch.

    Args:
        net: The network in training; it is asked at its present weights.
        likelihood: A classifier's.
        inputs: Those of the data set that the loader reads, in its order.
        batch_size: Examples of a batch.
        pool: Candidates for each example of a batch.
        share: Of each batch so much is chosen by tr Λ, the rest at random from the same pool; 0 is
            uniform sampling with the same number of steps.
        seed: Of the permutations.
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        inputs: Inputs | Any,
        batch_size: Count = 128,
        pool: Count = 4,
        share: Share = 1.0,
        seed: int = 0,
    ) -> None:
        _refuse_unless_classes(likelihood)
        # A Model only to call the network as fit does, whatever the inputs are.
        self._model = Model(net, likelihood)
        self.inputs = as_inputs(inputs)
        self.num_data = number_of_examples(self.inputs)
        self.batch_size, self.pool, self.share, self.seed = batch_size, pool, share, seed
        self.epoch = 0
        self.last = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-self.num_data // (self.batch_size * self.pool))

    def __iter__(self) -> Iterator[list[int]]:
        """One epoch; the next one has another permutation."""
        generator = torch.Generator().manual_seed(key_to_seed(self.seed, self.epoch))
        self.epoch += 1
        order = torch.randperm(self.num_data, generator=generator)
        for candidates in order.split(self.batch_size * self.pool):
            # The last pool is smaller, and so is its batch.
            count = -(-len(candidates) // self.pool)
            by_relevance = round(self.share * count)
            first = torch.empty(0, dtype=torch.int64)
            if by_relevance:
                first = largest(self._relevances(candidates), by_relevance, generator)
            others = torch.ones(len(candidates), dtype=torch.bool)
            others[first] = False
            # The permutation was random, so its beginning is a random choice.
            rest = others.nonzero().flatten()[: count - by_relevance]
            self.last = candidates[torch.cat([first, rest])]
            yield self.last.tolist()

    @torch.no_grad()
    def _relevances(self, candidates: Tensor) -> Tensor:
        """tr Λ at the network's present weights, its layers in the mode for prediction."""
        weights = next(self._model.net.parameters())
        wanted = input_rows(self.inputs, candidates)
        with evaluating(self._model.net):
            return torch.cat(
                [
                    output_hessian_trace(self._model.likelihood, self._model.outputs(piece))
                    for piece in chunks(wanted, SCORED_AT_ONCE, weights)
                ]
            )


def _refuse_unless_classes(likelihood: Likelihood) -> None:
    if not isinstance(likelihood, Classification):
        raise UnsupportedError(
            f"examples are ranked by the curvature of a classifier's loss, and that of "
            f"{type(likelihood).__name__} does not tell them apart by what was learned"
        )
