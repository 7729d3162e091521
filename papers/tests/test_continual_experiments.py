"""The experiments on continual learning at a tiny scale, and their rules on results by hand."""

import copy
from dataclasses import replace

import pytest
import torch

from credo.errors import DataError
from credo_papers import (
    continual_memory,
    continual_permuted_mnist,
    continual_setup,
    continual_split_cifar,
    continual_split_mnist,
    continual_strengths,
    continual_table,
    continual_toy,
)
from credo_papers.continual_setup import LEARNERS, ContinualSettings
from credo_papers.studies import find_study

SCATTER = (-0.001, 0.0, 0.001)
TINY = ContinualSettings(
    stream="split", data="digits", tasks=2, net="16", num_data=40, test_images=30, epochs=1,
    batch_size=32, memory=10,
    options={"ewc": {"strength": 3.0}, "fromp": {"training": {"clip": 0.1}}},
)  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return continual_table.run_one(TINY, 0, tmp_path_factory.mktemp("table"))


def test_every_learner_is_in_the_table(table, tmp_path):
    for name in LEARNERS:
        assert 0 <= table[f"{name}_accuracy"] <= 1
        assert len(table[f"{name}_matrix"]) == 2
        assert table[f"{name}_ece"] >= 0
    assert table["naive_memory_bytes"] == 0
    assert table["joint_memory_bytes"] > table["fromp_memory_bytes"] > 0
    path = continual_table.draw([table, table], tmp_path / "table.png", "digits", {"ewc": 0.63})
    assert path.stat().st_size > 20_000


def test_learners_get_their_own_options_and_the_same_start():
    stream = continual_setup.make_stream(TINY, 3)
    ewc = continual_setup.make_learner(TINY, "ewc", stream, 3)
    fromp = continual_setup.make_learner(TINY, "fromp", stream, 3)
    assert ewc.strength == 3.0
    assert ewc.training.clip is None
    assert (fromp.training.clip, fromp.size) == (0.1, 10)
    assert torch.equal(ewc.model.bind().vector, fromp.model.bind().vector)
    other = continual_setup.make_learner(TINY, "ewc", stream, 4)
    assert not torch.equal(ewc.model.bind().vector, other.model.bind().vector)
    with pytest.raises(DataError, match="no learner is called 'icarl'"):
        continual_setup.make_learner(TINY, "icarl", stream, 0)


def test_the_convolutional_network_is_the_papers():
    settings = continual_split_cifar.EXPERIMENT.presets["paper"]
    body, features = continual_setup._convolutional(settings.net, (3, 32, 32))
    assert features == 512
    assert body(torch.zeros(2, 3, 32, 32)).shape == (2, 512)
    widths = [m.out_channels for m in body if isinstance(m, torch.nn.Conv2d)]
    assert widths == [32, 32, 64, 64]
    dropouts = [m.p for m in body if isinstance(m, torch.nn.Dropout)]
    assert dropouts == [0.25, 0.25, 0.5]


@pytest.mark.parametrize(
    "module", [continual_split_mnist, continual_permuted_mnist, continual_split_cifar]
)
def test_published_orders_are_asked_for_and_presets_name_learners(module):
    for better, worse in module.STATEMENTS:
        assert better in LEARNERS
        assert worse in LEARNERS
        # Every statement is one that the published table makes.
        assert module.PUBLISHED[better] > module.PUBLISHED[worse]
    for settings in module.EXPERIMENT.presets.values():
        assert set(settings.options) <= set(LEARNERS)
    seeds = table_results(module)
    assert module.EXPERIMENT.check(seeds).verdict == "reproduced"
    better, worse = module.STATEMENTS[0]
    for shift, verdict in ((0.5, "not reproduced"), (0.0, "inconclusive")):
        changed = copy.deepcopy(seeds)
        for result, scatter in zip(changed, SCATTER, strict=True):
            result[f"{worse}_accuracy"] = result[f"{better}_accuracy"] + shift + scatter
        found = module.EXPERIMENT.check(changed)
        assert found.verdict == verdict
        assert found.numbers[f"{better}_over_{worse}_holds"] == (-1 if shift else 0)
    assert module.EXPERIMENT.check(seeds[:1]).verdict == "inconclusive"


def table_results(module):
    """Three seeds with the published accuracies, scattered a little."""
    names = list(module.PUBLISHED)
    return [
        {f"{n}_accuracy": module.PUBLISHED[n] + s * (i + 1) / 5 for i, n in enumerate(names)}
        for s in SCATTER
    ]


def test_memory_size_keeps_the_weight_of_old_tasks(tmp_path):
    settings = continual_memory.MemorySettings(
        stream="split", data="digits", tasks=2, net="8", num_data=30, test_images=20, epochs=1,
        memory=40, sizes=(4, 8), options={"fromp": {"temperature": 0.5}},
    )  # fmt: skip
    changed = continual_memory._with_memory(settings, "fromp", 8)
    assert changed.options["fromp"]["temperature"] == pytest.approx(0.5 * 40 / 8)
    assert changed.memory == 8
    result = continual_memory.run_one(settings, 0, tmp_path)
    assert len(result["fromp_average_accuracy"]) == 2
    assert result["fromp_random_largest"] == result["fromp_random_average_accuracy"][-1]
    (path,) = continual_memory.figures([result, result], tmp_path)
    assert path.exists()


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "reproduced"),
        ({"fromp_smallest": 0.6}, "not reproduced"),
        ({"fromp_largest": 0.98}, "inconclusive"),
        ({"fromp_random_largest": 0.6}, "not reproduced"),
        ({"fromp_largest": 0.99}, "not reproduced"),
    ],
)
def test_memory_size_has_four_statements(changes, verdict):
    base = {
        "fromp_smallest": 0.8, "fromp_largest": 0.9, "fromp_random_smallest": 0.7,
        "fromp_random_largest": 0.88,
    } | changes  # fmt: skip
    seeds = [
        {k: v + s * (i + 1) ** 2 / 16 for i, (k, v) in enumerate(base.items())} for s in SCATTER
    ]
    assert continual_memory.check(seeds).verdict == verdict


def test_the_toys_classes_swap_at_the_middle_height():
    stream = continual_toy.winding(3, 400, seed=0)
    for index, task in enumerate(stream):
        x, y = task.train
        assert abs(float(x[:, 0].mean()) - 2 * index) < 0.1
        middle = (x[:, 1].abs() < 0.5).nonzero().flatten()
        assert len(middle) > 50
        assert y[middle].double().mean() == float(index % 2)
        assert not torch.equal(task.train[0], task.test[0])


def test_the_toy_runs_and_draws_its_strip(tmp_path):
    settings = continual_toy.ToySettings(
        epochs=2, num_data=20, tasks=2, memory=4, strengths=(1.0, 10.0)
    )
    result = continual_toy.run_one(settings, 0, tmp_path)
    assert result["ewc_strength"] in settings.strengths
    assert result["ewc_all"] == max(result["ewc_grid"])
    assert len(result["memory"]) == 2
    assert result["fromp_old"] == result["fromp_accuracy"][-1][0]
    assert len(result["fromp_maps"][0]) == continual_toy.CELLS[0] * continual_toy.CELLS[1]
    (path,) = continual_toy.figures([result], tmp_path)
    assert path.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "reproduced"),
        ({"fromp_old": 0.85}, "not reproduced"),
        ({"ewc_old": 0.95}, "not reproduced"),
        ({"fromp_old": 0.9}, "inconclusive"),
    ],
)
def test_the_toy_asks_what_is_kept_and_what_is_lost(changes, verdict):
    base = {"fromp_old": 0.97, "ewc_old": 0.6} | changes
    seeds = [{k: v + s for k, v in base.items()} for s in SCATTER]
    for seed, scatter in zip(seeds, SCATTER, strict=True):
        seed["ewc_old"] += scatter
    assert continual_toy.check(seeds).verdict == verdict


def test_cifar_streams_put_cifar_10_before_parts_of_cifar_100(monkeypatch):
    from credo.data import ImageSet

    def load(name):
        classes = 10 if name == "cifar10" else 100
        x, y = torch.rand(200, 3, 8, 8), torch.arange(200) % classes
        return ImageSet(name, (x, y), (x, y), tuple(str(c) for c in range(classes)), "made up")

    monkeypatch.setattr("credo.data.load", load)
    settings = replace(
        continual_split_cifar.EXPERIMENT.presets["paper"], tasks=3, num_data=100, test_images=10
    )
    stream = continual_setup.make_stream(settings, 0)
    assert [task.head for task in stream] == [0, 1, 2]
    assert stream.head_sizes == (10, 10, 10)
    assert stream[2].classes == tuple(range(10, 20))


def test_strengths_are_searched_with_the_other_settings_of_the_stream(tmp_path, monkeypatch):
    seen = {}

    def learn(settings, name, seed, folder):
        seen.update(options=settings.options, name=name, seed=seed)
        return continual_setup.learn_stream(replace(TINY, options=settings.options), name, seed,
                                            folder)  # fmt: skip

    monkeypatch.setattr(continual_strengths, "learn_stream", learn)
    study = find_study("continual-permuted-mnist")
    quick = continual_permuted_mnist.EXPERIMENT.presets["quick"]
    found = study.run({"learner": "fromp", "strength": 0.5}, 7, tmp_path)
    assert set(found) == {"average_accuracy", "forgetting", "average_ece"}
    assert (seen["name"], seen["seed"]) == ("fromp", continual_strengths.SEED)
    assert seen["options"]["fromp"] == {**quick.options["fromp"], "temperature": 0.5}
    assert seen["options"]["ewc"] == quick.options["ewc"]
    assert set(continual_strengths.KNOBS) <= set(LEARNERS)
