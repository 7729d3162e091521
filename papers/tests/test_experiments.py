import io
import json
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import interpolate

from credo.data import digits
from credo.errors import CredoError, DataError, FileFormatError
from credo_papers import (
    EXPERIMENTS,
    and_perceptron,
    claims,
    commands,
    find,
    initial_rho,
    ledger,
    list_experiments,
    noise_confidence,
    run,
)
from credo_papers.experiment import JUDGEMENTS, VERDICTS, sign_of_mean, summarise
from credo_papers.networks import build

ROW_KEYS = {
    "id", "paper", "claim", "verdict", "numbers", "seeds", "scale", "theorem", "ours", "command"
}  # fmt: skip
AUTHORS = {
    "000": "Huix et al. (2022)",
    "001": "Wolinski, Charpiat & Ollivier (2020)",
    "002": "Unlu & Aitchison (2021)",
    "003": "Book (2020)",
    "004": "Khan",
}
DATA_SETS = {
    "mnist", "fashion-mnist", "cifar10", "svhn", "notmnist", "camvid", "cifar10h", "uci",
    "pima",
}  # fmt: skip


def printed(function, *arguments, **options):
    out = io.StringIO()
    with redirect_stdout(out):
        function(*arguments, **options)
    return out.getvalue()


@pytest.fixture
def digits_for_mnist(monkeypatch):
    """The embedded 8×8 digits, magnified to 28×28, wherever an experiment asks for files."""

    def load(name):
        images = digits()
        train, test = (
            (interpolate(x[:300], size=28), y[:300]) for x, y in (images.train, images.test)
        )
        return replace(images, train=train, test=test)

    monkeypatch.setattr("credo.data.load", load)


# --- the frame ------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS.keys())
def test_every_experiment_states_its_claim_and_scale(experiment):
    assert experiment.paper in ("000", "001", "002", "003", "004")
    assert experiment.id.startswith(f"{experiment.paper}-")
    assert len(experiment.claim) > 40
    assert experiment.claim.startswith("Ours" if experiment.ours else AUTHORS[experiment.paper])
    assert set(experiment.needs) <= DATA_SETS | {"gymnasium"}
    assert 0 < experiment.minutes <= 60
    assert list(experiment.presets) == ["quick", "paper"]
    for preset in experiment.presets:
        scale = experiment.scale(preset)
        assert {"preset", "net", "num_data", "epochs"} <= scale.keys()
        json.dumps(scale, allow_nan=False)


def test_unknown_name_gets_the_nearest_one():
    with pytest.raises(DataError, match="Did you mean 003-and-perceptron"):
        find("003-and-perceptrons")
    with pytest.raises(DataError, match="003-initial-rho"):
        find("xyzzy")


def test_sign_of_mean_needs_evidence_in_standard_errors():
    # One-sided 95 % of Student's t with 2 degrees of freedom: 2.92 standard errors.
    assert sign_of_mean([1.0, 2.0, 3.0]) == 1  # 2 / 0.577 = 3.46
    assert sign_of_mean([0.5, 1.5, 2.5]) == 0  # 1.5 / 0.577 = 2.6
    assert sign_of_mean([-1.0, -2.0, -3.0]) == -1
    assert sign_of_mean([5.0]) == 0
    assert sign_of_mean([2.0, 2.0]) == 1  # no scatter at all


def test_summary_has_an_error_only_with_several_seeds():
    assert summarise([{"a": 1, "list": [1], "flag": True}]) == {"a": 1.0}
    assert summarise([{"a": 1.0}, {"a": 3.0}], ["a"]) == {"a": 2.0, "a_se": 1.0}


# --- commands -------------------------------------------------------------------------------------


def test_run_writes_verdict_figures_and_seed_folders(tmp_path):
    text = printed(run, "003-beta-bernoulli", "quick", 2, tmp_path, 1)
    place = tmp_path / "003-beta-bernoulli" / "quick"
    entry = json.loads((place / "verdict.json").read_text())
    assert set(entry) == ROW_KEYS
    assert entry["verdict"] == "reproduced"
    assert entry["seeds"] == [0, 1]
    assert entry["scale"]["preset"] == "quick"
    assert entry["command"] == "credo run 003-beta-bernoulli --preset quick --seeds 2"
    assert (place / "beta-bernoulli.png").stat().st_size > 1000
    assert len(list(place.glob("seed-*/result.json"))) == 2
    assert "preset quick" in text
    assert "±" in text


def test_a_finished_run_is_not_repeated(tmp_path, monkeypatch):
    printed(run, "003-beta-bernoulli", "quick", 1, tmp_path, 1)

    def never(trial, folder):
        raise AssertionError("ran again")

    monkeypatch.setattr(commands, "_run_trial", never)
    assert run("003-beta-bernoulli", "quick", 1, tmp_path, 1)["verdict"] == "reproduced"


def test_a_failed_seed_is_left_out_and_all_failing_is_an_error(tmp_path, monkeypatch):
    original = commands._run_trial

    def second_fails(trial, folder):
        if trial["seed"] == 1:
            raise DataError("no such data")
        return original(trial, folder)

    monkeypatch.setattr(commands, "_run_trial", second_fails)
    out = io.StringIO()
    with redirect_stdout(out):
        entry = run("003-beta-bernoulli", "quick", 3, tmp_path, 1)
    assert entry["seeds"] == [0, 2]
    assert "seed 1 failed" in out.getvalue()
    monkeypatch.setattr(commands, "_run_trial", lambda t, f: second_fails(t | {"seed": 1}, f))
    with pytest.raises(CredoError, match="every seed; the first: DataError: no such data"):
        run("003-and-gradient", "quick", 1, tmp_path, 1)


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(DataError, match="preset='slow' is unknown; choose from quick, paper"):
        run("003-beta-bernoulli", "slow", 1, tmp_path)
    with pytest.raises(DataError, match="seeds=0 must be at least 1"):
        run("003-beta-bernoulli", "quick", 0, tmp_path)


def test_list_names_everything(tmp_path):
    rows = json.loads(printed(list_experiments, json=True))
    assert [r["id"] for r in rows] == list(EXPERIMENTS)
    assert all(r.keys() == ROW_KEYS | {"presets", "needs", "minutes"} for r in rows)
    assert {r["verdict"] for r in rows} <= {*VERDICTS, None}
    assert {r["id"] for r in rows if r["ours"]} == {
        "003-balanced-rates", "003-disagreement", "004-equal-time", "004-squared-gradient-cost",
        "004-one-price", "004-reference-audit",
    }  # fmt: skip
    assert "003-and" in printed(list_experiments)


def test_the_short_list_is_a_line_each_with_needs_and_duration(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(list_experiments, short=True).splitlines()
    assert len(lines) == len(EXPERIMENTS) + 2  # the heading, and what "quick" means
    swap = next(line for line in lines if line.startswith("004-optimizer-swap"))
    assert swap.split() == [
        "004-optimizer-swap", "inconclusive", "mnist", "notmnist", "cifar10", "svhn", "5", "min"
    ]  # fmt: skip


def test_an_experiment_without_a_verdict_is_listed_as_not_run(monkeypatch):
    monkeypatch.setattr(ledger, "committed", dict)
    assert "not run yet" in printed(list_experiments)


def test_claims_prefer_local_runs_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    before = {r["id"]: r for r in json.loads(printed(claims, json=True, folder=tmp_path))}
    assert before.keys() == ledger.committed().keys()
    assert all("run" not in r["scale"] for r in before.values())
    for preset in ("paper", "quick"):
        printed(run, "003-beta-bernoulli", preset, 1, tmp_path, 1)
    after = {r["id"]: r for r in json.loads(printed(claims, json=True, folder=tmp_path))}
    assert all(set(r) == ROW_KEYS for r in after.values())
    assert after["003-beta-bernoulli"]["scale"]["run"] == "local"
    assert after["003-beta-bernoulli"]["scale"]["preset"] == "paper"
    assert "local run" in printed(claims, folder=tmp_path)


def test_damaged_verdict_is_named(tmp_path):
    path = tmp_path / "003-beta-bernoulli" / "quick" / "verdict.json"
    path.parent.mkdir(parents=True)
    for text in ("{", "[]", '{"verdict": "maybe", "scale": {}}'):
        path.write_text(text)
        with pytest.raises(FileFormatError, match="is not a verdict"):
            ledger.local(tmp_path)


def test_committed_ledger_belongs_to_experiments_as_they_are():
    entries = ledger.committed()
    assert {"003-and-gradient", "003-and-perceptron", "003-beta-bernoulli"} <= entries.keys()
    for id, entry in entries.items():
        experiment = EXPERIMENTS[id]
        assert entry["verdict"] in JUDGEMENTS
        for name in ("claim", "theorem", "ours"):
            assert entry[name] == getattr(experiment, name)
        # A preset that changed since makes the verdict one about something else: run it again.
        expected = json.loads(json.dumps(experiment.scale(entry["scale"]["preset"])))
        assert entry["scale"] == expected


def test_numbers_that_are_not_finite_become_null():
    experiment = find("003-beta-bernoulli")
    verdict = commands.ledger.Verdict("inconclusive", {"a": float("nan"), "b": 1.0})
    assert ledger.row(experiment, "quick", [0], verdict)["numbers"] == {"a": None, "b": 1.0}


# --- the experiments, small -----------------------------------------------------------------------


def test_and_node_learns_and_resumes_to_the_same_numbers(tmp_path):
    settings = and_perceptron.AndSettings(epochs=150, lr=5e-2, samples=4)
    first = and_perceptron.run_one(settings, 0, tmp_path)
    again = and_perceptron.run_one(settings, 0, tmp_path)
    assert first == again
    assert first["elbo"] <= first["best_elbo"] + 1e-6 < first["log_evidence"]
    assert and_perceptron.check([first]).verdict == "reproduced"
    wrong = first | {"p_11": 0.4}
    assert and_perceptron.check([wrong]).verdict == "not reproduced"
    assert and_perceptron.check([first, wrong]).verdict == "inconclusive"
    assert all(p.exists() for p in and_perceptron.figures([first], tmp_path))


def test_noise_confidence_runs_and_judges(tmp_path, digits_for_mnist):
    settings = noise_confidence.NoiseSettings(
        num_data=200, epochs=1, temperature=0.1, noise_images=50, net="784-100-10"
    )
    result = noise_confidence.run_one(settings, 0, tmp_path)
    assert 0.1 <= result["bayesian_noise_confidence"] <= 1
    assert sum(result["frequentist_noise_histogram"]) == 50
    assert (tmp_path / "bayesian" / "metrics.jsonl").exists()
    assert all(p.exists() for p in noise_confidence.figures([result], tmp_path))

    def results(frequentist, bayesian, accuracy=0.985):
        scores = {"frequentist_accuracy": accuracy, "bayesian_accuracy": accuracy}
        return [
            result | scores | {"frequentist_noise_confidence": f, "bayesian_noise_confidence": b}
            for f, b in zip(frequentist, bayesian, strict=True)
        ]

    high, low = [0.9, 0.91, 0.92], [0.5, 0.55, 0.52]
    assert noise_confidence.check(results(high, low)).verdict == "reproduced"
    assert noise_confidence.check(results(low, high)).verdict == "not reproduced"
    assert noise_confidence.check(results(high, low, 0.97)).verdict == "inconclusive"
    assert noise_confidence.check(results(high[:1], low[:1])).verdict == "inconclusive"


def test_initial_rho_sets_the_same_initial_scale_everywhere(tmp_path, digits_for_mnist):
    settings = initial_rho.RhoSettings(
        net="784-100-10", data="mnist", num_data=200, epochs=1, rhos=(-6.0, -2.0), lr=1e-5
    )
    with pytest.warns(UserWarning, match="the KL never moved"):
        result = initial_rho.run_one(settings, 0, tmp_path)
    for rho in settings.rhos:
        record = json.loads((tmp_path / f"rho{rho:g}" / "metrics.jsonl").read_text())
        softplus = torch.nn.functional.softplus(torch.tensor(rho)).item()
        # Two of Adam's steps, each at most about 1e-5 in ρ, change σ by 2e-5 of itself.
        assert record["mean_scale"] == pytest.approx(softplus, rel=1e-4)
    assert result["mutual_information_rho-2"] > result["mutual_information_rho-6"]
    assert all(p.exists() for p in initial_rho.figures([result], tmp_path))


def test_initial_rho_judges_both_ends_of_the_trade_off():
    def result(small, large, uncertainty, jitter):
        values = {"rhos": [-6.0, -2.0]}
        for rho, accuracy, mi in ((-6, small, 0.01), (-2, large, 0.01 + uncertainty)):
            numbers = (accuracy + jitter, 0.3, 1e4, mi + 1e-4 * jitter)
            names = (f"{name}_rho{rho}" for name in initial_rho.MEASURES)
            values |= dict(zip(names, numbers, strict=True))
        return values

    def verdict(*arguments):
        return initial_rho.check([result(*arguments, j) for j in (0.0, 0.01, 0.02)]).verdict

    assert verdict(0.9, 0.6, 0.2) == "reproduced"
    assert verdict(0.6, 0.9, 0.2) == "not reproduced"
    assert verdict(0.9, 0.6, -0.005) == "not reproduced"


def test_networks_depend_on_the_seed_alone():
    torch.manual_seed(3)
    expected_next = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (build("LeNet-5", (3, 32, 32), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected_next)
    weights = [[p.detach() for p in net.parameters()] for net in (first, again, other)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not torch.equal(weights[0][0], weights[2][0])
    assert first(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
