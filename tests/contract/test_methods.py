"""What `credo.Method` promises of every method, and what it is asked of a class that is one."""

import dataclasses
import inspect
import json
import sys

import pytest
import torch
from methods import METHODS
from torch import nn
from walk import MOST_FILES, WALKS

import credo
from credo.errors import DataError
from credo.method import Method, State, TemperedMethod


def public_methods() -> set[type]:
    named = [getattr(credo, name) for name in credo.__all__]
    return {value for value in named if isinstance(value, type) and issubclass(value, Method)}


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*(subclasses(sub) for sub in kind.__subclasses__()))


def model() -> credo.Model:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return credo.Model(net, credo.likelihoods.Categorical())


def test_every_public_method_has_a_row() -> None:
    assert public_methods() <= {type(row.make()) for row in METHODS.values()}


def test_methods_are_abstract_or_final() -> None:
    """A final class says so to type checkers and readers: nobody inherits half an algorithm."""
    every = subclasses(Method) | subclasses(State)
    # Those of doctests are not in the module whose name they bear.
    kinds = {
        k
        for k in every
        if k.__module__.startswith("credo.")
        and vars(sys.modules[k.__module__]).get(k.__name__) is k
    }
    bases = {base for kind in kinds for base in kind.__mro__[1:]}
    for kind in kinds - {State}:
        final = getattr(kind, "__final__", False)
        assert final != (kind in bases), f"{kind.__name__} is neither a base nor final"
        if kind in bases and issubclass(kind, Method):
            assert inspect.isabstract(kind), f"{kind.__name__} is a base that can be made"


@pytest.mark.parametrize("name", METHODS)
def test_settings_are_fields_that_json_can_tell_apart(name: str) -> None:
    method = METHODS[name].make()
    assert dataclasses.is_dataclass(method)
    config = json.loads(json.dumps(method.config(), allow_nan=False))
    assert config.pop("type") == type(method).__name__
    told = {f.name for f in dataclasses.fields(method) if f.compare}
    assert config.keys() == told


@pytest.mark.parametrize("name", METHODS)
def test_the_contract_is_typed_and_declared(name: str) -> None:
    method = METHODS[name].make()
    assert isinstance(method, Method)
    assert isinstance(method, TemperedMethod)
    assert method.at(1.0).temperature == 1.0
    state = method.init(model(), 32, torch.Generator().manual_seed(0))
    assert isinstance(state, State)
    tensors, meta = method.pack(state)
    assert all(isinstance(t, torch.Tensor) for t in tensors.values())
    json.dumps(meta)
    optimizer = method.optimizer_of(state)
    assert optimizer is None or isinstance(optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("kind", sorted(public_methods(), key=lambda kind: kind.__name__))
def test_a_wrong_setting_is_refused_by_name_when_it_is_given(kind: type) -> None:
    for field in dataclasses.fields(kind):
        if field.type in ("Selector",) or field.name in ("start", "train"):
            continue
        with pytest.raises(DataError, match=rf"^{kind.__name__}: {field.name} must be "):
            kind(**{field.name: float("nan") if field.name != "guard" else "yes"})
    last = dataclasses.fields(kind)[-1].name
    with pytest.raises(DataError, match=rf"has no parameter '{last}x'\. Did you mean '{last}'"):
        kind(**{f"{last}x": 1.0})


def test_fit_refuses_what_can_not_be_meant_with_the_remedy() -> None:
    x, y = torch.randn(8, 4), torch.zeros(8).long()
    with pytest.raises(
        DataError, match=r"method must be a Method, but it is the class VI.* VI\(\)"
    ):
        credo.fit(model(), credo.VI, (x, y))
    with pytest.raises(DataError, match=r"model must be a Model.*credo\.Model\(net, "):
        credo.fit(model().net, credo.VI(), (x, y))
    for wrong in (
        {"epochs": float("nan")},
        {"epochs": -1},
        {"epochs": 1.5},
        {"batch_size": 0},
        {"seed": 0.5},
        {"num_data": 0},
        {"keep": "bset"},
        {"resume": "no"},
        {"schedule": 3},
    ):
        (name,) = wrong
        with pytest.raises(DataError, match=rf"^fit: {name} must be "):
            credo.fit(model(), credo.MAP(), (x, y), progress=False, **wrong)
    with pytest.raises(DataError, match=r"no parameter 'batchsize'\. Did you mean 'batch_size'"):
        credo.fit(model(), credo.MAP(), (x, y), batchsize=3)


SAME = {
    "lr", "betas", "hess_init", "damping", "clip_radius", "draws",
    "basis_beta", "refresh", "max_size", "one_sided", "hess_clip",
}  # fmt: skip


@pytest.mark.parametrize("name", ["EVON", "IVON", "VOGN", "Vadam"])
def test_the_method_and_its_optimizer_have_the_same_defaults(name: str) -> None:
    method = inspect.signature(getattr(credo, name)).parameters
    optimizer = inspect.signature(getattr(credo.optim, name)).parameters
    both = SAME & method.keys() & optimizer.keys()
    assert {"lr", "betas", "hess_init"} <= both
    assert {k: method[k].default for k in both} == {k: optimizer[k].default for k in both}


@pytest.mark.filterwarnings("ignore:the network does not look trained:UserWarning")
@pytest.mark.parametrize("name", WALKS)
def test_one_batch_opens_few_files(name: str) -> None:
    files = WALKS[name]()
    assert len(files) <= MOST_FILES, f"{name} opens {sorted(files)}"
