"""Early stopping of the scales is told where it is true, and nothing is said where it is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.variational.scales import FEWEST_EPOCHS, ScaleConvergence, scale_convergence

NUM_DATA = 64
BATCH_SIZE = 16
NOISE = 1.0


def fitted(method: Any, epochs: int, **more: Any) -> credo.Posterior:
    """Linear regression on orthogonal features: the posterior's scale is (n/noise² + 1/s²)^-½."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linalg.qr(torch.randn(NUM_DATA, 8, generator=generator).double())[0]
    x *= math.sqrt(NUM_DATA)
    y = x.sum(1, keepdim=True) + NOISE * torch.randn(NUM_DATA, 1, generator=generator)
    net = nn.Linear(8, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    model = credo.Model(net, credo.likelihoods.Gaussian(NOISE), credo.priors.Normal(1.0))
    return credo.fit(model, method, (x, y), epochs, BATCH_SIZE, progress=False, **more)


def vi(scale_lr: float, init_scale: float = 1e-3, **more: Any) -> credo.VI:
    return credo.VI(temperature=1.0, lr=0.01, scale_lr=scale_lr, init_scale=init_scale, **more)


def laplace(scale_lr: float, init_scale: float = 1e-3, **more: Any) -> credo.VariationalLaplace:
    settings = {"temperature": 1.0, "lr": 0.01, **more}
    return credo.VariationalLaplace(scale_lr=scale_lr, init_scale=init_scale, **settings)


EPOCHS = 256
"""Of four steps: just more than `FEWEST_STEPS`."""
REST = math.log((NUM_DATA / NOISE**2 + 1) ** -0.5)
"""ln σ of the exact posterior: 4.8 above the start, 2.1 below the prior."""

both = pytest.mark.parametrize("make", [vi, laplace])


@both
def test_scales_that_could_not_get_far_enough_are_told(make: Any) -> None:
    with pytest.warns(UserWarning, match=r"scales had not settled.*Raise scale_lr") as told:
        posterior = fitted(make(2e-3), EPOCHS)
    assert told[0].filename == __file__
    found = scale_convergence(posterior.history)
    assert found is not None
    assert found.reach == pytest.approx(EPOCHS * 4 * 2e-3)
    assert found.start == pytest.approx(math.log(1e-3))
    assert not found.settled
    assert not found.had_room
    # It is true: ln σ has more than a factor of two to go, and is not where it started.
    assert REST - found.log_scale > math.log(2)
    assert found.log_scale - found.start > 0.1
    assert float(posterior.q.scale.log().mean()) == pytest.approx(found.log_scale)


@both
def test_scales_at_rest_are_not_even_if_they_are_far_from_the_prior(make: Any) -> None:
    posterior = fitted(make(0.05), EPOCHS)
    found = scale_convergence(posterior.history)
    assert found is not None
    assert found.settled
    assert found.had_room
    # Single draws of ε and minibatches keep Adam jittering by some steps of 0.05.
    assert found.log_scale == pytest.approx(REST, abs=0.3)


def test_little_room_is_enough_if_the_start_is_near_the_rest() -> None:
    found = scale_convergence(fitted(vi(1e-3, init_scale=math.exp(REST)), EPOCHS).history)
    assert found is not None
    assert not found.had_room
    assert found.settled


@pytest.mark.parametrize(
    ("method", "epochs"),
    [
        (vi(2e-3), FEWEST_EPOCHS - 1),
        (vi(0.0), 12),
        (laplace(2e-3, scales="fixed_point"), 12),
    ],
    ids=["few epochs", "fixed scales", "fixed point"],
)
def test_what_cannot_be_judged_is_not(method: Any, epochs: int) -> None:
    assert scale_convergence(fitted(method, epochs).history) is None


def test_short_runs_are_judged_but_not_warned_of() -> None:
    found = scale_convergence(fitted(vi(2e-3), FEWEST_EPOCHS).history)
    assert found is not None
    assert not found.settled


def test_scales_with_room_that_go_on_moving_are_for_the_user_to_ask_about() -> None:
    """At temperature 0 they shrink for ever: not for want of a rate."""
    found = scale_convergence(
        fitted(laplace(5e-3, init_scale=0.5, temperature=0.0), EPOCHS).history
    )
    assert found is not None
    assert found.had_room
    assert found.to_come < -math.log(2)
    assert not found.settled


def test_methods_without_trained_scales_have_no_verdict() -> None:
    assert scale_convergence(fitted(credo.MAP(), 10).history) is None
    assert scale_convergence([]) is None


def test_a_rate_that_fades_out_does_not_pass_for_rest() -> None:
    """In the last epochs of a cosine nothing moves, because nothing can."""
    with pytest.warns(UserWarning, match="scales had not settled"):
        posterior = fitted(vi(4e-3), EPOCHS, schedule="cosine")
    late = [record["log_scale"] for record in posterior.history[-10:]]
    assert max(late) - min(late) < 0.02
    found = scale_convergence(posterior.history)
    # The rates of a cosine average half the first.
    assert found is not None
    assert found.reach == pytest.approx(EPOCHS * 4 * 2e-3, rel=1e-2)


def exponential(length: float, depth: float = 3.0) -> ScaleConvergence:
    """Scales that come to rest with the time constant 1, watched for ``length``."""
    history = []
    for epoch in range(1, 401):
        reach = length * epoch / 400
        moved = depth * (1 - math.exp(-reach))
        history.append(
            {"log_scale": moved - depth, "log_scale_moved": moved, "log_scale_reach": reach}
        )
    found = scale_convergence(history)
    assert found is not None
    return found


def test_what_is_to_come_is_the_pace_of_the_last_quarter() -> None:
    """4·3·(e^(−¾r) − e^(−r)) from r = 3 on: above ln 2 until just before r = 3."""
    for length in (3.0, 4.0, 8.0):
        expected = 12 * (math.exp(-0.75 * length) - math.exp(-length))
        assert exponential(length).to_come == pytest.approx(expected, rel=1e-6)
    assert not exponential(2.9).settled
    assert exponential(3.0).settled
    # With less behind than ahead, the way to the prior is what is to be gone.
    expected = (3 / 0.25) * 3 * (math.exp(-0.75) - math.exp(-1))
    assert exponential(1.0).to_come == pytest.approx(expected, rel=1e-6)


@both
def test_a_resumed_run_judges_the_whole_of_it(make: Any, tmp_path: Any) -> None:
    epochs = 12
    whole = fitted(make(2e-3), epochs)
    fitted(make(2e-3), 5, folder=tmp_path)
    resumed = fitted(make(2e-3), epochs, folder=tmp_path)
    assert scale_convergence(resumed.history) == scale_convergence(whole.history)
