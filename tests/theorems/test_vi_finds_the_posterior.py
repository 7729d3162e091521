"""Where the exact posterior is in the family, VI at temperature 1 finds it; at η the tempered."""

import pytest
import torch
from scipy.linalg import hadamard
from torch import nn

import credo

NOISE, PRIOR, NUM_DATA, FEATURES = 0.5, 0.8, 64, 7


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Orthogonal features, so that the exact posterior has independent weights."""
    x = torch.from_numpy(hadamard(NUM_DATA)[:, 1 : FEATURES + 1]).double()
    truth = torch.linspace(-1, 1, FEATURES, dtype=torch.float64)
    noise = torch.randn(NUM_DATA, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, x @ truth + NOISE * noise, truth


def exact(x: torch.Tensor, y: torch.Tensor, temperature: float) -> tuple[torch.Tensor, float]:
    """Mean and scale of the posterior ∝ likelihood^(1/η)·prior."""
    precision = NUM_DATA / NOISE**2 / temperature + PRIOR**-2
    return x.T @ y / NOISE**2 / temperature / precision, precision**-0.5


def network() -> nn.Module:
    net = nn.Linear(FEATURES, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    return net


def fitted(batch_size: int, estimator: str, temperature: float, **more) -> credo.Posterior:
    x, y, _ = problem()
    model = credo.Model(
        network(), credo.likelihoods.Gaussian(scale=NOISE), credo.priors.Normal(PRIOR)
    )
    method = credo.VI(
        temperature=temperature, estimator=estimator, lr=0.02, scale_lr=0.02, draws="normal", **more
    )
    return credo.fit(
        model, method, (x, y[:, None]), epochs=1200, batch_size=batch_size, progress=False
    )


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_path_gradients_reach_the_exact_posterior(temperature: float) -> None:
    """Full batches: the estimator's variance vanishes at the optimum, so Adam converges to it.

    Tolerance: Adam normalises its steps, so they shrink more slowly than the gradient; after 1,200
    of them some 1e-3 are left.
    """
    x, y, _ = problem()
    mean, scale = exact(x, y, temperature)
    posterior = fitted(NUM_DATA, "path", temperature)
    torch.testing.assert_close(posterior.mean, mean, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(posterior.q.scale, torch.full_like(mean, scale), rtol=5e-3, atol=0)


@pytest.mark.parametrize("noise", ["weight", "local", "flipout"])
def test_closed_form_kl_reaches_it_too(noise: str) -> None:
    """With minibatches the iterates keep jittering by about lr: 10 % of a scale, or less."""
    x, y, _ = problem()
    mean, scale = exact(x, y, 1.0)
    posterior = fitted(32, "reparam", 1.0, noise=noise)
    assert (posterior.mean - mean).abs().max() < 0.06
    assert posterior.q.scale.mean() == pytest.approx(scale, rel=0.1)


def test_learned_noise_is_that_of_the_data() -> None:
    x, y, _ = problem()
    likelihood = credo.likelihoods.Gaussian(scale=2.0, learned=True).double()
    model = credo.Model(network(), likelihood, credo.priors.Normal(PRIOR))
    method = credo.VI(temperature=1.0, lr=0.02, samples=4)
    posterior = credo.fit(
        model, method, (x, y[:, None]), epochs=600, batch_size=NUM_DATA, progress=False
    )
    residual = (y - x @ posterior.mean).square().mean()
    explained = residual + NUM_DATA * posterior.q.variance.sum() / NUM_DATA
    # At the optimum scale² is the expected squared residual, here in closed form (x² = 1).
    learned = posterior.predict(x).aleatoric_std.mean()
    assert float(learned) == pytest.approx(float(explained.sqrt()), rel=0.03)
