"""Λ at the outputs: its trace and roots where rounding or missing labels could spoil them."""

from __future__ import annotations

import pytest
import torch

from credo.active.scores import relevance
from credo.errors import DataError
from credo.likelihoods import Bernoulli, Categorical, Gaussian
from credo.likelihoods.curvature import curvature_roots, output_hessian, output_hessian_trace
from credo.posterior.predictive import Predictive


def test_relevance_is_one_minus_the_sum_of_squares_and_keeps_saturated_examples_apart():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 5, generator=generator, dtype=torch.float64)
    probs = logits.softmax(1)
    expected = 1 - probs.square().sum(1)
    torch.testing.assert_close(output_hessian_trace(Categorical(), logits), expected)
    sure = torch.tensor([[20.0, 0.0], [25.0, 0.0]])  # 1 − Σp² is 0 for both in float32
    traces = output_hessian_trace(Categorical(), sure)
    assert traces[0] > traces[1] > 0
    one = torch.tensor([[0.0], [3.0]])
    expected = (one.sigmoid() * (1 - one.sigmoid())).flatten()
    torch.testing.assert_close(output_hessian_trace(Bernoulli(), one), expected)
    torch.testing.assert_close(
        output_hessian_trace(Gaussian(scale=0.5), torch.zeros(2, 3)), torch.full((2,), 12.0)
    )


def test_ignored_pixels_do_not_count():
    likelihood = Categorical(ignore_index=9)
    logits = torch.zeros(1, 2, 3)
    labels = torch.tensor([[0, 9, 1]])
    assert float(output_hessian_trace(likelihood, logits, labels)) == pytest.approx(1.0)


def test_the_relevance_of_a_prediction_is_the_same_trace():
    logits = torch.tensor([[20.0, 0.0], [25.0, 0.0], [0.3, -0.2]])
    for likelihood, outputs in ((Categorical(), logits), (Bernoulli(), torch.tensor([0.3, -2.0]))):
        scores = relevance(Predictive(outputs.unsqueeze(0), likelihood))
        torch.testing.assert_close(
            scores, output_hessian_trace(likelihood, outputs), atol=0, rtol=1e-6
        )
    sure = relevance(Predictive(logits[:2].unsqueeze(0), Categorical()))
    assert sure[0] > sure[1] > 0


def test_roots_need_labels_only_where_they_are_taken_at_labels():
    likelihood, outputs = Categorical(ignore_index=1), torch.zeros(2, 3, dtype=torch.float64)
    roots = curvature_roots("ggn", likelihood, outputs, None)
    torch.testing.assert_close(
        torch.einsum("rbi,rbj->bij", roots, roots), output_hessian(likelihood, outputs)
    )
    ignored = curvature_roots("ggn", likelihood, outputs, torch.tensor([0, 1]))
    assert ignored[:, 0].any()
    assert not ignored[:, 1].any()
    with pytest.raises(DataError, match="give the targets"):
        curvature_roots("fisher", likelihood, outputs, None)
