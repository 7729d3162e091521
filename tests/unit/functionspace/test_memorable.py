"""Choosing memorable examples: equal to sorting, whatever the batches, and clear when refused."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.errors import DataError, UnsupportedError
from credo.functionspace import (
    leave_one_out,
    leverage,
    most_memorable,
    most_memorable_per_class,
    relevance,
)
from credo.likelihoods import Categorical, FromLoss
from credo.likelihoods.curvature import output_hessian_trace


def scored(n=200, classes=4, seed=0):
    """Scores with many ties, and labels."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 20, (n,), generator=generator).float()
    return scores, torch.randint(0, classes, (n,), generator=generator)


def by_hand(scores, labels, label, count):
    """Python's own sort: by falling score, then by place."""
    mine = [i for i in range(len(scores)) if labels[i] == label]
    return sorted(mine, key=lambda i: (-float(scores[i]), i))[:count]


def test_the_most_memorable_are_argsort_with_ties_by_place():
    scores, _ = scored()
    expected = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    assert most_memorable(scores, 30).tolist() == expected[:30]
    least = sorted(range(len(scores)), key=lambda i: (float(scores[i]), i))
    assert most_memorable(scores, 30, least=True).tolist() == least[:30]
    assert most_memorable(scores, 10_000).tolist() == expected


def test_the_most_memorable_per_class_are_argsort_in_every_class():
    scores, labels = scored()
    expected = [i for label in range(4) for i in by_hand(scores, labels, label, 5)]
    assert most_memorable_per_class(scores, labels, 20).tolist() == expected


@pytest.mark.parametrize(
    ("sizes", "count", "given"),
    [([5, 5, 5], 7, [3, 2, 2]), ([1, 5, 5], 9, [1, 4, 4]), ([2, 3], 99, [2, 3])],
)
def test_places_are_shared_equally_and_filled_up(sizes, count, given):
    labels = torch.cat([torch.full((size,), k) for k, size in enumerate(sizes)])
    chosen = most_memorable_per_class(torch.arange(len(labels)).float(), labels, count)
    assert [int((labels[chosen] == k).sum()) for k in range(len(sizes))] == given
    assert len(chosen.unique()) == len(chosen)


def small_posterior(likelihood=None, structure="full"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = credo.Model(net, likelihood or Categorical(), credo.priors.Normal(scale=1.0))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (40,), generator=generator)
    fitted = credo.Laplace(structure=structure, train=credo.MAP(lr=0.05))
    return credo.fit(model, fitted, (x, y), epochs=30, progress=False), (x, y)


@pytest.mark.parametrize("score", [relevance, leverage, leave_one_out])
def test_scores_do_not_depend_on_how_the_data_come(score):
    posterior, (x, y) = small_posterior()
    before = posterior.model.weights()
    whole = score(posterior, (x, y))
    assert whole.shape == (40,)
    torch.testing.assert_close(score(posterior, (x, y), batch_size=7), whole)
    torch.testing.assert_close(score(posterior, TensorDataset(x, y)), whole)
    torch.testing.assert_close(score(posterior, DataLoader(TensorDataset(x, y), 9)), whole)
    torch.testing.assert_close(score(posterior, (x.numpy(), y.numpy())), whole)
    torch.testing.assert_close(score(posterior, iter([(x[:3], y[:3]), (x[3:], y[3:])])), whole)
    assert torch.equal(posterior.model.bind().vector, before)


def test_leave_one_out_of_a_diagonal_posterior_leaves_its_own_curvature_in():
    posterior, data = small_posterior(structure="diag")
    assert bool((leave_one_out(posterior, data) >= 0).all())
    wide = credo.Posterior.at_network(
        posterior.model, credo.families.DiagGaussian(posterior.mean, torch.tensor(3.0).double())
    )
    with pytest.raises(UnsupportedError, match="removes=False"):
        leave_one_out(wide, data, removes=True)


def test_refusals_say_what_to_do():
    posterior, (x, y) = small_posterior()
    with pytest.raises(DataError, match="one label for each score"):
        most_memorable_per_class(torch.rand(3), torch.zeros(2), 1)
    with pytest.raises(DataError, match="NaN"):
        most_memorable(torch.tensor([0.0, float("nan")]), 1)
    with pytest.raises(DataError, match="count must be"):
        most_memorable(torch.rand(3), 0)
    with pytest.raises(DataError, match="must be"):
        relevance(posterior, x)
    with pytest.raises(DataError, match="no batches"):
        relevance(posterior, [])
    bent = FromLoss(lambda f, t: f.cos().sum(1), "cosine")
    with pytest.raises(DataError, match="depends on the targets"):
        output_hessian_trace(bent, torch.zeros(2, 2))
    concave = credo.Posterior.at_network(
        credo.Model(posterior.model.net, bent, posterior.model.prior), posterior.q
    )
    with pytest.raises(UnsupportedError, match="not convex"):
        leverage(concave, (x, y))
