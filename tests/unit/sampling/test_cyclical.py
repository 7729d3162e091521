"""Cyclical rates: Zhang's formula, noise in the last part of a cycle, draws of every cycle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import credo
from credo.errors import DataError
from credo.sampling.cyclical import draws_here, is_sampling, place
from credo.schedules import cosine

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0).long()
BOTH = pytest.mark.parametrize("kind", [credo.SGLD, credo.SGHMC])


def model() -> credo.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return credo.Model(net, credo.likelihoods.Categorical())


def walked(method: credo.SGLD | credo.SGHMC, epochs: int, seed: int) -> list[torch.Tensor]:
    """The chains' positions after every step, of one minibatch each."""
    state = method.init(model(), 40, torch.Generator().manual_seed(seed))
    state.clock.epochs = epochs
    found = []
    for _ in range(epochs):
        state, _ = method.update(state, (X, Y))
        found.append(state.positions.clone())
    return found


@pytest.mark.parametrize(("steps", "cycles"), [(12, 3), (100, 4), (7, 7), (9, 1)])
def test_rates_are_the_papers_where_cycles_divide_the_run(steps: int, cycles: int) -> None:
    length = math.ceil(steps / cycles)
    for t in range(1, steps + 1):
        paper = 0.5 * (math.cos(math.pi * ((t - 1) % length) / length) + 1)
        assert cosine(place(t - 1, steps, cycles).fraction) == pytest.approx(paper, abs=1e-15)


@pytest.mark.parametrize(("steps", "cycles"), [(10, 3), (11, 4), (5, 4), (101, 7)])
def test_cycles_that_do_not_divide_it_are_as_long_as_can_be(steps: int, cycles: int) -> None:
    found = [place(step, steps, cycles) for step in range(steps)]
    lengths = [sum(at.cycle == c for at in found) for c in range(cycles)]
    assert max(lengths) - min(lengths) <= 1
    assert sum(lengths) == steps
    assert all(at.steps == lengths[at.cycle] for at in found)
    assert [at.step for at in found] == [k for length in lengths for k in range(length)]


@pytest.mark.parametrize("explore", [0.0, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("thin", [1, 4, 1000])
@pytest.mark.parametrize(("steps", "cycles"), [(10, 3), (5, 4), (400, 4), (101, 7)])
def test_every_cycle_is_represented_and_none_more_than_asked(
    steps: int, cycles: int, explore: float, thin: int
) -> None:
    found = [place(step, steps, cycles) for step in range(steps)]
    kept = [at for at in found if draws_here(at, explore, most=3, thin=thin)]
    counts = [sum(at.cycle == c for at in kept) for c in range(cycles)]
    assert min(counts) >= 1
    assert max(counts) <= 3
    assert all(is_sampling(at, explore) for at in kept)
    assert all(draws_here(at, explore, 3, thin) for at in found if at.step == at.steps - 1)


@BOTH
def test_noise_comes_in_the_last_part_of_a_cycle_only(kind: type) -> None:
    """Runs of other noise are the same until then; and from then on they are not."""
    method = kind(lr=0.01, chains=2, spread=0.0, thin=1, cycles=2, explore=0.6)
    one, other = (walked(method, 20, seed) for seed in (0, 1))
    same = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert same == [step < 6 for step in range(20)]


def test_descent_in_the_first_part_is_gradient_descent_on_maps_loss() -> None:
    method = credo.SGLD(lr=0.3, chains=1, spread=0.0, precondition=False, cycles=1, explore=0.9)
    found = walked(method, 10, seed=0)[8][0]
    on = model()
    step = credo.MAP(lr=0.3, optimizer="sgd-plain")
    state = step.init(on, 40)
    for t in range(9):
        state.optimizer.param_groups[0]["lr"] = 0.3 * 0.5 * (math.cos(math.pi * t / 10) + 1)
        state, _ = step.update(state, (X, Y))
    torch.testing.assert_close(found, state.flat.vector.detach(), rtol=0, atol=1e-13)


@BOTH
@pytest.mark.filterwarnings("ignore:the chains disagree")
def test_fit_keeps_as_many_draws_of_each_cycle(kind: type) -> None:
    method = kind(lr=0.01, chains=2, thin=1, keep=7, cycles=3, explore=0.5)
    posterior = credo.fit(model(), method, (X, Y), epochs=15, batch_size=20, progress=False)
    assert posterior.q.samples.shape[0] == 2 * 6  # two of each of three cycles, on two chains
    assert posterior.q.weights is None
    assert posterior.history[-1]["kept"] == 6
    sizes = [record["step_size"] for record in posterior.history]
    assert sizes[5] > sizes[3] < sizes[0]


@BOTH
@pytest.mark.filterwarnings("ignore:the chains disagree")
def test_without_cycles_warm_up_is_a_quarter_of_the_run(kind: type) -> None:
    posterior = credo.fit(
        model(), kind(lr=0.01, chains=2, thin=1), (X, Y), epochs=12, batch_size=40, progress=False
    )
    assert posterior.history[-1]["kept"] == 9
    assert posterior.history[2]["kept"] == 0


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(DataError, match="warmup=3 and cycles=2 both say"):
        credo.SGLD(warmup=3, cycles=2)
    with pytest.raises(DataError, match="keep=3 draws can't be of all 4 cycles"):
        credo.SGHMC(keep=3, cycles=4)
    with pytest.raises(DataError, match="explore=0 leaves no time"):
        credo.SGLD(cycles=2, explore=0.0)
    credo.SGLD(cycles=2, explore=0.0, precondition=False)
    with pytest.raises(DataError, match="4 cycles don't fit into 3 steps"):
        credo.fit(model(), credo.SGLD(cycles=4), (X, Y), epochs=3, progress=False)
    for method in (credo.SGLD(), credo.SGHMC(cycles=2)):
        state = method.init(model(), 40)
        state, _ = method.update(state, (X, Y))
        with pytest.raises(DataError, match=r"set state\.clock\.epochs"):
            method.posterior(state)
