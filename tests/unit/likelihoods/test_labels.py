"""Labels drawn from the model itself."""

from __future__ import annotations

import torch

from credo.likelihoods import Categorical, Gaussian
from credo.likelihoods.curvature import curvature_roots
from credo.likelihoods.labels import draw_labels


def test_ignored_labels_stay_ignored():
    targets = torch.tensor([[0, 9, 1], [9, 9, 2]])
    drawn = draw_labels(Categorical(ignore_index=9), torch.randn(2, 3, 3), targets)()
    assert torch.equal(drawn == 9, targets == 9)


def test_the_fisher_of_learned_noise_is_that_of_fixed_noise():
    outputs, targets = torch.randn(4, 2), torch.zeros(4, 2)
    roots = [
        curvature_roots("fisher", Gaussian(0.5, learned), outputs, targets, seeded())
        for learned in (False, True)
    ]
    torch.testing.assert_close(roots[0], roots[1])
    assert not roots[1].requires_grad


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
