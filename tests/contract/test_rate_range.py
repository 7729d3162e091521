"""The learning-rate range test takes every method that trains by an optimizer, and its failures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import credo
from credo.errors import ConvergenceError, NonFiniteError
from credo.variational.natural import NaturalMethod

X = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
PUBLIC = [getattr(credo, name) for name in credo.__all__]
NATURAL = [
    kind for kind in PUBLIC
    if isinstance(kind, type) and issubclass(kind, NaturalMethod) and kind is not NaturalMethod
]  # fmt: skip
METHODS = {
    "MAP": credo.MAP(),
    "MAP, AdaBound": credo.MAP(optimizer="adabound"),
    "VI": credo.VI(),
    "VI, local": credo.VI(noise="local"),
    "VariationalLaplace": credo.VariationalLaplace(),
    **{kind.__name__: kind() for kind in NATURAL},
}
every = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


class Subject:
    """A network, and what it was before the test."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Softplus(), nn.Linear(16, 2))
        self.model = credo.Model(net, credo.likelihoods.Categorical())
        self.before = {name: t.clone() for name, t in net.state_dict().items()}

    def test(self, method: credo.method.Method, **settings) -> credo.tools.RateRange:
        return credo.lr_range_test(
            self.model, method, (X, Y), batch_size=64, progress=False, **settings
        )

    def is_untouched(self) -> bool:
        net = self.model.net
        return all(torch.equal(t, self.before[name]) for name, t in net.state_dict().items()) and (
            all(p.grad is None for p in net.parameters())
        )


def test_the_natural_methods_are_all_in_the_table() -> None:
    assert {credo.IVON, credo.VOGN, credo.Vadam} <= set(NATURAL)


@every
def test_it_finds_a_rate_that_lowers_the_loss(method) -> None:
    subject = Subject()
    found = subject.test(method)
    assert found.fell
    assert 1e-4 < found.suggestion < 10
    assert found.losses[found.rates.index(found.lowest)] < 0.5, "chance has 0.69"
    assert subject.is_untouched()


@every
def test_a_divergence_is_named_and_leaves_no_trace(method) -> None:
    subject = Subject()
    found = subject.test(method, stop=1e30, steps=40)
    assert found.diverged == found.rates[-1] < 1e30
    assert "rose" in found.cause or "NonFiniteError" in found.cause
    assert "diverged" in repr(found)
    assert subject.is_untouched()


@every
@pytest.mark.parametrize("error", [NonFiniteError, ConvergenceError, torch.linalg.LinAlgError])
def test_an_error_of_divergence_ends_the_test_by_name(method, error, monkeypatch) -> None:
    """Decompositions of matrices that are not finite raise torch's error, not one of ours."""
    subject, update, calls = Subject(), type(method).update, []

    def failing(self, state, batch):
        calls.append(batch)
        if len(calls) == 15:
            raise error("on purpose")
        return update(self, state, batch)

    monkeypatch.setattr(type(method), "update", failing)
    found = subject.test(method)
    assert found.cause == f"{error.__name__}: on purpose"
    assert len(found.rates) == 14
    assert found.diverged == found.rates[-1]
    assert subject.is_untouched()


@every
def test_rates_too_large_from_the_beginning_are_refused_with_the_method_s_name(
    method, monkeypatch
) -> None:
    def failing(self, state, batch):
        raise NonFiniteError("on purpose")

    monkeypatch.setattr(type(method), "update", failing)
    subject = Subject()
    name = type(method).__name__
    with pytest.raises(ConvergenceError, match=f"by {name} diverged at its first steps.*purpose"):
        subject.test(method)
    assert subject.is_untouched()
