"""Each likelihood's own rules: what it ignores, stores, transforms and refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from credo.errors import DataError
from credo.likelihoods import (
    Bernoulli,
    Categorical,
    FromLoss,
    Gaussian,
    HeteroscedasticGaussian,
    from_config,
)

# --- Categorical


def logits(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_ignored_pixels_add_nothing_and_others_are_summed():
    f = logits(2, 3, 4)
    y = torch.tensor([[0, 1, 255, 2], [255, 255, 255, 255]])
    by_pixel = f.log_softmax(1).gather(1, y.clamp_max(2).unsqueeze(1)).squeeze(1)
    expected = torch.stack([by_pixel[0, [0, 1, 3]].sum(), torch.zeros((), dtype=f.dtype)])
    torch.testing.assert_close(Categorical(ignore_index=255).log_prob(f, y), expected)


def test_without_ignore_index_the_label_torch_skips_is_an_error():
    f, y = logits(2, 3), torch.tensor([0, -100])
    with pytest.raises(IndexError):
        Categorical().log_prob(f, y)
    with pytest.raises(DataError, match=r"Label -100 at index \(1,\)"):
        Categorical().check(f, y)


def test_saturated_hessian_keeps_its_digits():
    f = torch.tensor([[30.0, 0.0]])
    exact = Categorical().hessian(f.double())
    torch.testing.assert_close(Categorical().hessian(f).double(), exact, rtol=1e-6, atol=0)
    assert exact[0, 0, 0] > 0


def test_entropy_survives_impossible_classes():
    probs = Categorical().probs(torch.tensor([[0.0, -math.inf, 0.0]]))
    torch.testing.assert_close(Categorical().entropy(probs), torch.tensor([math.log(2)]))


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (logits(2, 3), torch.tensor([0, -1]), r"Label -1 at index \(1,\).*ignore_index=-1"),
        (logits(2, 3), torch.tensor([3, 0]), r"Label 3 at index \(0,\).*classes 0 to 2 \(1 of 2"),
        (logits(2, 3), torch.tensor([0.0, 1.0]), r"float32.*targets\.long\(\)"),
        (logits(2, 3), torch.eye(2, 3), r"argmax"),
        (logits(2, 3), torch.tensor([0, 1], dtype=torch.int32), r"int32"),
        (logits(2, 3), torch.tensor([[0], [1]]), r"\(2, 1\) do not fit.*\(2,\)"),
        (logits(2, 3, 4), torch.tensor([0, 1]), r"do not fit.*\(2, 4\)"),
        (logits(2), torch.tensor([0, 1]), r"shape \(2,\).*Bernoulli"),
        (logits(2, 1), torch.tensor([0, 0]), r"one class.*Bernoulli"),
    ],
)
def test_categorical_refuses_with_the_remedy(outputs, targets, message):
    with pytest.raises(DataError, match=message):
        Categorical().check(outputs, targets)


def test_one_hot_targets_are_not_taken_for_soft_labels():
    with pytest.raises(DataError, match="argmax"):
        Categorical().log_prob(logits(2, 3), torch.eye(2, 3, dtype=torch.float64))
    with pytest.raises(DataError, match="argmax"):
        Categorical().mean_nll(logits(2, 3), torch.eye(2, 3, dtype=torch.float64))


def test_a_batch_with_nothing_but_ignored_labels_is_refused():
    with pytest.raises(DataError, match="nothing is left"):
        Categorical(ignore_index=-1).check(logits(2, 3), torch.tensor([-1, -1]))


def test_ignore_index_is_an_int():
    with pytest.raises(DataError, match="ignore_index"):
        Categorical(ignore_index=1.5)


# --- Bernoulli


def test_bernoulli_is_stable_far_out_in_both_directions():
    f = torch.tensor([200.0, -200.0, 200.0, -200.0])
    y = torch.tensor([1, 0, 0, 1])
    assert torch.equal(Bernoulli().log_prob(f, y), torch.tensor([0.0, 0.0, -200.0, -200.0]))
    far = torch.tensor([40.0])
    expected = torch.full((1, 1, 1), math.exp(-40.0))
    torch.testing.assert_close(Bernoulli().hessian(far), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_bernoulli_takes_zeros_and_ones_of_any_dtype(dtype):
    f, y = logits(3), torch.tensor([1, 0, 1])
    Bernoulli().check(f, y.to(dtype))
    assert torch.equal(Bernoulli().log_prob(f, y.to(dtype)), Bernoulli().log_prob(f, y))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.tensor([0, 2]), r"Target 2 at index \(1,\).*Categorical"),
        (torch.tensor([0.5, 1]), r"Target 0\.5"),
        (torch.tensor([-1, 1]), r"Target -1"),
        (torch.tensor([[0, 1]]), r"\(1, 2\) do not fit.*\(2,\)"),
    ],
)
def test_bernoulli_refuses_with_the_remedy(targets, message):
    with pytest.raises(DataError, match=message):
        Bernoulli().check(logits(2), targets)


# --- Gaussian


def test_a_column_against_a_row_never_broadcasts():
    f, y = logits(4, 1), torch.zeros(4, dtype=torch.float64)
    expected = Gaussian().log_prob(f.squeeze(1), y)
    assert torch.equal(Gaussian().log_prob(f, y), expected)
    assert torch.equal(Gaussian().log_prob(f.squeeze(1), y.unsqueeze(1)), expected)
    with pytest.raises(DataError, match=r"\(1, 4\) do not fit predictions of shape \(4, 1\)"):
        Gaussian().log_prob(f, y.unsqueeze(0))


def test_fixed_scale_is_exact_in_float64_and_no_parameter():
    likelihood = Gaussian(scale=0.1)
    f = torch.zeros(1, dtype=torch.float64)
    assert likelihood.log_prob(f, f).item() == pytest.approx(
        -math.log(0.1) - 0.5 * math.log(2 * math.pi), rel=1e-15
    )
    assert list(likelihood.parameters()) == []


def test_learned_scale_finds_the_residuals_standard_deviation_and_is_saved():
    likelihood = Gaussian(scale=5.0, learned=True).double()
    y = 0.7 * logits(400)
    optimizer = torch.optim.LBFGS(
        likelihood.parameters(),
        tolerance_grad=1e-9,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        loss = likelihood.mean_nll(torch.zeros_like(y), y)
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    # the maximum-likelihood scale, to within the optimizer's 1e-9 in the gradient
    assert likelihood.scale == pytest.approx(y.square().mean().sqrt().item(), rel=1e-6)
    again = from_config(likelihood.config())
    assert again.scale == pytest.approx(likelihood.scale, rel=1e-7)
    assert [name for name, _ in again.named_parameters()] == ["log_scale"]


def test_learned_scale_in_float32_survives_config_bit_for_bit():
    likelihood = Gaussian(scale=0.37, learned=True)
    for _ in range(3):
        again = from_config(likelihood.config())
        assert torch.equal(again.log_scale, likelihood.log_scale)
        likelihood = again


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, "1", None, torch.tensor(1.0)])
def test_scale_must_be_a_positive_number(scale):
    with pytest.raises(DataError, match="scale must be a positive finite number"):
        Gaussian(scale=scale)
    with pytest.raises(DataError, match="min_scale must be a positive finite number"):
        HeteroscedasticGaussian(min_scale=scale)


def test_numpy_numbers_are_numbers():
    assert Gaussian(scale=np.float32(0.5)).scale == 0.5


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.tensor([0.0, math.inf]), r"1 of 2 target values.*index \(1,\)"),
        (torch.tensor([True, False]), r"bool.*Bernoulli"),
        (torch.tensor([1j, 0]), r"complex"),
        (torch.zeros(2, 2), r"\(2, 2\) do not fit"),
    ],
)
def test_gaussian_refuses_with_the_remedy(targets, message):
    with pytest.raises(DataError, match=message):
        Gaussian().check(logits(2), targets)


def test_cdf_keeps_its_tails_in_float32():
    f, y = torch.zeros(3), torch.tensor([-2.0, -4.0, -6.0])
    expected = torch.from_numpy(stats.norm.cdf(y.numpy().astype(float)))
    for tail in (Gaussian().cdf(f, y), Gaussian().survival(f, -y)):
        # z² carries a relative error of 6e-8, the tail z² times that
        torch.testing.assert_close(tail.double(), expected, rtol=5e-6, atol=0)


# --- HeteroscedasticGaussian


def test_means_come_first_and_scales_pass_through_softplus():
    f = logits(3, 4)
    mean, scale = HeteroscedasticGaussian(min_scale=0.2).mean_and_scale(f)
    assert torch.equal(mean, f[:, :2])
    torch.testing.assert_close(scale, 0.2 + (1 + f[:, 2:].exp()).log())


def test_the_scale_never_falls_below_its_minimum():
    f = torch.tensor([[0.0, -500.0]])
    assert HeteroscedasticGaussian(min_scale=0.01).variance(f).item() == pytest.approx(1e-4)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 2)])
def test_heteroscedastic_refuses_outputs_that_do_not_split(shape):
    with pytest.raises(DataError, match=r"\(B, 2D\)"):
        HeteroscedasticGaussian().log_prob(logits(*shape), logits(4))


# --- FromLoss


def test_log_prob_is_minus_the_loss():
    f, y = logits(4, 3), torch.tensor([0, 1, 2, 0])

    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")

    assert torch.equal(FromLoss(loss).log_prob(f, y), Categorical().log_prob(f, y))


@pytest.mark.parametrize("loss", [torch.nn.MSELoss(), torch.nn.HuberLoss(reduction="none")])
def test_a_loss_that_is_not_per_example_is_refused(loss):
    for refuse in (FromLoss(loss).check, FromLoss(loss).log_prob):
        with pytest.raises(DataError, match=r'HuberLoss|MSELoss.*reduction="none"'):
            refuse(logits(4, 3), logits(4, 3))


def test_a_scalar_loss_is_refused_for_one_example_too():
    with pytest.raises(DataError, match="per example"):
        FromLoss(F.mse_loss).log_prob(logits(1), logits(1))


def test_a_loss_is_named_after_its_function_unless_told():
    assert FromLoss(F.mse_loss).config() == {"type": "FromLoss", "name": "mse_loss"}
    assert FromLoss(torch.nn.MSELoss()).config()["name"] == "MSELoss"
    assert FromLoss(F.mse_loss, name="squares").config()["name"] == "squares"


def test_a_loss_with_parameters_learns_them():
    loss = torch.nn.Linear(1, 1)
    assert len(list(FromLoss(loss).parameters())) == 2


def test_what_is_no_function_is_refused():
    with pytest.raises(DataError, match="fn must be a function"):
        FromLoss("mse")
