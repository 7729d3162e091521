"""Search spaces: what is drawn from them, and what their JSON may be."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from credo.errors import DataError
from credo.sweep import Choice, LogUniform, Space, TruncatedNormal, Uniform
from credo.sweep.space import points_per_axis

numbers = st.floats(-1e6, 1e6)
scales = st.floats(1e-6, 1e6)
pairs = st.tuples(numbers, numbers).filter(lambda p: p[0] < p[1])
parameters = st.one_of(
    pairs.map(lambda p: Uniform(*p)),
    st.tuples(scales, scales).filter(lambda p: p[0] < p[1]).map(lambda p: LogUniform(*p)),
    st.tuples(numbers, scales, pairs).map(lambda p: TruncatedNormal(p[0], p[1], *p[2])),
    st.lists(st.none() | st.booleans() | st.integers() | numbers | st.text(), min_size=1).map(
        lambda options: Choice(tuple(options))
    ),
)
spaces = st.dictionaries(st.text(), parameters, min_size=1, max_size=4).map(Space)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
)
nearly = st.dictionaries(
    st.text(),
    st.dictionaries(
        st.sampled_from(["uniform", "loguniform", "normal", "choice", "other"]),
        st.lists(anything, max_size=5),
        max_size=2,
    ),
)


@settings(deadline=None, max_examples=50)
@given(spaces)
def test_json_and_back(space) -> None:
    assert Space.from_json(json.loads(json.dumps(space.to_json()))) == space


@settings(deadline=None, max_examples=200)
@given(anything | nearly)
def test_any_json_is_a_space_or_a_named_error(content) -> None:
    try:
        space = Space.from_json(content)
    except DataError:
        return
    json.dumps(space.sample())


@settings(deadline=None, max_examples=50)
@given(parameters, st.floats(0, 1))
def test_every_quantile_is_in_the_range(parameter, u) -> None:
    value = parameter.at(u)
    if isinstance(parameter, Choice):
        assert value in parameter.options
    else:
        assert parameter.low <= value <= parameter.high


def test_draws_have_the_distributions_they_are_named_after() -> None:
    """Kolmogorov–Smirnov at p > 1e-3 with a fixed seed."""
    space = Space(
        {"u": Uniform(-1, 3), "l": LogUniform(1e-4, 1e-1), "n": TruncatedNormal(0.9, 0.45, 0, 1)}
    )
    generator = torch.Generator().manual_seed(0)
    draws = [space.sample(generator) for _ in range(2000)]
    for name, reference in {
        "u": stats.uniform(-1, 4),
        "l": stats.loguniform(1e-4, 1e-1),
        "n": stats.truncnorm(-2, (1 - 0.9) / 0.45, loc=0.9, scale=0.45),
    }.items():
        assert stats.kstest([draw[name] for draw in draws], reference.cdf).pvalue > 1e-3, name
    counts = np.bincount([Choice((0, 1, 2)).at(draw["n"]) for draw in draws], minlength=3)
    assert counts.sum() == 2000


def test_a_normal_far_in_its_tail_is_at_the_bound() -> None:
    assert TruncatedNormal(0, 1, 50, 60).at(0.5) == pytest.approx(50, abs=0.1)
    assert TruncatedNormal(0, 1, -60, -50).at(0.5) == pytest.approx(-50, abs=0.1)
    assert TruncatedNormal(0, 1e-6, 1e5, 2e5).at(0.5) == pytest.approx(1e5)


def test_grids_have_all_options_and_both_ends() -> None:
    space = Space({"x": LogUniform(1, 100), "c": Choice(("a", "b"))})
    assert space.grid(3) == [
        {"x": pytest.approx(x), "c": c} for x in (1, 10, 100) for c in ("a", "b")
    ]
    assert [p["x"] for p in space.grid(1)] == [pytest.approx(10)] * 2
    assert points_per_axis(space, 7) == 3
    assert points_per_axis(Space({"c": Choice((1, 2))}), 100) == 1
    with pytest.raises(DataError, match="coarsest grid has 2 points"):
        points_per_axis(space, 1)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([], "an object of parameters"),
        ({}, "at least one parameter"),
        ({"lr": 3}, "lr: 3 is not a parameter"),
        ({"lr": {"uniform": [1]}}, r"lr: uniform takes the numbers \['low', 'high'\]"),
        ({"lr": {"uniform": [2, 1]}}, "lr: low=2.0 must be less than high=1.0"),
        ({"lr": {"uniform": [True, 2]}}, "takes the numbers"),
        ({"lr": {"loguniform": [0, 1]}}, "lr: LogUniform: low must be a positive"),
        ({"lr": {"normal": [0, -1, 0, 1]}}, "lr: TruncatedNormal: scale must be a positive"),
        ({"lr": {"uniform": [0, math.inf]}}, "finite"),
        ({"lr": {"choice": []}}, "at least one option"),
        ({"lr": {"choice": [[1]]}}, "options are strings"),
        ({"lr": {"gamma": [1, 2]}}, "'gamma' is unknown"),
    ],
)
def test_bad_spaces_are_named(content, match) -> None:
    with pytest.raises(DataError, match=match):
        Space.from_json(content)
