"""The experiments of Huix et al. (2022) over widths and temperatures, small, and their verdicts."""

import copy
import json
import math

import pytest

from credo_papers import balanced_resnet, temperature_setup, width_temperature

TINY = {
    "data": "digits", "foreign": "digits", "num_data": 96, "test_images": 60, "epochs": 1,
    "batch_size": 48, "prediction_samples": 2, "taus": (0.01, 1.0, 100.0), "pool": 1,
}  # fmt: skip
SMALL = {
    width_temperature: width_temperature.WidthSettings(**TINY, widths=(8, 32)),
    balanced_resnet: balanced_resnet.ResNetSettings(**TINY, widths=(4, 8)),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One small run of each, as it comes back from the disk; and again, from what was kept."""
    found = {}
    for module, settings in SMALL.items():
        folder = tmp_path_factory.mktemp("run")
        result = module.run_one(settings, 0, folder)
        found[module] = json.loads(json.dumps(result, allow_nan=False))
        assert json.loads(json.dumps(module.run_one(settings, 0, folder))) == found[module]
    return found


@pytest.mark.parametrize("module", SMALL, ids=lambda m: m.EXPERIMENT.id)
def test_every_run_gives_numbers_and_figures(module, results, tmp_path) -> None:
    experiment = module.EXPERIMENT
    assert experiment.paper == "000"
    assert "Ours" in experiment.claim
    assert list(experiment.presets) == ["quick", "paper"]
    found = experiment.check([results[module]])
    assert found.verdict == "inconclusive"  # one seed decides nothing
    assert all(math.isfinite(value) for value in found.numbers.values())
    figures = experiment.figures([results[module], results[module]], tmp_path)
    assert all(path.stat().st_size > 10_000 for path in figures)


def test_temperatures_are_what_they_are_called(results) -> None:
    for module, result in results.items():
        found = result["mean_field"] if module is width_temperature else result
        for width in found["widths"]:
            assert found[f"{width}_tau"][:-1] == pytest.approx(found["taus"])
            assert found[f"{width}_eta"][-1] == 1.0
    # 64·8 + 8·10 weights, 96 images.
    eta = results[width_temperature]["mean_field"]["8_eta"][1]
    assert eta == pytest.approx(96 / 592)


def test_the_document_s_network_is_the_mean_over_its_units() -> None:
    model = width_temperature.model("mean_field", 64, 10, 3, seed=0)
    assert model.random.size == 10 * (64 + 3)
    paper = balanced_resnet.residual_net(16, 3, 10)
    convolutions = [m for m in paper.modules() if type(m).__name__ == "Conv2d"]
    assert len([m for m in convolutions if m.kernel_size == (3, 3)]) == 19


# --- verdicts on made-up curves -------------------------------------------------------------------


def made_up() -> dict:
    """Curves that depend on τ alone: every statement holds."""
    taus = [0.01, 0.1, 1.0, 10.0]
    found = {"widths": [10, 1000], "taus": taus}
    for width in found["widths"]:
        found |= {
            f"{width}_tau": [*taus, width / 50],
            f"{width}_eta": [50 * tau / width for tau in taus] + [1.0],
            f"{width}_nll": [0.4, 0.3, 0.5, 2.0, 2.29],
            f"{width}_confidence": [0.9, 0.8, 0.5, 0.2, 0.11],
        }
    return found


def verdict(*results) -> str:
    return temperature_setup.verdict(temperature_setup.judged(list(results))).verdict


def scattered(result: dict) -> list[dict]:
    """Three seeds that differ a little."""
    seeds = []
    for noise in (-1e-3, 0.0, 1e-3):
        seed = copy.deepcopy(result)
        for width in seed["widths"]:
            seed[f"{width}_nll"] = [value + noise for value in seed[f"{width}_nll"]]
        seeds.append(seed)
    return seeds


def test_curves_of_tau_are_reproduced_and_every_statement_can_fail() -> None:
    assert verdict(*scattered(made_up())) == "reproduced"
    for change in (
        lambda r: r.update({"1000_nll": [2.0, 2.2, 2.3, 2.3, 2.29]}),  # not aligned
        lambda r: r["1000_nll"].__setitem__(-1, 0.4),  # not collapsed
        lambda r: r.update({f"{w}_nll": [0.2, 0.3, 0.5, 2.0, 2.29] for w in r["widths"]}),
        lambda r: r["10_confidence"].__setitem__(1, 0.95),  # not monotone
    ):
        bad = made_up()
        change(bad)
        assert verdict(*scattered(bad)) == "not reproduced"
