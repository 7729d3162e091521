"""`credo.HMC` and `credo.SGLD` against long runs of NumPyro's NUTS, stored as numbers.

``tests/data/nuts_reference.json`` has the data of two problems and, of the network's output at some
inputs, mean, standard deviation and quantiles under the posterior with their Monte Carlo errors;
``make_nuts_reference.py`` beside this file made it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import credo
from credo.metrics import effective_sample_size

D = torch.float64
REFERENCE = Path(__file__).parents[1] / "data" / "nuts_reference.json"


def stored(name: str) -> dict:
    found = json.loads(REFERENCE.read_text())[name]
    return {
        key: np.asarray(value) if isinstance(value, list) else value for key, value in found.items()
    }


def model_of(name: str) -> credo.Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "logistic":
            net = nn.Linear(3, 1).to(D)
            return credo.Model(net, credo.likelihoods.Bernoulli(), credo.priors.Normal(2.0))
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to(D)
    return credo.Model(net, credo.likelihoods.Gaussian(scale=0.5), credo.priors.Normal(1.0))


def outputs(name: str, method, epochs: int) -> np.ndarray:
    """Of every draw at the stored inputs, (chains, draws, inputs)."""
    reference = stored(name)
    x, y = (torch.as_tensor(reference[key], dtype=D) for key in ("x", "y"))
    posterior = credo.fit(
        model_of(name), method, (x, y[:, None]), epochs=epochs, batch_size=len(x), progress=False
    )
    drawn = posterior.predict(torch.as_tensor(reference["probes"], dtype=D)).outputs[..., 0]
    return drawn.unflatten(0, (method.chains, -1)).numpy()


def worst_z(drawn: np.ndarray, name: str) -> float:
    """The largest difference of means, deviations and quantiles, in both runs' standard errors."""
    reference = stored(name)

    def error_of_mean(series: np.ndarray) -> np.ndarray:
        return series.std((0, 1)) / np.sqrt(np.asarray(effective_sample_size(series)))

    mean, sd = drawn.mean((0, 1)), drawn.std((0, 1))
    squares = (drawn - mean) ** 2
    found = [
        (mean - reference["mean"]) / np.hypot(error_of_mean(drawn), reference["mean_error"]),
        (sd - reference["sd"]) / np.hypot(error_of_mean(squares) / (2 * sd), reference["sd_error"]),
    ]
    # The share of our draws below the reference's quantile, which is a mean of zeros and ones.
    for level, at, error in zip(
        reference["levels"], reference["quantiles"], reference["quantile_errors"], strict=True
    ):
        below = (drawn < at).astype(float)
        density = ((drawn < at + 0.1 * sd).mean((0, 1)) - (drawn < at - 0.1 * sd).mean((0, 1))) / (
            0.2 * sd
        )
        found.append((below.mean((0, 1)) - level) / np.hypot(error_of_mean(below), density * error))
    return float(np.abs(np.stack(found)).max())


def test_hmc_draws_numpyros_posterior_of_a_logistic_model() -> None:
    """7 numbers at 12 inputs: 4.5 standard errors of all of them are one in 2,000."""
    drawn = outputs("logistic", credo.HMC(chains=16, warmup=100), 300)
    assert worst_z(drawn, "logistic") < 4.5
    # The same draws are not those of a posterior that is 10 % wider, or off by a quarter deviation.
    centre = drawn.mean((0, 1))
    assert worst_z(centre + 1.1 * (drawn - centre), "logistic") > 4.5
    assert worst_z(drawn + 0.25 * drawn.std((0, 1)), "logistic") > 4.5


def test_sgld_at_a_small_rate_draws_it_too() -> None:
    """No step is refused, so there is a bias: some 6 % in the narrowest direction."""
    method = credo.SGLD(lr=0.5, precondition=False, chains=40, warmup=150, thin=5, spread=0.2)
    drawn, reference = outputs("logistic", method, 1000), stored("logistic")
    assert np.abs((drawn.mean((0, 1)) - reference["mean"]) / reference["sd"]).max() < 0.1
    assert np.abs(drawn.std((0, 1)) / reference["sd"] - 1).max() < 0.1


@pytest.mark.slow
def test_hmc_draws_numpyros_posterior_of_a_network() -> None:
    """8 chains of 40 draws of a 2-8-1 network; one in 2,000 as above."""
    drawn = outputs("network", credo.HMC(chains=8, warmup=70), 110)
    assert worst_z(drawn, "network") < 4.5
