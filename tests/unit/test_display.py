"""Objects that a user looks at say what they are and what to call next, in a line and in HTML."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.active.history import History
from credo.continual.report import Report
from credo.display import Display, Displayed
from credo.posterior import Posterior
from credo.sweep import Choice, Findings, Space, Study
from credo.tools import RateRange
from credo.tools.temperature_search import TemperatureRow, TemperatureSearch
from credo.trials.attempt import Outcome

X = torch.linspace(-1, 1, 12)[:, None]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2))


def model() -> credo.Model:
    return credo.Model(network(), credo.likelihoods.Categorical(), random="last_layer")


def posterior() -> Posterior:
    data = X, (X[:, 0] > 0).long()
    return credo.fit(model(), credo.VI(lr=0.01), data, epochs=1, progress=False)


def search() -> TemperatureSearch:
    rows = tuple(TemperatureRow(t, t / 2, 1.0 + t, 0.1, 0.9, 2.0, 5, 0.9) for t in (0.1, 1.0))
    return TemperatureSearch(
        rows, 0, credo.Balanced(0.1), posterior(), 1.5, None, False, ("a < b at the end",)
    )


def findings() -> Findings:
    study = Study("s", "about", Space({"lr": Choice((0.1, 0.2))}), lambda *_: {}, "nll")
    trials = [{"number": i, "seed": 0, "settings": {"lr": 0.1 * i}} for i in range(3)]
    return Findings(
        study,
        [
            Outcome(trials[0], {"nll": 0.7}),
            Outcome(trials[1], {"nll": 0.25}),
            Outcome(trials[2], None, "it broke"),
        ],
    )


def history() -> History:
    rounds = [{"labels": n, "scores": {"accuracy": n / 20, "nll": 0.5}} for n in (5, 10)]
    return History(torch.arange(10), torch.zeros(10), rounds, posterior(), False)


def report() -> Report:
    scores = {name: [0.9, 0.5] for name in ("accuracy", "nll", "ece")}
    return Report("EWC", ["0/1", "2/3"], scores, [scores], [1.0], [8])


CASES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "model": (
        model,
        "Model: Sequential with 18 trainable weights, Categorical likelihood, Normal prior",
        "credo.fit(model, credo.VI(), data)",
    ),
    "posterior": (
        posterior,
        "Posterior: DiagGaussian over 10 weights of Sequential, Categorical likelihood",
        "posterior.predict(x)",
    ),
    "predictive": (
        lambda: posterior().predict(X, samples=3),
        "Predictive: classification, samples=3, shape=(12, 2)",
        "pred.probs, pred.entropy",
    ),
    "formula": (
        lambda: posterior().predict(X, at="linearised", link="probit"),
        "ProbitPredictive: classification by a formula, shape=(12, 2)",
        "pred.probs",
    ),
    "search": (
        search,
        "TemperatureSearch: τ = 0.1 is best of 2, held-out NLL 1.1",
        "search.posterior.predict(x)",
    ),
    "rates": (
        lambda: RateRange((0.01, 0.1, 1.0), (3.0, 1.0, 2.0), None),
        "RateRange: 3 rates from 0.01 to 1, suggestion 0.01, held to the end",
        "train with lr=rates.suggestion",
    ),
    "findings": (
        findings,
        "Findings of 's': 3 trials, 1 without a result, best nll 0.25",
        'findings.best.trial["settings"]',
    ),
    "diagnosis": (
        lambda: credo.diagnose(posterior(), X),
        "Diagnosis: this posterior is ",
        "print(diagnosis)",
    ),
    "history": (
        history,
        "History: 10 labels asked for in 2 trainings, accuracy 0.5",
        "history.curve('accuracy')",
    ),
    "report": (
        report,
        "Report of EWC: 1 of 2 tasks learned, accuracy 0.900 on average",
        "report.summary()",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_says_in_one_line_what_it_is_and_what_to_call_next(name: str) -> None:
    make, what, then = CASES[name]
    line = repr(make())
    assert line.startswith(f"<{what}")
    assert then in line.partition("; next: ")[2]
    assert "\n" not in line
    assert len(line) <= 200


@pytest.mark.parametrize("name", CASES)
def test_a_notebook_shows_the_same_as_html(name: str) -> None:
    html = CASES[name][0]()._repr_html_()
    text = html.replace("&#x27;", "'").replace("&quot;", '"')
    assert CASES[name][1] in text
    assert "Next: <code>" in text
    for tag in ("div", "table", "tr", "td", "b", "p", "code"):
        assert html.count(f"<{tag}>") == html.count(f"</{tag}>")


def test_the_best_trials_stand_first_and_doubts_are_escaped() -> None:
    assert findings()._repr_html_().index("0.25") < findings()._repr_html_().index("0.7")
    assert "Warning: a &lt; b at the end." in search()._repr_html_()


def test_text_of_the_users_is_escaped() -> None:
    class Hostile(Displayed):
        def _display(self) -> Display:
            text = "<script>&"
            return Display(text, text, rows=[[text]], header=[text], notes=[text])

    assert "<script>" not in Hostile()._repr_html_()
    assert Hostile()._repr_html_().count("&lt;script&gt;&amp;") == 5


@pytest.mark.parametrize(
    ("random", "words"),
    [
        (None, "all but normalisation layers"),
        ("last_layer", "last_layer"),
        (["0.weight", "2.*"], "0.weight, 2.*"),
        (lambda segment: True, "by a function"),
    ],
)
def test_looking_at_a_model_says_what_is_random_and_moves_nothing(random: Any, words: str) -> None:
    net = network()
    net[0].weight.grad = torch.ones_like(net[0].weight)  # type: ignore[union-attr]
    before = [p.data_ptr() for p in net.parameters()]
    shown = credo.Model(net, credo.likelihoods.Categorical(), random=random)._repr_html_()
    assert words in shown
    assert [p.data_ptr() for p in net.parameters()] == before
    assert net[0].weight.grad is not None


def test_a_lazy_network_can_be_shown_too() -> None:
    lazy = credo.Model(nn.LazyLinear(2), credo.likelihoods.Categorical())
    assert "lazy weights" in repr(lazy)


def test_nothing_finished_yet_can_be_shown_too() -> None:
    study = findings().study
    assert "0 trials" in repr(Findings(study))
    assert "0 of 2 tasks" in repr(Report("EWC", ["a", "b"], {}))
