"""What YellowFin's authors prove of it, and robust regions of momentum descent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from credo.errors import DataError
from credo.optim import YellowFin
from credo.optim.yellowfin_tuner import Measurements, best_root_momentum, least_root_momentum
from credo.tools import robust_region

BETA, WINDOW, EPS = 0.999, 20, 1e-6

momenta = st.floats(0.0, 0.99)
curvatures = st.floats(1e-3, 1e3)


def companion_radius(lr: float, momentum: float, curvature: float) -> float:
    matrix = np.array([[1 - lr * curvature + momentum, -momentum], [1.0, 0.0]])
    return float(np.abs(np.linalg.eigvals(matrix)).max())


# --- robust regions -------------------------------------------------------------------------------


@settings(max_examples=100)
@given(momenta, curvatures, st.floats(0.0, 1.0))
def test_inside_the_region_the_radius_is_the_root_of_momentum(
    momentum: float, curvature: float, where: float
) -> None:
    low, high = robust_region(curvature, curvature).rates(momentum)
    lr = low + where * (high - low)
    # At the edges the two eigenvalues meet, where rounding changes them by its own square root.
    assert companion_radius(lr, momentum, curvature) == pytest.approx(
        math.sqrt(momentum), rel=1e-6, abs=1e-6
    )


@settings(deadline=None, max_examples=50)
@given(st.floats(0.01, 0.95), curvatures, st.floats(1e-2, 3.0))
def test_the_radius_is_larger_outside(momentum: float, curvature: float, factor: float) -> None:
    low, high = robust_region(curvature, curvature).rates(momentum)
    for lr in (low / (1 + factor), high * (1 + factor)):
        assert companion_radius(lr, momentum, curvature) > math.sqrt(momentum)


def test_the_radius_inside_and_outside_of_the_region() -> None:
    assert companion_radius(1.0, 0.5, 1.0) == pytest.approx(0.7071, abs=1e-4)
    assert companion_radius(0.05, 0.5, 1.0) == pytest.approx(0.885, abs=1e-3)


@settings(deadline=None, max_examples=50)
@given(curvatures, st.floats(1.0, 1e4))
def test_least_momentum_has_one_rate_and_less_has_none(low: float, ratio: float) -> None:
    region = robust_region(low, low * ratio)
    least, most = region.rates(region.least_momentum)
    assert least == pytest.approx(most, rel=1e-6)
    assert least == pytest.approx((2 / (math.sqrt(low) + math.sqrt(low * ratio))) ** 2, rel=1e-6)
    if region.least_momentum > 1e-3:
        least, most = region.rates(0.9 * region.least_momentum)
        assert least > most


def test_regions_that_make_no_sense_are_refused() -> None:
    with pytest.raises(DataError, match="curvature_min must be a positive"):
        robust_region(0.0, 1.0)
    with pytest.raises(DataError, match="is above"):
        robust_region(2.0, 1.0)
    with pytest.raises(DataError, match="momentum must be a number from 0 to 1, less than 1"):
        robust_region(1.0, 2.0).rates(1.0)


# --- the tuner ------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.floats(-60, 60))
def test_the_cubic_is_solved_as_well_as_a_grid_does(log_p: float) -> None:
    """x²D² + (1 − x)⁴C/h² is px² + (1 − x)⁴/2 up to a factor."""
    p = 10.0**log_p
    x = best_root_momentum(p)
    grid = np.linspace(0, 1, 100_001)
    best = grid[np.argmin(p * grid**2 + (1 - grid) ** 4 / 2)]
    assert abs(x - best) <= 2e-5
    # Both sides are at most 1; the closed form rounds a dozen times, its root is well conditioned.
    assert abs(p * x - (1 - x) ** 3) <= 3e-15


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0.0, 1e6), min_size=1, max_size=40), st.integers(1, 8), st.floats(0, 0.99)
)
def test_the_range_of_curvatures_is_that_of_a_sliding_window(
    norms: list[float], width: int, beta: float
) -> None:
    measured = Measurements()
    for norm in norms:
        measured = measured.after(norm, beta, width, EPS)
    ends = range(1, len(norms) + 1)
    weights = [beta ** (len(norms) - end) for end in ends]
    for extreme, found in zip((min, max), measured.curvatures(beta), strict=True):
        logs = [math.log(extreme(norms[max(0, end - width) : end]) + EPS) for end in ends]
        expected = math.fsum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights)
        assert math.log(found) == pytest.approx(expected, rel=1e-10, abs=1e-10)


def brute_force(norms: list[float], vectors: Tensor) -> tuple[float, float]:
    """α and μ from the definitions: weights βᵗ⁻ⁱ, normalised, over the whole past."""
    steps = len(norms)

    def mean(values: list[float]) -> float:
        weights = [BETA ** (len(values) - 1 - i) for i in range(len(values))]
        return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)

    windows = [norms[max(0, t - WINDOW + 1) : t + 1] for t in range(steps)]
    low = math.exp(mean([math.log(min(window) + EPS) for window in windows]))
    high = math.exp(mean([math.log(max(window) + EPS) for window in windows]))
    weights = torch.tensor([BETA ** (steps - 1 - i) for i in range(steps)], dtype=torch.float64)
    average = (weights[:, None] * vectors).sum(0) / weights.sum()
    variance = max(mean(norms) - float(average @ average), EPS)
    roots = [math.sqrt(norm) for norm in norms]
    distance = mean([mean(roots[: t + 1]) / (mean(norms[: t + 1]) + EPS) for t in range(steps)])
    p = ((distance + EPS) * low) ** 2 / (2 * variance)
    grid = np.linspace(0, 1, 400_001)
    best = float(grid[np.argmin(p * grid**2 + (1 - grid) ** 4 / 2)])
    root = max(best, (math.sqrt(high / low) - 1) / (math.sqrt(high / low) + 1))
    return (1 - root) ** 2 / low, root**2


@pytest.mark.parametrize("noise", [0.0, 0.05, 3.0])
def test_measurements_are_their_definitions(noise: float) -> None:
    """Little noise makes the cubic decide, much the range of curvatures."""
    generator = torch.Generator().manual_seed(1)
    vectors = 1.0 + noise * torch.randn(40, 30, generator=generator, dtype=torch.float64)
    parameter = nn.Parameter(torch.zeros(30, dtype=torch.float64))
    opt = YellowFin([parameter], clip=False)
    for gradient in vectors:
        parameter.grad = gradient.clone()
        opt.step()
    expected = brute_force([float(v @ v) for v in vectors], vectors)
    lr, momentum = opt.tuned()[0]
    assert momentum == pytest.approx(expected[1], abs=2e-5)  # the grid's spacing, twice
    assert lr == pytest.approx(expected[0] * 40 / 200, rel=1e-4, abs=1e-4)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(1e-4, 1e4), min_size=2, max_size=60), st.floats(0.0, 1.0))
def test_what_is_tuned_is_robust_for_all_that_was_measured(
    norms: list[float], share: float
) -> None:
    measured = Measurements()
    for norm in norms:
        measured = measured.after(norm, BETA, WINDOW, EPS)
    low, high = measured.curvatures(BETA)
    average = share * measured.square * (1 - BETA ** len(norms))
    lr, momentum = measured.tuned(average, BETA, EPS)
    if momentum < 1 - 1e-9:
        region = robust_region(low, max(low, high))
        least, most = region.rates(momentum)
        assert least * (1 - 1e-6) <= lr <= most * (1 + 1e-6)
    assert math.sqrt(momentum) >= least_root_momentum(low, high) * (1 - 1e-12)


# --- the optimizer --------------------------------------------------------------------------------


def descend(opt: YellowFin, w: nn.Parameter, curvature: float, steps: int, seed: int) -> Tensor:
    """On the mean of ½h(w − y)², y ~ N(0, 1/h): a negative log-likelihood, whose E g² is h."""
    generator = torch.Generator().manual_seed(seed)
    path = []
    for _ in range(steps):
        y = torch.randn(w.shape, generator=generator, dtype=w.dtype) / math.sqrt(curvature)
        w.grad = curvature * (w.detach() - y)
        opt.step()
        path.append(w.detach().clone())
    return torch.stack(path)


@pytest.mark.parametrize("curvature", [0.1, 1.0, 30.0])
def test_on_a_quadratic_it_ends_in_the_robust_region_near_the_optimum(curvature: float) -> None:
    """From a start near enough for ‖g‖² to be the curvature's size (see below)."""
    w = nn.Parameter(torch.full((1,), 3.0 / math.sqrt(curvature), dtype=torch.float64))
    opt = YellowFin([w])
    path = descend(opt, w, curvature, 1000, seed=0) * math.sqrt(curvature)
    assert robust_region(curvature, curvature).contains(*opt.tuned()[0])
    # Around 0, as far as momentum descent at a rate of about 1/h strays: a few 1/√h.
    assert path[500:].abs().max() < 5
    assert path[500:].mean().abs() < 0.5


def test_far_from_the_optimum_the_gradient_overstates_the_curvature() -> None:
    """At w = 100/√h the measured curvature is 10⁴h, and the rate falls short of the region."""
    w = nn.Parameter(torch.full((1,), 100.0, dtype=torch.float64))
    opt = YellowFin([w])
    path = descend(opt, w, 1.0, 300, seed=0)
    lr, momentum = opt.tuned()[0]
    assert lr < 1e-3 * robust_region(1.0, 1.0).rates(momentum)[0]
    assert path[-1] > 90


def test_a_schedule_brings_it_to_rest() -> None:
    w = nn.Parameter(torch.full((1,), 3.0, dtype=torch.float64))
    opt = YellowFin([w])
    loud = descend(opt, w, 1.0, 600, seed=0)[300:].std()
    opt.param_groups[0]["lr"] *= 0.01
    quiet = descend(opt, w, 1.0, 600, seed=1)[300:].std()
    # The spread of descent at a small rate goes with the rate's root.
    assert quiet < 0.3 * loud


def test_slow_start_and_first_step() -> None:
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = YellowFin([w], lr=0.3, momentum=0.2)
    rates = []
    for step in range(1, 301):
        w.grad = torch.ones_like(w)
        opt.step()
        rates.append(opt.tuned()[0][0])
        if step == 1:
            assert opt.tuned() == [(0.3, 0.2)]
            assert w.item() == pytest.approx(-0.3)
    # Equal gradients: C is at its floor, h = 1, and the cubic's momentum is the same all the time.
    assert rates[99] == pytest.approx(0.5 * rates[-1], rel=0.02)
    assert rates[199] == pytest.approx(rates[-1], rel=0.02)


def test_an_exploding_gradient_is_held_back() -> None:
    """Otherwise it looks like curvature, and stops everything for thousands of steps."""

    def after_explosion(clip: bool) -> tuple[float, float]:
        w = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        opt = YellowFin([w], clip=clip)
        generator = torch.Generator().manual_seed(0)
        for step in range(60):
            w.grad = torch.randn(4, generator=generator, dtype=torch.float64)
            if step == 50:
                w.grad.fill_(1e4)
            opt.step()
        return opt.tuned()[0][0], max(opt.param_groups[0]["tuner"]["measured"]["window"])

    (held, counted), (free, seen) = after_explosion(True), after_explosion(False)
    assert seen == pytest.approx(4e8)
    assert counted < 1e4  # a hundred times what is usual
    assert held > 3 * free


def test_the_step_is_clipped_to_the_largest_usual_gradient() -> None:
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = YellowFin([w])
    for gradient in [1.0, 1.0, 1.0, 50.0]:
        before = opt.state[w]["momentum_buffer"].clone() if opt.state[w] else torch.zeros(1)
        w.grad = torch.tensor([gradient], dtype=torch.float64)
        opt.step()
    added = opt.state[w]["momentum_buffer"] - opt.tuned()[0][1] * before
    # √h_max of the steps before, at which all squared norms were 1 + eps.
    assert added.item() == pytest.approx(1.0, abs=1e-5)


def test_total_momentum_without_staleness_is_the_momentum_itself() -> None:
    """So that the closed loop changes nothing there."""
    one, two = (nn.Parameter(torch.full((3,), 5.0, dtype=torch.float64)) for _ in range(2))
    descend(YellowFin([one], feedback=0.5), one, 1.0, 60, seed=0)
    descend(YellowFin([two]), two, 1.0, 60, seed=0)
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def total_momentum(feedback: float, staleness: int = 3) -> tuple[float, float]:
    """Median total and target over late steps of descent on gradients that come late."""
    size, generator = 400, torch.Generator().manual_seed(0)
    scale = torch.linspace(0.02, 0.05, size, dtype=torch.float64)
    w = nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64))
    opt = YellowFin([w], feedback=feedback or 1e-12, staleness=staleness, clip=False)
    past, totals, targets = [w.detach().clone()], [], []
    for step in range(600):
        stale = past[max(0, step - staleness)]
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        w.grad = scale * (stale + 0.3 * noise)
        opt.step()
        past.append(w.detach().clone())
        buffers = opt.state[w]["past_buffers"]
        length, count = staleness + 2, step + 1
        if step >= 400:
            then, earlier = buffers[(count + 2) % length], buffers[(count + 1) % length]
            totals.append(float(((then - w.grad) / earlier).median()))
            tuner = opt.param_groups[0]["tuner"]
            measured = Measurements.from_json(tuner["measured"])
            average = opt.state[w]["gradient_average"]
            targets.append(measured.tuned(float(average @ average), BETA, EPS)[1])
    return float(np.median(totals)), float(np.median(targets))


def test_the_closed_loop_brings_total_momentum_to_its_target() -> None:
    open_total, open_target = total_momentum(0.0)
    closed_total, closed_target = total_momentum(0.05)
    assert abs(open_total - open_target) > 0.05
    assert abs(closed_total - closed_target) < 0.5 * abs(open_total - open_target)
