"""What the samplers keep, report, refuse and warn of."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.sampling import chains
from credo.sampling.chains import Target, Trace
from credo.sampling.hamiltonian import DualAveraging, Point, first_step
from credo.sampling.nuts import no_u_turn

D = torch.float64


def problem(n: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=D)
    return x, (x[:, 0] > 0).long()


def model(seed: int = 0, **more) -> credo.Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(D)
    return credo.Model(net, credo.likelihoods.Categorical(), **more)


def fit(method, epochs=12, train=None, on=None, **more) -> credo.Posterior:
    data = problem() if train is None else train
    return credo.fit(on or model(), method, data, epochs=epochs, progress=False, **more)


HMC = {"leapfrog": 3, "warmup": 4, "chains": 3}


# --- the potential --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [40, 7])
def test_the_potential_is_that_of_the_tempered_posterior(batch) -> None:
    """Value and gradient by autograd of the written formula, for all chains at once and in turn."""
    on, (x, y) = model(random="2.*"), problem()
    target = Target.of(on, 40, 0.3, "HMC")
    weights = torch.randn(3, on.random.size, dtype=D, generator=torch.Generator().manual_seed(1))
    points = []
    for together in (True, False):
        target.together = together
        points.append(target.at(weights, (x[:batch], y[:batch])))
    first, head = on.net[0], on.net[2]
    for chain, w in enumerate(weights):
        leaf = w.clone().requires_grad_()
        hidden = torch.tanh(first(x[:batch])).detach()
        logits = hidden @ leaf[:8].view(2, 4).T + leaf[8:]
        nll = nn.functional.cross_entropy(logits, y[:batch])
        energy = 40 / 0.3 * nll - on.prior_over_weights().log_prob(leaf)
        (gradient,) = torch.autograd.grad(energy, leaf)
        for point in points:
            torch.testing.assert_close(point.nll[chain], nll.detach())
            torch.testing.assert_close(point.energy[chain], energy.detach())
            torch.testing.assert_close(point.gradient[chain], gradient)
    assert all(p.grad is None for p in (*first.parameters(), *head.parameters()))


def test_large_batches_are_taken_in_pieces(monkeypatch) -> None:
    on, data = model(), problem()
    target = Target.of(on, 40, 1.0, "HMC")
    weights = torch.randn(2, on.random.size, dtype=D, generator=torch.Generator().manual_seed(1))
    whole = target.at(weights, data)
    monkeypatch.setattr(chains, "LARGEST_PASS", 7)
    pieces = target.at(weights, data)
    torch.testing.assert_close(pieces.energy, whole.energy)
    torch.testing.assert_close(pieces.gradient, whole.gradient)


def test_networks_that_vmap_can_not_run_go_in_turn() -> None:
    class Hesitant(nn.Linear):
        def forward(self, x):
            outputs = super().forward(x)
            return outputs if outputs.detach().sum().item() > 1e9 else 2 * outputs

    on = credo.Model(Hesitant(3, 2).to(D), credo.likelihoods.Categorical())
    target = Target.of(on, 40, 1.0, "HMC")
    target.at(torch.zeros(2, on.random.size, dtype=D), problem())
    assert target.together is False
    on = model()
    target = Target.of(on, 40, 1.0, "HMC")
    target.at(torch.zeros(2, on.random.size, dtype=D), problem())
    assert target.together is True


def test_the_network_is_a_function_while_it_is_sampled() -> None:
    """No dropout, no batch statistics; both are as they were afterwards."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).to(D)
    before = {name: b.clone() for name, b in net.named_buffers()}
    on = credo.Model(net, credo.likelihoods.Categorical())
    target = Target.of(on, 40, 1.0, "HMC")
    weights = torch.randn(1, on.random.size, dtype=D)
    with target.evaluating():
        assert not net.training
        assert torch.equal(target.at(weights, problem()).nll, target.at(weights, problem()).nll)
    assert net.training
    fit(credo.SGLD(warmup=1, thin=1, chains=2), epochs=3, on=on)
    assert all(torch.equal(before[name], b) for name, b in net.named_buffers())


# --- adaptation -----------------------------------------------------------------------------------


def test_dual_averaging_finds_the_step_that_is_accepted_as_often_as_wanted() -> None:
    """Acceptance e^{−s}: the target 0.8 is at s = −ln 0.8; a_t are exact, so it converges."""
    steps = DualAveraging.starting_at(torch.tensor([1e-3, 10.0], dtype=D))
    for _ in range(2000):
        steps.observe((-steps.log_step.exp()).exp(), 0.8)
    expected = torch.full((2,), -math.log(0.8), dtype=D)
    torch.testing.assert_close(steps.mean.exp(), expected, rtol=0.02, atol=0)


def test_the_first_step_is_as_long_as_the_target_is_wide() -> None:
    def valley(w):
        scales = torch.tensor([[1e-4], [1.0], [1e4]], dtype=D)
        z = w / scales
        return Point(w, z[:, 0], 0.5 * z.square().sum(1), z / scales)

    ones = torch.ones(3, 1, dtype=D)
    scale = torch.tensor([1e-4, 1.0, 1e4], dtype=D)
    found = first_step(valley, valley(scale[:, None] * ones), ones, ones) / scale
    assert ((found > 0.5) & (found < 4)).all()


def test_masses_follow_the_variances_of_the_weights() -> None:
    """Two weights whose posterior scales differ a hundredfold."""
    x = torch.eye(2, dtype=D).repeat(20, 1) * torch.tensor([10.0, 0.1], dtype=D)
    net = nn.Linear(2, 1, bias=False).to(D)
    nn.init.zeros_(net.weight)
    on = credo.Model(net, credo.likelihoods.Gaussian(scale=1.0), credo.priors.Normal(100.0))
    method = credo.HMC(chains=8, leapfrog=8, warmup=160, spread=0.01)
    state = method.init(on, 40, torch.Generator().manual_seed(0))
    for _ in range(160):
        state, _ = method.update(state, (x, torch.zeros(40, 1, dtype=D)))
    exact = 1 / (20 * torch.tensor([100.0, 0.01], dtype=D) + 1e-4)
    # 8 chains of 40 dependent draws each; the start is 2·10⁷ and 2,000 off.
    assert (state.inverse_mass / exact).log().abs().max() < math.log(2)


def test_trajectories_that_diverge_or_may_not_grow_are_counted() -> None:
    def spring(w):
        return Point(w, w[:, 0], 0.5 * w.double().square().sum(1), w)

    here, p = torch.tensor([[1.0, 0.0]] * 3, dtype=D), torch.tensor([[0.0, 1.0]] * 3, dtype=D)
    steps = torch.tensor([0.1, 0.1, 300.0], dtype=D)
    coins = torch.Generator().manual_seed(0)
    found = no_u_turn(spring, spring(here), p, torch.ones(3, 2, dtype=D), steps, 3, coins)
    assert found.cut.tolist() == [True, True, False]
    assert found.divergent.tolist() == [False, False, True]
    assert found.gradients.tolist() == [7, 7, 1]
    assert torch.equal(found.point.weights[2], here[2])
    assert float(found.acceptance[2]) == 0.0


def test_a_chain_moves_the_same_whoever_is_beside_it() -> None:
    """Chains drop out of the evaluation one by one; the others must not notice."""

    def bowl(w):
        return Point(w, w[:, 0], 0.25 * w.pow(4).sum(1), w.pow(3))

    g = torch.Generator().manual_seed(1)
    weights, p = torch.randn(2, 5, 3, generator=g, dtype=D)
    steps = torch.tensor([0.02, 0.1, 0.3, 0.5, 0.05], dtype=D)
    one = torch.ones(5, 3, dtype=D)
    every = no_u_turn(bowl, bowl(weights), p, one, steps, 8, torch.Generator().manual_seed(2))
    assert len(set(every.gradients.tolist())) > 2
    swapped = steps.clone()
    swapped[1:] = steps[1:].flip(0)
    again = no_u_turn(bowl, bowl(weights), p, one, swapped, 8, torch.Generator().manual_seed(2))
    assert torch.equal(every.point.weights[0], again.point.weights[0])


def test_recorded_potentials_are_the_networks_own() -> None:
    """For every number of chains; float64 rounding."""
    on, data = model(), problem()
    plain, recorded = (Target.of(on, 40, 1.0, "HMC", record) for record in (False, True))
    weights = torch.randn(5, on.random.size, dtype=D, generator=torch.Generator().manual_seed(1))
    with plain.evaluating():
        for chosen in (weights, weights[:3], weights[4:], weights):
            here, there = plain.at(chosen, data), recorded.at(chosen, data)
            torch.testing.assert_close(here.energy, there.energy)
            torch.testing.assert_close(here.gradient, there.gradient)
    assert recorded.recorder is not None
    assert not recorded.recorder.refused
    assert len(recorded.recorder.recordings) == 3


# --- what is kept ---------------------------------------------------------------------------------


def test_a_full_trace_drops_every_second_draw() -> None:
    trace = Trace(keep=4, stride=2)
    for step in range(21):
        trace.offer(torch.full((2, 1), float(step)), torch.tensor([step, step]))
        assert len(trace) <= 4
    assert [float(d[0, 0]) for d in trace.draws] == [0, 8, 16]
    assert [int(n[0]) for n in trace.nll] == [0, 8, 16]


def test_the_bag_holds_the_chains_one_after_the_other() -> None:
    posterior = fit(credo.HMC(**HMC, keep=100), epochs=7)
    assert posterior.q.samples.shape == (9, 26)
    assert posterior.chains.nll.shape == (3, 3)
    x, y = problem()
    predictive = posterior.predict(x, samples=9)
    nll = -torch.distributions.Categorical(logits=predictive.outputs).log_prob(y).mean(1)
    torch.testing.assert_close(nll, posterior.chains.nll.flatten())


@pytest.mark.filterwarnings("ignore:the chains disagree")
def test_sgld_draws_weigh_as_much_as_their_steps() -> None:
    method = credo.SGLD(warmup=2, thin=1, chains=2)
    assert fit(method, epochs=9).q.weights is None
    q = fit(method, epochs=9, schedule="linear").q
    expected = torch.tensor([1e-3 * (1 - e / 9) for e in range(2, 9)], dtype=D).repeat(2)
    torch.testing.assert_close(q.weights, expected)


@pytest.mark.filterwarnings("ignore:the chains disagree")
def test_reports_compare_nll_weights_and_predictions() -> None:
    for method in (credo.HMC(**HMC), credo.SGLD(warmup=2, thin=1, chains=2)):
        report = fit(method).chains
        assert set(report.r_hat) == {
            "nll", "weights_max", "weights_median", "predictions_max", "predictions_median"
        }  # fmt: skip
        assert set(report.ess) == {
            "nll", "weights_min", "weights_median", "predictions_min", "predictions_median"
        }  # fmt: skip
        assert report.r_hat["weights_max"] >= report.r_hat["weights_median"]
        assert report.ess["weights_min"] <= report.ess["weights_median"]


def test_the_preconditioner_rests_after_warm_up() -> None:
    method = credo.SGLD(warmup=3, chains=2)
    on = model()
    state = method.init(on, 40, torch.Generator().manual_seed(0))
    seen = []
    for _ in range(6):
        state, _ = method.update(state, problem())
        seen.append(state.squares.clone())
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[5])


# --- warnings and refusals ------------------------------------------------------------------------


def test_hmc_gets_all_data_whatever_the_batch_size() -> None:
    small = fit(credo.HMC(**HMC), epochs=6, batch_size=8)
    assert small.history[-1]["step"] == 6
    assert torch.equal(small.mean, fit(credo.HMC(**HMC), epochs=6, batch_size=64).mean)
    pairs = torch.utils.data.Subset(TensorDataset(*problem()), range(40))
    assert torch.equal(small.mean, fit(credo.HMC(**HMC), epochs=6, train=pairs).mean)
    loader = DataLoader(TensorDataset(*problem()), batch_size=8)
    with pytest.raises(DataError, match=r"a batch of 8 of 40 examples.*batch_size=40"):
        fit(credo.HMC(**HMC), train=loader)


def test_chains_that_disagree_and_runs_without_draws_are_told() -> None:
    with pytest.warns(UserWarning, match="R-hat of the training NLL is"):
        fit(credo.SGLD(lr=1e-9, warmup=1, thin=1, spread=3.0), epochs=12)
    with pytest.warns(UserWarning, match=r"all of training was warm-up \(warmup=20"):
        posterior = fit(credo.HMC(leapfrog=1, warmup=20), epochs=2)
    assert len(posterior.q) == 4
    assert posterior.chains is None


def test_diverging_trajectories_are_told() -> None:
    """Without warm-up the first step stays; steps 3,000 times as long leave the level set."""
    method = credo.HMC(leapfrog=3, warmup=0, chains=2)
    state = method.init(model(), 40, torch.Generator().manual_seed(0))
    state, _ = method.update(state, problem())
    assert state.divergences == 0
    state.steps.mean += 8.0
    state, _ = method.update(state, problem())
    assert state.divergences == 2
    with pytest.warns(UserWarning, match="2 of 4 trajectories diverged"):
        method.finish(state, [problem()])


def test_a_nonfinite_potential_stops_the_run() -> None:
    with pytest.raises(NonFiniteError, match="step 0"):
        fit(credo.HMC(**HMC, spread=1e308))


@pytest.mark.parametrize("sampler", [credo.HMC, credo.SGLD])
def test_what_can_not_be_sampled_is_refused(sampler) -> None:
    with pytest.raises(UnsupportedError, match="a temperature that changes"):
        fit(sampler(temperature=lambda epoch: 1.0))
    with pytest.raises(DataError, match="temperature of"):
        fit(sampler(temperature=0.0))
    x = torch.randn(8, 2)
    noisy = credo.Model(nn.Linear(2, 1), credo.likelihoods.Gaussian(scale=1.0, learned=True))
    with pytest.raises(UnsupportedError, match="learned noise"):
        credo.fit(noisy, sampler(), (x, x[:, :1]), progress=False)
    for bad in ({"chains": 0}, {"thin": 1.5}, {"warmup": -1}, {"spread": math.inf}, {"keep": 0}):
        with pytest.raises(DataError):
            sampler(**bad)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(DataError, match="target_accept"):
        credo.HMC(target_accept=1.0)
    with pytest.raises(DataError, match="mass"):
        credo.HMC(mass="heavy")
    with pytest.raises(DataError, match="warmup=0 has none"):
        credo.SGLD(warmup=0)
    with pytest.raises(UnsupportedError, match="schedule"):
        fit(credo.HMC(**HMC), schedule="cosine")


def test_balanced_temperatures_are_resolved() -> None:
    posterior = fit(credo.HMC(**HMC, temperature=credo.Balanced(0.1)), epochs=5)
    assert posterior.history[0]["temperature"] == pytest.approx(0.1 * 40 / 26)


def test_saved_bags_predict_the_same(tmp_path) -> None:
    posterior = fit(credo.HMC(**HMC), epochs=7)
    posterior.save(tmp_path / "p.safetensors")
    again = credo.load(tmp_path / "p.safetensors", model(seed=5).net)
    x, _ = problem()
    assert torch.equal(again.predict(x, 9).outputs, posterior.predict(x, 9).outputs)


def test_records_say_whether_the_chains_have_met() -> None:
    posterior = fit(credo.HMC(warmup=20, chains=2), epochs=70)
    last = posterior.history[-1]
    assert last["r_hat"] == pytest.approx(posterior.chains.r_hat["nll"])
    assert last["ess"] == pytest.approx(posterior.chains.ess["nll"])
    assert last["ess_per_gradient"] == pytest.approx(last["ess"] / last["gradients"])
    assert posterior.chains.gradients == last["gradients"]
    assert posterior.chains.ess_per_gradient["nll"] == pytest.approx(last["ess_per_gradient"])


# --- prediction -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the chains disagree")
def test_a_chain_predicts_with_all_of_its_draws_unless_told(monkeypatch) -> None:
    posterior = fit(credo.HMC(**HMC), epochs=44)
    x, _ = problem()
    assert posterior.points == 120
    everything = posterior.predict(x)
    assert everything.samples == 120
    exact = torch.stack([posterior.predict(x, 120).sample_probs.mean(0)])[0]
    torch.testing.assert_close(everything.probs, exact)
    torch.testing.assert_close(posterior.predict(x, keep_samples=False).probs, exact)
    fewer = posterior.predict(x, samples=30)
    assert fewer.samples == 30
    assert "samples=30 of 120" in repr(fewer)
    assert " of " not in repr(everything).splitlines()[0]
    # 40 examples with 2 outputs of 8 bytes: room for 100 samples
    monkeypatch.setattr(credo.Posterior.default_samples, "__defaults__", (100 * 640,))
    with pytest.warns(UserWarning, match=r"with 100 of the posterior's 120 samples.*keep_samples"):
        assert posterior.predict(x).samples == 100
    assert posterior.predict(x, keep_samples=False).samples == 120
    loader = DataLoader(TensorDataset(x), batch_size=10)
    with pytest.warns(UserWarning, match="with 100 of"):
        assert posterior.predict(loader).samples == 100
    assert posterior.predict(batch for batch in loader).samples == 64


def test_weighted_draws_come_as_often_as_they_weigh() -> None:
    """Systematic resampling: ⌊n·mass⌋ or ⌈n·mass⌉ times, for every seed."""
    from credo.families import Empirical
    from credo.noise import source

    weights = torch.tensor([1.0, 2.5, 0.0, 4.5], dtype=D)
    bag = Empirical(torch.arange(4, dtype=D)[:, None], weights)
    for seed in range(20):
        walked = torch.cat(list(bag.walk(10, source("table", seed), torch.empty(1, dtype=D))))
        counts = torch.bincount(walked.long(), minlength=4)
        expected = 10 * weights / weights.sum()
        assert ((counts - expected).abs() < 1).all()
        assert int(counts.sum()) == 10
