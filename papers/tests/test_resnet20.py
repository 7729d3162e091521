"""The residual networks, the recipes of published runs, and the experiment 004-resnet20, small."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

import credo
from credo.data import digits
from credo_papers import resnet20
from credo_papers.networks import build
from credo_papers.recipes import Recipe

PLAIN = Recipe(lr=0.1, epochs=20, batch_size=10, weight_decay=1e-3)


# --- networks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ResNet-20", "ResNet-20 GN", "ResNet-18", "ResNet-18 GN"])
def test_residual_networks_depend_on_their_seed_and_take_any_size(name: Any) -> None:
    first, again, other = (build(name, (3, 32, 32), seed, classes=7) for seed in (1, 1, 2))
    x = torch.randn(2, 3, 36, 44, generator=torch.Generator().manual_seed(0))
    outputs = [net.eval()(x) for net in (first, again, other)]
    assert outputs[0].shape == (2, 7)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def test_group_norm_keeps_examples_apart_and_batch_norm_does_not() -> None:
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone = []
    for name in ("ResNet-20 GN", "ResNet-20"):
        net = build(name, (3, 8, 8), seed=0).double()
        alone.append(torch.allclose(net(x)[:2], net(x[:2]), rtol=1e-9, atol=1e-9))
    assert alone == [True, False]


def test_stages_halve_the_resolution_and_double_the_channels() -> None:
    shapes = []
    net = build("ResNet-20", (3, 32, 32), seed=0)
    for layer in net:
        layer.register_forward_hook(lambda _, given, out: shapes.append(tuple(out.shape[1:])))
    net(torch.zeros(2, 3, 32, 32))
    blocks = [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3
    assert shapes[3:12] == blocks


# --- recipes --------------------------------------------------------------------------------------


def torch_factors(make: Any, epochs: int) -> list[float]:
    """The rates of one of torch's schedulers, epoch by epoch, for a rate of one."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("recipe", "make"),
    [
        (PLAIN, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)),
        (
            replace(PLAIN, milestones=(5, 12)),
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [5, 12]),
        ),
        (
            replace(PLAIN, milestones=(30,), warmup=4, warmup_from=0.2),
            lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.2, 1.0, 4),
        ),
    ],
    ids=["cosine", "steps", "warm-up"],
)
def test_rates_are_those_of_torchs_schedulers(recipe: Recipe, make: Any) -> None:
    found = [recipe.factor(epoch / recipe.epochs) for epoch in range(recipe.epochs)]
    assert found == pytest.approx(torch_factors(make, recipe.epochs), rel=1e-9)


def test_a_warm_up_is_followed_by_a_whole_cosine() -> None:
    recipe = replace(PLAIN, warmup=5)
    assert [recipe.factor(e / 20) for e in (0, 5)] == [0, 1]
    assert recipe.factor(12.5 / 20) == pytest.approx(0.5)
    assert recipe.factor(1.0) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["vogn", "ivon"])
def test_weight_decay_and_augmentation_reach_the_optimizer(name: str) -> None:
    recipe = replace(PLAIN, augmentation=4.0, beta2=0.9, hess_init=0.3)
    model = credo.Model(
        nn.Linear(2, 2), credo.likelihoods.Categorical(),
        credo.priors.Normal(scale=recipe.prior_precision(50) ** -0.5),
    )  # fmt: skip
    method = resnet20.method(name, recipe)
    state = method.init(model, 50, torch.Generator().manual_seed(0))
    method.update(state, (torch.randn(10, 2), torch.arange(10) % 2))
    group = state.optimizer.param_groups[0]
    effective = state.optimizer.effective_data(group)
    assert effective == pytest.approx(50 * 4.0)
    assert group["prior_precision"] / effective == pytest.approx(1e-3)


# --- the experiment -------------------------------------------------------------------------------

SMALL = resnet20.ResNetSettings(
    net="ResNet-20 GN", num_data=24, epochs=2, reduction=4, prediction_samples=2, test_images=40,
    ood_images=30,
    recipes={
        "adam": Recipe(lr=1e-3, epochs=2, batch_size=12, weight_decay=1e-4),
        "vogn": Recipe(lr=1e-3, epochs=1, batch_size=12, weight_decay=1e-4, hess_init=0.5),
        "ivon": Recipe(lr=0.1, epochs=1, batch_size=12, weight_decay=1e-4, hess_init=0.5),
    },
)  # fmt: skip


def small_images(name: str) -> credo.data.ImageSet:
    """The embedded 8×8 digits in colour and in the size of CIFAR's images."""
    images = digits()
    train, test = (
        (interpolate(x[:50], size=32).expand(-1, 3, -1, -1), y[:50])
        for x, y in (images.train, images.test)
    )
    return replace(images, train=train, test=test)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credo.data.load", small_images)
        found = resnet20.run_one(SMALL, 0, tmp_path_factory.mktemp("run"))
    return json.loads(json.dumps(found, allow_nan=False))


def test_a_small_run_scores_every_method(result: dict[str, Any], tmp_path: Path) -> None:
    for name, recipe in SMALL.recipes.items():
        assert len(result[f"{name}_curve"]) == recipe.epochs
        assert 0 <= result[f"{name}_accuracy"] <= 1
        assert 0 <= result[f"{name}_auroc"] <= 1
    numbers = resnet20.check([result]).numbers
    assert all(math.isfinite(value) for value in numbers.values())
    (figure,) = resnet20.figures([result, result], tmp_path)
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize("preset", ["quick", "paper"])
def test_presets_have_a_recipe_for_each_method_and_name_the_longest(preset: str) -> None:
    settings = resnet20.EXPERIMENT.presets[preset]
    assert list(settings.recipes) == list(resnet20.METHODS)
    assert settings.epochs == max(recipe.epochs for recipe in settings.recipes.values())


def test_the_paper_preset_is_the_published_one() -> None:
    settings = resnet20.EXPERIMENT.presets["paper"]
    vogn, ivon = settings.recipes["vogn"], settings.recipes["ivon"]
    assert vogn.prior_precision(settings.num_data) == pytest.approx(50)
    assert ivon.prior_precision(settings.num_data) == pytest.approx(10)
    assert [vogn.lr * vogn.factor(e / 161) for e in (0, 81, 121)] == pytest.approx(
        [1e-3, 1e-4, 1e-5]
    )


def three_seeds(**changes: float) -> list[dict[str, float]]:
    """Results in which VOGN and IVON have all that is claimed, but for what is given."""
    better = {"accuracy": 0.895, "nll": 0.25, "ece": 0.02, "auroc": 0.85}
    scores = {"adam_accuracy": 0.90, "adam_nll": 0.30, "adam_ece": 0.05, "adam_auroc": 0.80}
    for name in ("vogn", "ivon"):
        scores |= {f"{name}_{key}": value for key, value in better.items()}
    scores |= changes
    return [
        {key: value + (0 if key.startswith("adam") else jitter) for key, value in scores.items()}
        for jitter in (-1e-3, 0.0, 1e-3)
    ]


@pytest.mark.parametrize(
    ("key", "fails", "undecided"),
    [("accuracy", 0.87, 0.88), ("nll", 0.31, 0.30), ("ece", 0.06, 0.05)],
)
def test_vogn_decides_by_any_one_statement(key: str, fails: float, undecided: float) -> None:
    def verdict(name: str, value: float) -> str:
        return resnet20.check(three_seeds(**{f"{name}_{key}": value})).verdict

    assert verdict("vogn", fails) == "not reproduced"
    assert verdict("vogn", undecided) == "inconclusive"
    assert verdict("ivon", fails) == "reproduced"


def test_one_seed_decides_nothing_and_numbers_tell_which_statement_failed() -> None:
    assert resnet20.check(three_seeds()).verdict == "reproduced"
    assert resnet20.check(three_seeds()[:1]).verdict == "inconclusive"
    numbers = resnet20.check(three_seeds(ivon_ece=0.06)).numbers
    assert [key for key, value in numbers.items() if value == -1] == ["ivon_calibration_holds"]
