"""The study of Book (2020) on training: small runs, verdicts on made-up numbers."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import credo
from credo_papers import (
    adam_landscape,
    alternating,
    balanced_rates,
    bayes_vs_frequentist,
    dual_plateau,
    kl_weights_study,
    optimizer_search,
    path_derivative,
    rate_disagreement,
    rate_landscape,
    rate_ratio,
    sgd_landscape,
    study_setup,
)
from credo_papers.experiment import JUDGEMENTS
from credo_papers.networks import build
from credo_papers.study_figures import curves
from credo_papers.study_setup import SHARED, TINY, SharedRuns, StudySettings, judge, run_store

SMALL = {
    "net": "784-100-10", "num_data": 100, "test_images": 50, "batch_size": 50, "epochs": 2,
    "prediction_samples": 2,
}  # fmt: skip
CASES = {
    bayes_vs_frequentist: {},
    path_derivative: {},
    kl_weights_study: {},
    optimizer_search: {"draws": 3},
    sgd_landscape: {"mnist_epochs": 1, "rates": (0.01, 0.1, 1.0), "momenta": (0.0, 0.9)},
    adam_landscape: {"mnist_epochs": 1, "beta1": (0.0, 0.9), "beta2": (0.1, 0.999)},
    alternating: {"epochs": 4},
    rate_landscape: {"mean_rates": (1e-4, 1e-2, 0.1), "scale_rates": (1e-4, 1e-2)},
    rate_ratio: {},
    dual_plateau: {},
    rate_disagreement: {},
    balanced_rates: {},
}
SCATTER = (-1e-4, 0.0, 1e-4)


@pytest.fixture(autouse=True, scope="module")
def digits_for_all():
    """The embedded 8×8 digits, wherever an experiment asks for MNIST or CIFAR-10."""
    digits = credo.data.load("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credo.data.load", lambda name: digits)
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One small run of each, as it comes back from the disk; they share a folder of runs."""
    root = tmp_path_factory.mktemp("runs")
    found = {}
    for module, changes in CASES.items():
        experiment = module.EXPERIMENT
        settings = replace(experiment.presets["quick"], **(SMALL | changes))
        folder = root / experiment.id / "quick" / "seed-0"
        folder.mkdir(parents=True)
        result = module.run_one(settings, 0, folder)
        found[module] = json.loads(json.dumps(result, allow_nan=False))
        assert not list(folder.iterdir())  # all went into the shared folder
    return found


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.EXPERIMENT.id)
def test_every_run_gives_numbers_and_figures(module, results, tmp_path):
    experiment = module.EXPERIMENT
    for preset in experiment.presets:
        json.dumps(experiment.scale(preset), allow_nan=False)
    verdict = experiment.check([results[module]])
    assert verdict.verdict == "inconclusive"  # one seed decides nothing
    assert verdict.numbers
    assert all(math.isfinite(value) for value in verdict.numbers.values())
    figures = experiment.figures([results[module], results[module]], tmp_path)
    assert figures
    assert all(path.stat().st_size > 10_000 for path in figures)


def test_the_paper_presets_are_those_of_the_thesis():
    for module in CASES:
        paper = module.EXPERIMENT.presets["paper"]
        assert (paper.net, paper.num_data, paper.batch_size) == ("LeNet-5", 60_000, 100)
        assert paper.epochs == (10 if module in (sgd_landscape, adam_landscape) else 50)
    assert sgd_landscape.EXPERIMENT.presets["paper"].mnist_epochs == 1


def test_every_preset_has_what_its_rules_ask_for():
    """A rule about points that the grid doesn't have would stay open for ever."""
    for preset in ("quick", "paper"):
        sgd = sgd_landscape.EXPERIMENT.presets[preset]
        for data in ("mnist", "cifar10"):
            places = {sgd_landscape.place(data, a, m) for a in sgd.rates for m in sgd.momenta}
            assert places == {"below", "band", "beyond"}
        beta2 = adam_landscape.EXPERIMENT.presets[preset].beta2
        assert adam_landscape.DEFAULT in beta2
        assert min(beta2) <= adam_landscape.LOW
        rates = rate_landscape.EXPERIMENT.presets[preset].mean_rates
        assert min(rates) < rate_landscape.STABLE < rate_landscape.UNSTABLE <= max(rates)
        ratios = rate_ratio.EXPERIMENT.presets[preset].ratios
        assert min(ratios) <= rate_ratio.SMALL < rate_ratio.LARGE <= max(ratios)
        turns = alternating.EXPERIMENT.presets[preset]
        assert turns.turn >= 2
        assert turns.epochs >= 2 * turns.turn


# --- runs -----------------------------------------------------------------------------------------


def test_runs_are_kept_and_shared_between_experiments(tmp_path, monkeypatch):
    settings = StudySettings(**SMALL)
    first = SharedRuns(settings, 0, tmp_path / "003-one" / "quick" / "seed-0")
    trial = first.trial("mnist")
    record = first.run(trial)
    second = SharedRuns(settings, 0, tmp_path / "003-two" / "quick" / "seed-0")
    monkeypatch.setattr(
        SharedRuns, "_trained", lambda self, trial: pytest.fail("was trained again")
    )
    assert second.run(trial) == record
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == [SHARED]
    for other in (
        lambda: SharedRuns(settings, 1, tmp_path / "003-two" / "quick" / "seed-1").run(trial),
        lambda: SharedRuns(replace(settings, num_data=90), 0, tmp_path / "003-two" / "q").run(
            trial
        ),
        lambda: second.run(replace(trial, lr=0.5)),
    ):
        with pytest.raises(pytest.fail.Exception, match="trained again"):
            other()


def test_a_folder_of_no_experiment_keeps_its_runs_itself(tmp_path):
    assert run_store(tmp_path / "elsewhere") == tmp_path / "elsewhere" / SHARED


def test_the_rates_and_ratios_that_experiments_have_in_common_are_the_same_trials():
    shared = SharedRuns(StudySettings(), 0, Path("nowhere"))
    by_ratio = {shared.trial("cifar10", lr=1e-3, scale_ratio=r).scale_ratio for r in (0.1, 10, 100)}
    scale_rates = (1e-4, 1e-2, 1e-1)
    assert {float(f"{rate / 1e-3:.6g}") for rate in scale_rates} == by_ratio


def test_a_run_that_diverges_scores_as_guessing(tmp_path):
    shared = SharedRuns(StudySettings(**SMALL), 0, tmp_path)
    record = shared.run(shared.trial("mnist", optimizer="sgd-plain", lr=1e6))
    assert record["diverged"]
    assert record["accuracy"] == 0.1
    assert record["nll"] == pytest.approx(math.log(10))
    assert record["kl"] is None


def test_a_trial_trains_what_it_says(tmp_path):
    shared = SharedRuns(StudySettings(**SMALL), 0, tmp_path)
    vi = study_setup.method(
        shared.trial("mnist", optimizer="sgd", options={"momentum": 0.5}, lr=0.2, scale_ratio=0.1)
    )
    model = credo.Model(build("784-100-10", (1, 8, 8), 0), credo.likelihoods.Categorical())
    optimizer = vi.init(model, 100).optimizer
    assert isinstance(optimizer, torch.optim.SGD)
    assert [g["momentum"] for g in optimizer.param_groups] == [0.5, 0.5]
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.2, 0.02])
    assert study_setup.method(shared.trial("mnist", bayesian=False)).temperature == 0
    frozen = shared.run(shared.trial("mnist", schedule="alternate", turn=1))
    assert [r["scale"] > 0 for r in frozen["rates"]] == [False, True]
    assert [r["mean"] > 0 for r in frozen["rates"]] == [True, False]


def test_the_tiny_start_is_that_of_the_thesis():
    model = credo.Model(build("LeNet-5", (1, 28, 28), 0), credo.likelihoods.Categorical())
    state = credo.VI(init_scale=TINY, link="softplus").init(model, 100)
    widest = state.random.slices()["7.weight"]  # 400 → 120
    assert (widest.stop - widest.start) / state.random.size > 0.75
    assert torch.allclose(state.rho[widest], torch.tensor(-10.0), atol=1e-4)


def test_logistic_outputs_are_normalised_logistic_units():
    f = torch.randn(5, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    units = torch.sigmoid(f)
    likelihood = credo.likelihoods.Categorical()
    found = likelihood.probs(torch.nn.LogSigmoid()(f))
    assert torch.allclose(found, units / units.sum(1, keepdim=True), rtol=1e-12)


# --- the parts ------------------------------------------------------------------------------------


def test_draws_are_possible_settings_and_cover_all_base_values():
    generator = torch.Generator().manual_seed(0)
    for optimizer, bases in optimizer_search.BASES.items():
        drawn = [optimizer_search.draw(optimizer, number, generator) for number in range(300)]
        for name, values in bases.items():
            found = np.array([options[name] for options in drawn], dtype=float)
            if name == "momentum":
                assert found.min() == 0
                assert found.max() <= 0.99
            elif name != "amsgrad":
                assert found.min() >= min(values) / 20
                assert found.max() <= 3 * max(values)
            else:
                assert found.mean() == pytest.approx(0.5)
    # 15 pairs of rate and momentum, of which those without momentum keep 0 exactly.
    once_round = [optimizer_search.draw("sgd", number, generator) for number in range(15)]
    assert sum(options["momentum"] == 0 for options in once_round) == 3


def test_a_run_fell_only_if_it_had_risen():
    assert optimizer_search.fell({"nll_curve": [2.2, 1.9, 2.3]})
    assert not optimizer_search.fell({"nll_curve": [2.3, 2.3, 2.3]})
    assert not optimizer_search.fell({"nll_curve": [2.2, 1.9, 1.8]})
    assert not optimizer_search.fell({"nll_curve": []})


def spectral_radius(lr, momentum, curvature):
    """Of a step of momentum descent on a quadratic."""
    step = [[1 - lr * curvature + momentum, -momentum], [1.0, 0.0]]
    return abs(np.linalg.eigvals(step)).max()


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
def test_the_lower_edge_is_where_descent_becomes_as_fast_as_momentum_allows(momentum):
    for data, curvature in sgd_landscape.CURVATURE.items():
        edge = sgd_landscape.lower_edge(data, momentum)
        at_edge = spectral_radius(1.0001 * edge, momentum, curvature)
        assert at_edge == pytest.approx(math.sqrt(momentum), abs=0.01)
        assert spectral_radius(0.8 * edge, momentum, curvature) > at_edge + 0.01


def test_changes_count_within_turns_only():
    # Means in epochs 0-2 and 6-8, scales in 3-5: the jumps between turns are not theirs.
    curve = [9.0, 8.0, 7.0, 100.0, 102.0, 104.0, 7.0, 4.0, 1.0]
    assert alternating.change(curve, turn=3, of=0) == pytest.approx((-1 - 1 - 3 - 3) / 4)
    assert alternating.change(curve, turn=3, of=1) == pytest.approx(2.0)


def test_curves_of_diverged_runs_are_left_out_of_the_mean():
    result = [{"runs": {"a": {"nll_curve": curve}}} for curve in ([3.0, 1.0], [], [2.0, None])]
    assert curves(result, "a", "nll_curve").mean(0).tolist() == [2.5, 1.0]


def test_verdicts_follow_the_margins():
    assert judge({"a": [0.1, 0.11], "b": [1.0, 1.1]}, {}).verdict == "reproduced"
    assert judge({"a": [0.1, 0.11], "b": [-1.0, -1.1]}, {}).verdict == "not reproduced"
    assert judge({"a": [0.1, 0.11], "b": [-1.0, 1.1]}, {}).verdict == "inconclusive"
    unknown = judge({"a": [0.1, math.nan]}, {"kept": 3.0})
    assert unknown.verdict == "inconclusive"
    assert unknown.numbers == {"kept": 3.0, "a_holds": 0.0}


# --- verdicts on made-up results ------------------------------------------------------------------


def seeds(result, change):
    """Three seeds: copies of a result that ``change(runs, noise)`` was applied to."""
    made = []
    for noise in SCATTER:
        one = copy.deepcopy(result)
        change(one["runs"], noise)
        made.append(one)
    return made


@pytest.mark.parametrize(
    ("small", "large", "expected"),
    [(0.5, 0.4, "reproduced"), (0.4, 0.5, "not reproduced"), (0.5, 0.5, "inconclusive")],
)
def test_rate_ratio_verdicts(results, small, large, expected):
    def change(runs, noise):
        for ratio, record in runs.items():
            record["accuracy"] = (small if float(ratio) <= 0.1 else large) + (
                noise if ratio == "1" else 0.0
            )

    verdict = rate_ratio.check(seeds(results[rate_ratio], change))
    assert verdict.verdict == expected


ACCURACIES = {"0": 0.60, "0.5": 0.57, "2": 0.575, "1": 0.55, "0.97": 0.54, "1.03": 0.54}
KLS = {"0": 9.0, "0.5": 7.0, "2": 7.0, "1": 5.0, "0.97": 5.5, "1.03": 5.5}


def test_kl_weight_verdicts(results):
    def as_in_the_thesis(runs, noise):
        for label, record in runs.items():
            ratio = label.split("_")[1]
            record["accuracy"] = ACCURACIES[ratio] + noise * (ratio == "1")
            record["kl"], record["elbo"] = KLS[ratio] + noise * (ratio == "1"), -KLS[ratio] - 1

    def but_none_is_bad(runs, noise):
        as_in_the_thesis(runs, noise)
        runs["mnist_0"]["accuracy"] = 0.3

    def but_order_matters_perhaps(runs, noise):
        as_in_the_thesis(runs, noise)
        runs["mnist_2"]["accuracy"] = 0.58 + 2 * noise  # a percentage point from that of ½

    result = results[kl_weights_study]
    verdicts = {
        change: kl_weights_study.check(seeds(result, change))
        for change in (as_in_the_thesis, but_none_is_bad, but_order_matters_perhaps)
    }
    assert [v.verdict for v in verdicts.values()] == [
        "reproduced", "not reproduced", "inconclusive"
    ]  # fmt: skip
    assert verdicts[but_none_is_bad].numbers["mnist_none_most_accurate_holds"] == -1
    assert verdicts[but_order_matters_perhaps].numbers["mnist_order_irrelevant_holds"] == 0


@pytest.mark.parametrize("expected", JUDGEMENTS)
def test_disagreement_verdicts(results, expected):
    def change(runs, noise):
        for label, record in runs.items():
            ratio = label.split("_")[3]
            record["elbo"] = {"0.1": -40.0, "1": -35.0, "10": -20.0}[ratio]
            record["accuracy"] = {"0.1": 0.5, "1": 0.45, "10": 0.4}[ratio] + noise
        if expected != "reproduced":  # in 002's setting fast scales are no loss
            runs["adam_exp_small_10"]["accuracy"] = {
                "not reproduced": 0.6 + 2 * noise, "inconclusive": 0.5 + 2 * noise
            }[expected]  # fmt: skip

    verdict = rate_disagreement.check(seeds(results[rate_disagreement], change))
    assert verdict.verdict == expected
    assert verdict.numbers["effect_fast_scales_elbo"] == pytest.approx(20.0)
    if expected == "reproduced":
        assert verdict.numbers["effect_fast_scales_accuracy"] == pytest.approx(-0.1)


def test_optimizer_verdicts(results):
    def made(good, spread_of_good, fallen):
        rows = []
        for noise in SCATTER:
            row = copy.deepcopy(results[optimizer_search])
            for name in optimizer_search.BASES:
                level, width = (good, spread_of_good) if name in optimizer_search.FIRST_ORDER else (
                    0.4, 0.05
                )  # fmt: skip
                for run, offset in zip(row[name], (-1, 0, 1), strict=True):
                    run["accuracy"] = level + width * offset * (1 + noise) + noise
                    run["nll_curve"] = [2.2, 1.8, 1.7]
            if fallen:
                row["radam"][0] |= {"accuracy": 0.1, "nll_curve": [2.0, 1.9, 2.31 + noise]}
                row["radam"][1:] = [r | {"accuracy": 0.4 + w} for r, w in
                                    zip(row["radam"][1:], (-0.05, 0.05), strict=True)]  # fmt: skip
            rows.append(row)
        return optimizer_search.check(rows)

    as_in_the_thesis = made(0.5, 0.01, fallen=True)
    assert as_in_the_thesis.verdict == "reproduced"
    assert as_in_the_thesis.numbers["radam_success"] == pytest.approx(2 / 3)
    assert as_in_the_thesis.numbers["radam_fell"] == pytest.approx(1 / 3)
    assert made(0.5, 0.01, fallen=False).verdict == "not reproduced"
    assert made(0.3, 0.01, fallen=True).numbers["first_order_more_accurate_holds"] == -1
    assert made(0.5, 0.1, fallen=True).numbers["first_order_less_spread_holds"] == -1


def test_a_plateau_that_never_cut_a_rate_decides_nothing(results):
    def change(runs, noise, cut):
        for label, record in runs.items():
            record["accuracy"] = 0.5 + noise
            record["kl_curve"] = [10.0, 8.0 + noise]
            if label.endswith("plateau"):
                slow = 1e-4 if cut else 1e-3
                record["rates"] = [{"mean": 1e-3, "scale": 1e-3}, {"mean": slow, "scale": 1e-3}]
                if label.startswith("cifar10"):
                    record["accuracy"] += 0.05

    result = results[dual_plateau]
    never = dual_plateau.check(seeds(result, lambda runs, noise: change(runs, noise, cut=False)))
    assert never.verdict == "inconclusive"
    assert never.numbers["plateau_better_holds"] == 0
    sometimes = dual_plateau.check(seeds(result, lambda runs, noise: change(runs, noise, cut=True)))
    assert sometimes.verdict == "reproduced"


def test_landscape_verdicts_follow_the_band():
    rates, momenta = [0.003, 0.03, 0.3], [0.3, 0.6, 0.9]

    def grid(data, inside, outside):
        return [
            [inside if sgd_landscape.place(data, a, m) == "band" else outside for a in rates]
            for m in momenta
        ]

    def made(inside, outside):
        return [
            {"rates": rates, "momenta": momenta}
            | {data: grid(data, inside + noise, outside) for data in ("mnist", "cifar10")}
            for noise in SCATTER
        ]

    verdict = sgd_landscape.check(made(0.5, 0.1))
    assert verdict.numbers["mnist_band_beats_beyond"] == pytest.approx(0.4)
    assert verdict.numbers["cifar10_band_beats_below_holds"] == 1
    assert verdict.verdict == "reproduced"
    assert sgd_landscape.check(made(0.1, 0.5)).verdict == "not reproduced"


@pytest.mark.parametrize("expected", JUDGEMENTS)
def test_balanced_rates_verdicts(results, expected):
    balanced = {"reproduced": 1.0, "not reproduced": 1.2, "inconclusive": 1.02}[expected]

    def change(runs, noise):
        for label, record in runs.items():
            fast = label.endswith("_10")
            record["accuracy"] = 0.5
            record["nll"] = 1.0 + noise * fast + (0.3 * fast if label.startswith("one") else 0.0)
        runs["balanced_10"]["nll"] = balanced + noise

    verdict = balanced_rates.check(seeds(results[balanced_rates], change))
    assert verdict.verdict == expected
    assert verdict.numbers["costs_at_one_holds"] == 1


def test_a_balanced_trial_is_another_run_and_the_others_keep_their_names(tmp_path):
    shared = SharedRuns(StudySettings(), 0, tmp_path)
    plain, balanced = shared.trial("mnist"), shared.trial("mnist", tau=0.1)
    assert "tau" not in plain.identity()
    assert balanced.identity()["tau"] == 0.1
    assert study_setup.method(balanced).temperature == credo.Balanced(0.1)
    assert study_setup.method(plain).temperature == 1.0
