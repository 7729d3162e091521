"""A comparison: one row for each method and seed, paired, resumable, and honest about failures."""

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.errors import CheckpointError, DataError, FileFormatError, UnsupportedError
from credo.map import MAPState
from credo.method import Method
from credo.tools import compare_run, load_comparison


def blobs(count, seed=0):
    """Three clouds of points in the plane, and their numbers."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    centres = torch.tensor([[0.0, 1.5], [1.3, -0.75], [-1.3, -0.75]])
    return centres[y] + 0.7 * torch.randn(count, 2, generator=generator), y


TRAIN, TEST = blobs(60), blobs(45, 1)
METHODS = {"MAP": credo.MAP(lr=0.05), "VI": credo.VI(lr=0.05)}


def make_model():
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    return credo.Model(net, credo.likelihoods.Categorical())


def compare(methods=METHODS, train=TRAIN, test=TEST, **settings):
    asked = {"seeds": 2, "epochs": 2, "samples": 8, "progress": False, **settings}
    return credo.compare(asked.pop("make_model", make_model), methods, train, test, **asked)


@pytest.fixture(scope="module")
def result():
    """Three methods, three seeds, foreign points and a shift."""
    methods = {**METHODS, "Laplace": credo.Laplace(train=credo.MAP(lr=0.05))}
    return compare(
        methods, seeds=3, epochs=10, ood=TEST[0] + 8, shifts={"noise": lambda x, s: x + 0.3 * s}
    )


@dataclass(frozen=True)
class Failing(Method[MAPState]):
    """Trains as MAP does, and fails with one seed."""

    when: int = -1
    how: str = "error"

    def init(self, model: Any, num_data: int, generator: Any = None) -> MAPState:
        seed = generator.initial_seed()
        if self.when in (-1, seed):
            if self.how == "interrupt":
                raise KeyboardInterrupt
            raise credo.errors.NonFiniteError("the loss is nan at step 3")
        return credo.MAP(lr=0.05).init(model, num_data, generator)

    def update(self, state: Any, batch: Any) -> Any:
        return credo.MAP(lr=0.05).update(state, batch)

    def posterior(self, state: Any) -> Any:
        return credo.MAP(lr=0.05).posterior(state)


# --- the table ------------------------------------------------------------------------------------


def test_one_row_for_each_method_and_seed(result):
    rows = result.table
    assert [(r["method"], r["seed"]) for r in rows] == [
        (method, seed) for method in ("MAP", "VI", "Laplace") for seed in range(3)
    ]
    wanted = {
        "accuracy", "nll", "brier", "ece", "ece_floor", "epistemic", "aleatoric", "ood_auroc",
        "ood_auroc_epistemic", "retention_area", "train_seconds", "train_mib", "predict_seconds",
        "predict_mib",
    }  # fmt: skip
    assert all(wanted <= row.keys() and row["status"] == "finished" for row in rows)
    assert all(row["epistemic"] == 0 for row in rows if row["method"] == "MAP")
    assert all(row["epistemic"] > 0 for row in rows if row["method"] != "MAP")
    assert all(row["accuracy"] > 0.7 for row in rows)


def test_a_row_is_what_fit_and_the_metrics_give(result):
    """The comparison adds nothing of its own: the same model, seed and schedule by hand."""
    torch.manual_seed(1)
    model = make_model()
    posterior = credo.fit(
        model, METHODS["VI"], TRAIN, epochs=10, seed=1, schedule="cosine", progress=False
    )
    probs = posterior.predict(TEST[0], samples=8).probs
    (row,) = (r for r in result.table if (r["method"], r["seed"]) == ("VI", 1))
    assert row["nll"] == pytest.approx(credo.metrics.nll(probs, TEST[1]), rel=1e-6)
    assert row["ece"] == pytest.approx(credo.metrics.ece(probs, TEST[1]), rel=1e-6)


def test_the_summary_has_means_and_standard_errors(result):
    for row in result.summary:
        values = [r["nll"] for r in result.table if r["method"] == row["method"]]
        assert row["nll"] == pytest.approx(np.mean(values))
        assert row["nll_se"] == pytest.approx(stats.sem(values))
        assert (row["seeds"], row["failed"]) == (3, 0)


def test_differences_over_seeds_are_scipys(result):
    nll = {m: [r["nll"] for r in result.table if r["method"] == m] for m in result.methods}
    rows = {r["method"]: r for r in result.differences("MAP", scores=["nll"], unit="seeds")}
    assert rows.keys() == {"VI", "Laplace"}
    p = {m: stats.ttest_rel(nll[m], nll["MAP"]).pvalue for m in rows}
    for method, row in rows.items():
        assert row["p"] == pytest.approx(p[method], rel=1e-9)
        assert row["difference"] == pytest.approx(np.mean(nll[method]) - np.mean(nll["MAP"]))
        assert row["n"] == 3
    smaller, larger = sorted(rows, key=p.__getitem__)
    assert rows[smaller]["p_holm"] == pytest.approx(min(1, 2 * p[smaller]))
    assert rows[larger]["p_holm"] == pytest.approx(max(p[larger], min(1, 2 * p[smaller])))


def test_differences_over_examples_are_scipys(result):
    def terms(method):
        runs = [r for r in result.runs if r.method == method]
        return np.mean([r.arrays["nll"] for r in runs], axis=0)

    (row,) = (
        r
        for r in result.differences("VI", scores=["nll"], unit="examples")
        if r["method"] == "Laplace"
    )
    expected = stats.ttest_rel(terms("Laplace"), terms("VI"))
    assert row["n"] == 45
    assert row["p"] == pytest.approx(expected.pvalue, rel=1e-6)
    assert row["t"] == pytest.approx(expected.statistic, rel=1e-6)


def test_scores_that_are_no_means_have_no_examples(result):
    assert {r["score"] for r in result.differences(unit="examples")} == {
        "accuracy",
        "nll",
        "brier",
    }
    with pytest.raises(DataError, match="'ece', which has no differences over examples"):
        result.differences(scores=["ece"], unit="examples")
    with pytest.raises(DataError, match=r"baseline='VIs' is no method.*Did you mean 'VI'"):
        result.differences("VIs")


def test_shifts_have_a_row_for_each_severity(result):
    rows = [r for r in result.shift_table if (r["method"], r["seed"]) == ("VI", 0)]
    assert [(r["shift"], r["severity"]) for r in rows] == [("noise", s) for s in range(6)]
    clean = next(r for r in result.table if (r["method"], r["seed"]) == ("VI", 0))
    assert rows[0]["nll"] == clean["nll"]
    assert rows[5]["nll"] > rows[0]["nll"] + 0.1


def test_ways_out(result, tmp_path):
    text = str(result)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(name in text for name in ("MAP", "VI", "Laplace", "NLL", "accuracy", "train s"))
    assert repr(result).startswith("<Comparison: 3 methods, 3 seeds, classification")
    assert "<table>" in result._repr_html_()
    assert all(len(line) <= 80 for line in str(result.differences()).splitlines())
    result.to_csv(tmp_path / "table.csv")
    with open(tmp_path / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(r["nll"]) for r in rows] == [r["nll"] for r in result.table]
    latex = result.to_latex(tmp_path / "table.tex")
    assert latex == (tmp_path / "table.tex").read_text()
    assert latex.count(r"\\") == 4
    assert r"\textbf" in latex
    assert r"$\pm$" in latex


def test_the_evidence_is_whole(result):
    evidence = result.evidence
    assert evidence.kind == "classification"
    assert evidence.inputs.shape == (45, 2)
    assert evidence.targets.tolist() == TEST[1].tolist()
    for run in evidence.runs:
        assert all(run.arrays[n].shape == (45,) for n in ("confidence", "correct", "entropy"))
        assert run.arrays["probs"].shape == (45, 3)
        assert run.arrays["ood_entropy"].shape == (45,)
        assert len(run.history) == 10
        assert run.settings["epochs"] == 10
    assert (evidence.about["train"], evidence.about["test"]) == (60, 45)


# --- other kinds ----------------------------------------------------------------------------------


def test_regression():
    x = torch.linspace(-2, 2, 60)[:, None]
    y = x.sin() + 0.1 * torch.randn(60, 1)

    def model(seed):
        assert seed in (3, 5)
        net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        return credo.Model(net, credo.likelihoods.Gaussian(scale=0.1, learned=True))

    found = compare(
        {"MAP": credo.MAP(lr=0.05), "VI": credo.VI(lr=0.05)}, (x[::2], y[::2]), (x[1::2], y[1::2]),
        make_model=model, seeds=[3, 5], epochs=30, ood={"far": x[:10] + 9, "near": x[:10]},
    )  # fmt: skip
    names = {"rmse", "nll", "crps", "coverage", "width", "epistemic", "aleatoric", "ood_auroc: far"}
    assert all(names <= row.keys() for row in found.table)
    assert {r["seed"] for r in found.table} == {3, 5}
    assert {r["score"] for r in found.differences(unit="examples")} >= {"nll", "crps", "mse"}
    assert found.evidence.runs[0].arrays["ood_std"].shape == (20,)


def test_dense():
    x = torch.randn(12, 1, 6, 6)
    y = (x[:, 0] > 0).long()
    y[:, 0] = 255

    def model():
        net = nn.Conv2d(1, 2, 3, padding=1)
        return credo.Model(net, credo.likelihoods.Categorical(ignore_index=255))

    found = compare(train=(x[:8], y[:8]), test=(x[8:], y[8:]), make_model=model, epochs=8)
    assert found.evidence.kind == "dense"
    assert all({"accuracy", "mean_iou", "nll", "ece"} <= row.keys() for row in found.table)
    assert found.evidence.runs[0].arrays["entropy"].shape == (4,)
    assert found.evidence.runs[0].arrays["pixel_confidence"].shape == (4 * 5 * 6,)
    assert found.evidence.runs[0].arrays["entropy_map"].shape == (4, 6, 6)


def test_datasets_and_loaders_are_taken():
    loader = DataLoader(TensorDataset(*TEST), batch_size=20)
    plain = compare({"MAP": credo.MAP()}, seeds=1)
    other = compare({"MAP": credo.MAP()}, TensorDataset(*TRAIN), loader, seeds=1, ood=loader)
    assert other.table[0]["nll"] == plain.table[0]["nll"]
    assert other.table[0]["ood_auroc"] == pytest.approx(0.5)


class Branching(nn.Module):
    """Layers declared in another order than they run, so that the last one must be looked for."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(8, 3), nn.Linear(2, 8)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def test_arrays_of_another_precision_and_networks_that_must_be_run_first():
    def model():
        return credo.Model(Branching(), credo.likelihoods.Categorical(), random="last_layer")

    train, test = ((x.double().numpy(), y.numpy()) for x, y in (TRAIN, TEST))
    last = credo.Laplace(subset="last_layer", train=credo.MAP(lr=0.05))
    found = compare(
        {"VI": credo.VI(lr=0.05), "Laplace": last}, train, test, make_model=model, seeds=1,
        ood=test[0], shifts={"s": [test[0], (test[0], test[1])]},
    )  # fmt: skip
    assert [row["status"] for row in found.table] == ["finished"] * 2
    assert all(r["nll"] == pytest.approx(found.shift_table[0]["nll"])
               for r in found.shift_table if r["method"] == "VI")  # fmt: skip


def test_methods_without_rates_and_those_with_all_data_keep_their_own():
    sampler = credo.HMC(warmup=1, chains=2, leapfrog=2)
    with pytest.warns(UserWarning, match="chains disagree"):
        found = compare(
            {"HMC": sampler, "MAP": credo.MAP()}, seeds=1, epochs={"HMC": 8, "MAP": 3},
            schedule={"MAP": "linear"},
        )  # fmt: skip
    by_method = {run.method: run for run in found.runs}
    assert len(by_method["HMC"].history) == 8
    assert len(by_method["MAP"].history) == 3
    assert "r_hat" in by_method["HMC"].scores
    assert by_method["HMC"].settings["schedule"] == "constant"
    assert by_method["MAP"].settings["schedule"] == "linear"
    assert any("HMC: the chains disagree" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore:HMC .reference.:UserWarning")
def test_a_reference_is_trained_once_and_says_whether_it_is_one():
    pytest.importorskip("credo.metrics.agreement")
    sampler = credo.HMC(warmup=2, chains=2)
    with pytest.warns(UserWarning, match=r"HMC \(reference\) HAS NOT CONVERGED: R̂"):
        found = compare(reference=sampler, epochs={"reference": 9})
    rows = {(r["method"], r["seed"]): r for r in found.table}
    assert [seed for name, seed in rows if name == "HMC (reference)"] == [0]
    assert rows["HMC (reference)", 0]["status"] == "not converged"
    assert rows["HMC (reference)", 0]["r_hat"] > 1.05
    for (name, _), row in rows.items():
        assert ("total_variation" in row) == (name != "HMC (reference)")
    runs = {(r.method, r.seed): r for r in found.runs}
    gap = runs["VI", 1].arrays["probs"] - runs["HMC (reference)", 0].arrays["probs"]
    assert rows["VI", 1]["total_variation"] == pytest.approx(np.abs(gap).sum(1).mean() / 2)
    assert all(len(line) <= 80 for line in str(found).splitlines())
    assert "HMC (reference)" not in {r["method"] for r in found.differences()}


def test_a_reference_for_numbers():
    pytest.importorskip("credo.metrics.agreement")
    x = torch.linspace(-1, 1, 24, dtype=torch.float64)[:, None]

    def model():
        net = nn.Linear(1, 1).double()
        return credo.Model(net, credo.likelihoods.Gaussian(scale=0.3), credo.priors.Normal(1.0))

    descent = credo.MAP(lr=0.1)
    found = compare(
        {"full": credo.Laplace(structure="full", train=descent), "MAP": descent},
        (x, x), (x, x), make_model=model, seeds=1, batch_size=24, samples=64,
        epochs={"full": 60, "MAP": 60, "reference": 260},
        reference=credo.HMC(warmup=60, leapfrog=5, spread=0.1),
    )  # fmt: skip
    rows = {r["method"]: r for r in found.table}
    assert rows["HMC (reference)"]["status"] == "finished"
    # A linear network's posterior is Laplace's; that of a point is as far as the posterior is wide.
    assert rows["full"]["w2"] < 0.03
    assert rows["MAP"]["w2"] > 2 * rows["full"]["w2"]


# --- what can't be meant, before anything is trained ----------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": {}}, "methods is empty"),
        ({"methods": {"VI": credo.VI}}, r"'VI' is the class VI: call it, VI\(\)"),
        ({"methods": {"VI": "vi"}}, "'VI' is a str"),
        ({"methods": [credo.VI()]}, "methods must be a Mapping.*Give a name for each"),
        ({"ood": torch.zeros(0, 2)}, "'foreign' are empty"),
        ({"ood": {}}, "ood is an empty mapping"),
        ({"ood": torch.zeros(4, 3)}, r"examples of shape \(3,\), those of the test set are \(2,\)"),
        ({"ood": {"a": torch.full((4, 2), torch.nan)}}, "'a' have NaN"),
        ({"ood": torch.zeros(4, 2, dtype=torch.long)}, "of torch.int64, those of the test set of"),
        ({"shifts": {"s": lambda x, s: x[:3]}}, "'s' at severity 1 are 3 examples"),
        ({"shifts": {"s": lambda x, s: x.no}}, "'s' failed at severity 1.*AttributeError"),
        ({"shifts": {"s": [TEST[0], TEST[0][:, :1]]}}, r"severity 2 have examples of shape \(1,\)"),
        ({"shifts": {"s": []}}, "'s' has no severities"),
        ({"shifts": {"s": 3}}, "'s' is a int"),
        ({"seeds": [1, 1]}, "different numbers"),
        ({"seeds": 0}, "seeds=0 must be a number"),
        ({"epochs": {"VIs": 3}}, "entry for 'VIs'.*Did you mean 'VI'"),
        ({"epochs": {"VI": 0}}, "epochs of 'VI' must be at least 1"),
        ({"schedule": {"SWAG": "linear"}}, "entry for 'SWAG', which is no method"),
        ({"test": (TEST[0][:0], TEST[1][:0])}, "empty"),
        ({"test": TEST[0]}, "test is one Tensor"),
        ({"test": (TEST[0], TEST[1] + 5)}, "Label 5"),
        ({"train": (TRAIN[0][:, :1], TRAIN[1])}, "can't take these inputs"),
        ({"make_model": lambda: nn.Linear(2, 3)}, "make_model gave a Linear: wrap it"),
        ({"engine": "ray"}, "needs a folder"),
    ],
)  # fmt: skip
def test_bad_input_is_named_before_training(change, message, monkeypatch):
    monkeypatch.setattr(compare_run, "fit", None)
    with pytest.raises(DataError, match=message):
        compare(**change)


def test_make_model_must_build_its_own_network():
    net = nn.Linear(2, 3)
    with pytest.raises(DataError, match="same network every time"):
        compare(make_model=lambda: credo.Model(net, credo.likelihoods.Categorical()))
    source = torch.Generator().manual_seed(0)

    def drifting():
        model = credo.Model(nn.Linear(2, 3), credo.likelihoods.Categorical())
        nn.init.normal_(model.net.weight, generator=source)
        return model

    with pytest.raises(DataError, match="other weights when it is called again with seed 0"):
        compare(make_model=drifting)
    loss = credo.likelihoods.FromLoss(lambda f, y: f.square().sum(1))
    with pytest.raises(UnsupportedError, match="likelihood that is a distribution"):
        compare(make_model=lambda: credo.Model(nn.Linear(2, 3), loss))


def test_the_callers_random_numbers_are_left_alone():
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    compare({"MAP": credo.MAP()}, seeds=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numbers)  # noqa: NPY002


# --- failures, folders ----------------------------------------------------------------------------


def test_a_method_that_fails_is_a_row_and_the_others_go_on():
    with pytest.warns(UserWarning, match="Bad, seed 1, failed. NonFiniteError: the loss is nan"):
        found = compare({"MAP": credo.MAP(), "Bad": Failing(when=1), "VI": credo.VI()})
    rows = {(r["method"], r["seed"]): r for r in found.table}
    assert rows["Bad", 1]["status"] == "failed"
    assert rows["Bad", 1]["error"] == "NonFiniteError: the loss is nan at step 3"
    assert "nll" not in rows["Bad", 1]
    assert sum(r["status"] == "finished" for r in rows.values()) == 5
    assert "the loss is nan at step 3" in str(found)
    assert "the loss is nan" in found.to_csv()
    summary = {r["method"]: r for r in found.summary}
    assert (summary["Bad"]["seeds"], summary["Bad"]["failed"]) == (1, 1)
    # Pairs are made of the seeds that both have.
    counts = {r["method"]: r["n"] for r in found.differences(scores=["nll"], unit="seeds")}
    assert counts == {"Bad": 1, "VI": 2}


def test_all_may_fail():
    with pytest.warns(UserWarning, match="failed"):
        found = compare({"Bad": Failing(), "Worse": Failing(when=-1, how="error")}, seeds=1)
    assert [r["status"] for r in found.table] == ["failed", "failed"]
    assert "failed" in str(found)
    assert found.differences() == []


@pytest.fixture
def fits(monkeypatch):
    """The methods and seeds that are really trained."""
    done = []

    def counted(model, method, *args, **settings):
        done.append((type(method).__name__, args[3]))
        return credo.fit(model, method, *args, **settings)

    monkeypatch.setattr(compare_run, "fit", counted)
    monkeypatch.setattr(compare_run, "warm_up", lambda: None)
    return done


def test_what_is_finished_is_not_trained_again(tmp_path, fits):
    first = compare(folder=tmp_path)
    assert len(fits) == 4
    again = compare(folder=tmp_path)
    assert len(fits) == 4
    assert again.table == first.table
    grown = compare({**METHODS, "IVON": credo.IVON()}, folder=tmp_path, seeds=3)
    assert sorted(fits[4:]) == [("IVON", 0), ("IVON", 1), ("IVON", 2), ("MAP", 2), ("VI", 2)]
    assert len(grown.table) == 9
    loaded = load_comparison(tmp_path)
    assert loaded.table == grown.table
    assert loaded.methods == ["MAP", "VI", "IVON"]
    assert np.array_equal(loaded.evidence.inputs, TEST[0].numpy())
    compare(folder=tmp_path, resume=False)
    assert len(fits) == 13


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": {**METHODS, "VI": credo.VI(lr=0.01)}}, "methods.VI.method.lr was 0.05 and"),
        ({"epochs": 3}, "methods.MAP.epochs was 2 and is now 3"),
        ({"batch_size": 7}, "batch_size was 128 and is now 7"),
        ({"samples": 9}, "samples was 8 and is now 9"),
        ({"schedule": "linear"}, "schedule was 'cosine' and is now 'linear'"),
        ({"train": blobs(60, 5)}, "data.train was"),
        ({"test": blobs(45, 5)}, "data.test was"),
        ({"ood": TEST[0]}, "data.ood foreign was None"),
        ({"shifts": {"s": lambda x, s: x}}, "data.shift s"),
        (
            {"make_model": lambda: credo.Model(nn.Linear(2, 3), credo.likelihoods.Categorical())},
            "model.network was",
        ),
    ],
)
def test_another_call_is_refused_by_name(change, message, tmp_path, fits):
    compare(folder=tmp_path, seeds=1)
    with pytest.raises(CheckpointError, match=message):
        compare(folder=tmp_path, seeds=1, **change)
    assert len(fits) == 2
    assert compare(folder=tmp_path, seeds=1).methods == ["MAP", "VI"]


def test_an_interrupted_comparison_goes_on(tmp_path, fits):
    methods = {"MAP": credo.MAP(), "Bad": Failing(when=1, how="interrupt")}
    with pytest.raises(KeyboardInterrupt):
        compare(methods, folder=tmp_path, schedule="constant")
    assert fits == [("MAP", 0), ("Failing", 0), ("MAP", 1), ("Failing", 1)]
    assert [(r.method, r.seed) for r in load_comparison(tmp_path).runs] == [
        ("MAP", 0), ("MAP", 1), ("Bad", 0)
    ]  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        compare(methods, folder=tmp_path, schedule="constant")
    assert fits[4:] == [("Failing", 1)]


def test_posteriors_are_kept_with_a_folder(tmp_path):
    found = compare(folder=tmp_path, seeds=1)
    posterior = found.posterior("VI", make_model().net)
    probs = posterior.predict(TEST[0], samples=8).probs
    assert credo.metrics.nll(probs, TEST[1]) == pytest.approx(found.table[1]["nll"], rel=1e-6)
    with pytest.raises(DataError, match="no finished run of 'SWAG'"):
        found.posterior("SWAG", make_model().net)
    with pytest.raises(DataError, match="this one had none"):
        compare(seeds=1, methods={"MAP": credo.MAP()}).posterior("MAP", make_model().net)


def test_files_that_are_no_comparison_are_named(tmp_path):
    with pytest.raises(FileFormatError, match="holds no comparison"):
        load_comparison(tmp_path)
    (tmp_path / "comparison.json").write_text("{")
    with pytest.raises(FileFormatError, match="can't be read"):
        compare(folder=tmp_path)
    (tmp_path / "comparison.json").write_text("[]")
    with pytest.raises(FileFormatError, match=r"not what credo\.compare writes"):
        compare(folder=tmp_path)


SCRIPT = """
import sys, torch
from torch import nn
import credo

def make_model():
    return credo.Model(nn.Linear(2, 3), credo.likelihoods.Categorical())

x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()

def go(folder):
    methods = {"MAP": credo.MAP(), "Long": credo.VI(lr=0.03)}
    return credo.compare(make_model, methods, (x, y), (x, y), seeds=1, folder=folder,
                         progress=False, epochs={"MAP": 1, "Long": 300})

if __name__ == "__main__":
    go(sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_comparison_resumes_where_it_was(tmp_path, fits):
    """The first method stays finished, the second ends as if nothing had happened."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "killed")]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("killed/runs/Long*/training/state.safetensors")):
        assert time.monotonic() < deadline, "it did not begin"
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stderr.close()
    assert len(list(tmp_path.glob("killed/runs/*/result.json"))) == 1
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(SCRIPT, namespace)
    resumed = namespace["go"](tmp_path / "killed")
    assert fits == [("VI", 0)]
    whole = namespace["go"](None)
    # The weights are bit for bit the same; float32 sums of predictions depend on the alignment.
    expected = [r["nll"] for r in whole.table]
    assert [r["nll"] for r in resumed.table] == pytest.approx(expected, rel=1e-7)
    assert len(resumed.runs[1].history) == 300


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):
    one = compare(folder=tmp_path / "one", ood=TEST[0] + 3)
    two = compare(folder=tmp_path / "two", jobs=2, ood=TEST[0] + 3)
    assert [r["nll"] for r in two.table] == pytest.approx([r["nll"] for r in one.table], rel=1e-6)
