"""Local reparameterisation and flipout draw what weight noise draws, example by example.

All in float64. Tolerances are five standard errors, estimated from the same draws.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from credo import noise
from credo.autodiff.seam import Seam
from credo.network import bind, select
from credo.variational.estimators import GaussianStep
from credo.variational.estimators.activation_noise import (
    ActivationNoise,
    Flipout,
    LocalReparameterisation,
)

ESTIMATORS = [LocalReparameterisation, Flipout]
STANDARD_ERRORS = 5.0


def uniform(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


class Experiment:
    """A network with a random mean and scale, and an estimator's draws of its gradient."""

    def __init__(self, net: nn.Module, seed: int = 0) -> None:
        self.net = net.double()
        self.flat = bind(self.net)
        self.random = select(self.flat.segments, "all")
        self.mean = uniform(self.random.size, seed=seed) - 0.5
        self.scale = 0.2 + 0.4 * uniform(self.random.size, seed=seed + 1)

    def draws(self, estimator: ActivationNoise, energy, count: int, samples: int = 1) -> Tensor:
        """``count`` independent estimates of the gradients of mean and scale, (count, 2, P)."""
        grads = torch.empty(count, 2, self.random.size, dtype=torch.float64)
        for i, (grad_mean, grad_scale) in enumerate(grads):
            estimator.gradients(
                GaussianStep(
                    self.flat, self.random, self.mean, self.scale, energy, kl_weight=1.0,
                    samples=samples, key=(i,), grad_mean=grad_mean, grad_scale=grad_scale,
                )
            )  # fmt: skip
        return grads

    def call(self, vector: Tensor, x: Tensor) -> Tensor:
        """The network at a flat vector, differentiably."""
        weights = {s.name: vector[s.slice].view(s.shape) for s in self.random.segments}
        return functional_call(self.net, weights, (x,))

    def weight_noise_draws(self, loss, x: Tensor, y: Tensor, count: int, seed: int = 9) -> Tensor:
        """The same gradients under weight noise: g and g∘ε, (count, 2, P)."""
        generator = torch.Generator().manual_seed(seed)
        eps = torch.randn(count, self.random.size, generator=generator, dtype=torch.float64)
        g = vmap(grad(lambda w: loss(self.call(w, x), y)))(self.mean + self.scale * eps)
        return torch.stack([g, g * eps], dim=1)


def half_square(out: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (out - y).square().sum(-1).mean()


def assert_means_agree(draws: Tensor, expected: Tensor, expected_error: Tensor | float = 0.0):
    error = (draws.var(0) / len(draws) + expected_error**2).sqrt()
    assert ((draws.mean(0) - expected).abs() <= STANDARD_ERRORS * error + 1e-12).all()


def layers() -> list:
    return [
        pytest.param(nn.Linear(3, 2), (3, 3), id="linear"),
        pytest.param(nn.Conv2d(2, 2, 2, stride=1, padding=1, groups=1), (2, 2, 2, 2), id="conv"),
        pytest.param(nn.Conv2d(2, 4, 2, groups=2), (2, 2, 2, 3), id="grouped conv"),
        pytest.param(nn.ConvTranspose2d(2, 2, 2, stride=2), (2, 2, 1, 2), id="conv transpose"),
    ]


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize(("layer", "shape"), layers())
def test_outputs_have_the_mean_and_covariance_of_weight_noise(kind, layer, shape):
    """out = Jθ for one layer, so weight noise gives J diag(σ²) Jᵀ within each example.

    Between examples there is none. Local reparameterisation keeps the diagonal only.
    """
    case, x, outputs = Experiment(layer), uniform(*shape, seed=5) - 0.3, []

    def energy() -> Tensor:
        outputs.append(case.net(x))
        return outputs[-1].sum()

    case.draws(kind(noise.source("normal", seed=3)), energy, 800)
    draws = torch.stack(outputs[1:]).detach().flatten(1)  # the first forward pass is the survey

    jacobian = jacrev(case.call)(case.mean, x).flatten(0, -2)
    covariance = jacobian * case.scale.square() @ jacobian.T
    example = torch.arange(len(x)).repeat_interleave(len(jacobian) // len(x))
    same = (
        torch.eye(len(jacobian)) if kind is LocalReparameterisation else example == example[:, None]
    )
    centred = draws - case.call(case.mean, x).flatten().detach()
    products = centred.unsqueeze(1) * centred.unsqueeze(2)
    assert_means_agree(centred, torch.zeros_like(centred[0]))
    assert_means_agree(products, covariance.detach() * same)


class Product(nn.Module):
    """The same map as ``nn.Linear(3, 1)``, but out of the seam's reach."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(1, 3)), nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


@pytest.mark.filterwarnings("ignore:activation noise reaches")
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("net", [nn.Linear(3, 1), Product()], ids=["seam", "fallback"])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_gradient_of_linear_regression_is_the_exact_one_on_average(kind, net, samples):
    """E ½(xᵀw + b − y)² = ½(xᵀm + m_b − y)² + ½(x²ᵀσ² + σ_b²)."""
    case = Experiment(net)
    x, y = uniform(4, 3, seed=5) - 0.3, uniform(4, 1, seed=6)
    estimator = kind(noise.source("normal", seed=1))
    draws = case.draws(estimator, lambda: half_square(case.net(x), y), 600, samples)

    inputs = torch.cat([x, torch.ones(4, 1)], dim=1)
    mean, scale = case.mean.clone().requires_grad_(), case.scale.clone().requires_grad_()
    residual = inputs @ mean - y.squeeze(1)
    (0.5 * (residual.square() + inputs.square() @ scale.square()).mean()).backward()
    assert_means_agree(draws, torch.stack([mean.grad, scale.grad]))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_gradient_of_a_deep_network_is_that_of_weight_noise_on_average(kind):
    case = Experiment(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)))
    x, y = uniform(3, 2, seed=5) - 0.3, uniform(3, 2, seed=6)
    draws = case.draws(
        kind(noise.source("normal", seed=1)), lambda: half_square(case.net(x), y), 1000
    )
    reference = case.weight_noise_draws(half_square, x, y, 20_000)
    assert_means_agree(draws, reference.mean(0), reference.std(0) / len(reference) ** 0.5)


def test_flipout_is_unbiased_through_a_convolution_with_a_nonlinear_loss():
    """One weight for all pixels of an example: the loss sees their covariance."""
    case = Experiment(nn.Sequential(nn.Conv1d(2, 2, 2), nn.Flatten(), nn.Tanh(), nn.Linear(4, 1)))
    x, y = uniform(3, 2, 3, seed=5) - 0.3, uniform(3, 1, seed=6)
    draws = case.draws(
        Flipout(noise.source("normal", seed=1)), lambda: half_square(case.net(x), y), 1000
    )
    reference = case.weight_noise_draws(half_square, x, y, 20_000)
    assert_means_agree(draws, reference.mean(0), reference.std(0) / len(reference) ** 0.5)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_variance_of_the_gradient_is_smaller_than_under_weight_noise(kind):
    """With 16 examples that err apart; weight noise makes them err together.

    The scale's gradient under flipout holds E², which no sign can flip: it is left out.
    """
    case = Experiment(nn.Linear(3, 1))
    x, y = uniform(16, 3, seed=5) - 0.5, uniform(16, 1, seed=6)
    draws = case.draws(
        kind(noise.source("normal", seed=1)), lambda: half_square(case.net(x), y), 500
    )
    reference = case.weight_noise_draws(half_square, x, y, 500)
    ratio = draws.var(0).sum(1) / reference.var(0).sum(1)
    assert ratio[0] < 0.5
    assert kind is Flipout or ratio[1] < 0.5


def test_flipout_gives_equal_examples_different_perturbations():
    """Signs of the outputs alone would decorrelate them, but leave their sizes equal."""
    case, outputs = Experiment(nn.Linear(3, 1)), []
    x = torch.ones(2, 3, dtype=torch.float64)

    def energy() -> Tensor:
        outputs.append(case.net(x))
        return outputs[-1].sum()

    case.draws(Flipout(noise.source("normal", seed=3)), energy, 100)
    sizes = (torch.stack(outputs[1:]) - outputs[0]).abs().squeeze(-1)
    # Two examples share all three input signs, or have all opposite ones, once in eight draws.
    assert (sizes[:, 0] - sizes[:, 1]).abs().gt(1e-9).double().mean() > 0.75


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def padding(*lengths: int) -> Tensor:
    return torch.arange(6) >= torch.tensor(lengths).unsqueeze(1)


CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
ATTENTION = {
    "self": ({}, "qqq", {}),
    "no weights": ({}, "qqq", {"need_weights": False}),
    "batch first": ({"batch_first": True}, "qqq", {"need_weights": False}),
    "every head": ({"batch_first": True}, "qqq", {"average_attn_weights": False}),
    "bool mask": ({}, "qqq", {"attn_mask": CAUSAL}),
    "causal hint": ({}, "qqq", {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "float mask": ({}, "qqq", {"attn_mask": normal(5, 5), "need_weights": False}),
    "mask per head": ({"batch_first": True}, "qkk", {"attn_mask": normal(6, 5, 6)}),
    "cross": ({"batch_first": True}, "qkk", {"key_padding_mask": padding(6, 4, 1)}),
    "three": (
        {"batch_first": True}, "qkv",
        {"key_padding_mask": normal(3, 6), "attn_mask": normal(5, 6), "need_weights": False},
    ),
    "separate": ({"kdim": 3, "vdim": 2, "batch_first": True}, "qab", {}),
    "no bias": ({"bias": False}, "qqq", {}),
    "dropout": ({"dropout": 0.4}, "qqq", {}),
    "fast dropout": ({"dropout": 0.4}, "qqq", {"need_weights": False}),
}  # fmt: skip
INPUTS = {
    "q": normal(3, 5, 4), "k": normal(3, 6, 4), "v": normal(3, 6, 4) * 2,
    "a": normal(3, 6, 3), "b": normal(3, 6, 2),
}  # fmt: skip


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_through_the_seam_is_attention(name, unbatched):
    settings, letters, options = ATTENTION[name]
    if unbatched and ({"key_padding_mask"} & options.keys() or name == "mask per head"):
        pytest.skip("masks of a batch")
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, **settings).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    tensors = {letter: t[0] if unbatched else t for letter, t in INPUTS.items()}
    if not unbatched and not layer.batch_first:
        tensors = {letter: t.transpose(0, 1) for letter, t in tensors.items()}
    inputs, calls = [tensors[letter] for letter in letters], []

    def unchanged(call):
        calls.append(call)
        return call.apply(call.inputs, call.weight, call.bias)

    torch.manual_seed(1)
    expected, expected_weights = layer(*inputs, **options)
    torch.manual_seed(1)
    with Seam({id(p) for p in layer.parameters()}, unchanged):
        out, weights = layer(*inputs, **options)
    assert len(calls) == (2 if letters == "qqq" else 4)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-12)
