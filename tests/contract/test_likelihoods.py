"""Every likelihood through one table: what all of them promise, and what all of them refuse."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from credo import likelihoods
from credo.errors import DataError, UnsupportedError

B = 5


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().sum(1)


@dataclass(frozen=True)
class Case:
    make: Callable[[], likelihoods.BaseLikelihood]
    outputs: tuple[int, ...]
    targets: Callable[[], Tensor]
    hessian: tuple[int, ...] | None
    sampled: tuple[int, ...] | None


def labels(*shape: int, classes: int) -> Callable[[], Tensor]:
    return lambda: torch.arange(torch.Size(shape).numel()).reshape(shape) % classes


def reals(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.linspace(-2, 2, torch.Size(shape).numel()).reshape(shape)


Cat, Ber, Gau = likelihoods.Categorical, likelihoods.Bernoulli, likelihoods.Gaussian
Het = likelihoods.HeteroscedasticGaussian

CASES = {
    "categorical": Case(Cat, (B, 3), labels(B, classes=3), (B, 3, 3), (B,)),
    "categorical dense": Case(
        Cat, (B, 3, 2, 4), labels(B, 2, 4, classes=3), (B, 2, 4, 3, 3), (B, 2, 4)
    ),
    "categorical ignoring": Case(
        lambda: Cat(ignore_index=0), (B, 3, 7), labels(B, 7, classes=3), (B, 7, 3, 3), (B, 7)
    ),
    "bernoulli": Case(Ber, (B,), labels(B, classes=2), (B, 1, 1), (B,)),
    "bernoulli column": Case(Ber, (B, 1), labels(B, classes=2), (B, 1, 1), (B, 1)),
    "bernoulli squeezed": Case(Ber, (B,), labels(B, 1, classes=2), (B, 1, 1), (B,)),
    "bernoulli multi": Case(Ber, (B, 4), lambda: torch.eye(B, 4).bool(), (B, 4, 4), (B, 4)),
    "gaussian": Case(lambda: Gau(0.3), (B,), reals(B), (B, 1, 1), (B,)),
    "gaussian column": Case(lambda: Gau(0.3), (B, 1), reals(B), (B, 1, 1), (B, 1)),
    "gaussian multi": Case(lambda: Gau(2.0), (B, 3), reals(B, 3), (B, 3, 3), (B, 3)),
    "gaussian learned": Case(
        lambda: Gau(0.3, learned=True), (B, 3), reals(B, 3), (B, 3, 3), (B, 3)
    ),
    "heteroscedastic": Case(Het, (B, 2), reals(B), (B, 2, 2), (B, 1)),
    "heteroscedastic multi": Case(lambda: Het(0.1), (B, 6), reals(B, 3), (B, 6, 6), (B, 3)),
    "from loss": Case(lambda: likelihoods.FromLoss(absolute), (B, 3), reals(B, 3), None, None),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def outputs(case: Case, request: pytest.FixtureRequest) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(case.outputs, generator=generator, dtype=request.param)


def test_log_prob_is_one_finite_number_per_example_in_the_outputs_dtype(case, outputs):
    log_prob = case.make().log_prob(outputs, case.targets())
    assert log_prob.shape == (B,)
    assert log_prob.dtype == outputs.dtype
    assert log_prob.isfinite().all()


def test_log_prob_of_a_batch_is_that_of_its_examples_one_by_one(case, outputs):
    likelihood, targets = case.make(), case.targets()
    alone = [likelihood.log_prob(outputs[i : i + 1], targets[i : i + 1]) for i in range(B)]
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), torch.cat(alone))


def test_mean_nll_and_its_gradient_are_those_of_the_mean_log_prob(case, outputs):
    likelihood, targets = case.make(), case.targets()
    outputs.requires_grad_()
    (direct,) = torch.autograd.grad(likelihood.mean_nll(outputs, targets), outputs)
    (defined,) = torch.autograd.grad(-likelihood.log_prob(outputs, targets).mean(), outputs)
    torch.testing.assert_close(
        likelihood.mean_nll(outputs, targets), -likelihood.log_prob(outputs, targets).mean()
    )
    torch.testing.assert_close(direct, defined)


def test_log_prob_can_be_mapped_over_single_examples(case, outputs):
    likelihood, targets = case.make(), case.targets()

    def one(f: Tensor, y: Tensor) -> Tensor:
        return likelihood.log_prob(f.unsqueeze(0), y.unsqueeze(0)).squeeze(0)

    mapped = torch.func.vmap(torch.func.grad(one))(outputs, targets)
    outputs.requires_grad_()
    (expected,) = torch.autograd.grad(likelihood.log_prob(outputs, targets).sum(), outputs)
    torch.testing.assert_close(mapped, expected)


def test_check_accepts_what_fits(case, outputs):
    case.make().check(outputs, case.targets())


def test_samples_fit_repeat_with_the_seed_and_carry_no_gradient(case, outputs):
    likelihood = case.make()
    outputs.requires_grad_()
    if case.sampled is None:
        with pytest.raises(UnsupportedError, match="density"):
            likelihood.sample(outputs)
        return
    first, again = (likelihood.sample(outputs, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.shape == case.sampled
    assert torch.equal(first, again)
    assert not first.requires_grad
    assert likelihood.log_prob(outputs, first).shape == (B,)


def test_hessian_is_symmetric_positive_semidefinite_in_the_outputs_dtype(case, outputs):
    likelihood = case.make()
    if case.hessian is None:
        with pytest.raises(UnsupportedError, match="every target"):
            likelihood.hessian(outputs)
        return
    hessian = likelihood.hessian(outputs)
    assert hessian.shape == case.hessian
    assert hessian.dtype == outputs.dtype
    assert torch.equal(hessian, hessian.mT)
    assert torch.linalg.eigvalsh(hessian.double()).min() > -1e-6


def test_config_is_json_and_builds_the_same_again(case, outputs):
    likelihood, targets = case.make(), case.targets()
    config = json.loads(json.dumps(likelihood.config()))
    if likelihood.kind == "loss":
        with pytest.raises(UnsupportedError, match="likelihood="):
            likelihoods.from_config(config)
        return
    again = likelihoods.from_config(config)
    assert type(again) is type(likelihood)
    assert again.config() == likelihood.config()
    assert torch.equal(again.log_prob(outputs, targets), likelihood.log_prob(outputs, targets))


def test_deepcopy_and_state_dict_keep_it_and_print_names_it(case, outputs):
    likelihood, targets = case.make(), case.targets()
    expected = likelihood.log_prob(outputs, targets)
    copied = copy.deepcopy(likelihood)
    restored = case.make()
    restored.load_state_dict(likelihood.state_dict())
    assert torch.equal(copied.log_prob(outputs, targets), expected)
    assert torch.equal(restored.log_prob(outputs, targets), expected)
    assert repr(likelihood).startswith(type(likelihood).__name__)


def test_a_target_too_many_is_refused_by_name(case, outputs):
    likelihood, targets = case.make(), case.targets()
    longer = torch.cat([targets, targets[:1]])
    for refuse in (likelihood.check, *([] if case.hessian is None else [likelihood.log_prob])):
        with pytest.raises(DataError, match=r"shape .* do not fit"):
            refuse(outputs, longer)


def test_an_empty_batch_is_refused(case, outputs):
    with pytest.raises(DataError, match="no examples"):
        case.make().check(outputs[:0], case.targets()[:0])


def test_a_target_that_is_not_a_number_is_refused(case, outputs):
    targets = case.targets().float()
    targets[(2, *[0] * (targets.dim() - 1))] = float("nan")
    with pytest.raises(DataError, match=r"NaN|int64"):
        case.make().check(outputs, targets)


@pytest.mark.parametrize(
    "config",
    [{}, {"type": "Poisson"}, {"type": ["Gaussian"]}, {"type": "Gaussian", "sigma": 1.0},
     {"type": "Gaussian", "scale": "wide"}],
)  # fmt: skip
def test_a_config_of_no_likelihood_is_refused_by_name(config):
    with pytest.raises(DataError):
        likelihoods.from_config(config)
