"""What every experiment's tests ask of it at a tiny scale."""

import json
import math


def stored_results(small, tmp_path_factory):
    """One run of each module's experiment with its small settings, as it comes back from disk."""
    found = {}
    for module, settings in small.items():
        result = module.run_one(settings, 0, tmp_path_factory.mktemp("run"))
        found[module] = json.loads(json.dumps(result, allow_nan=False))
    return found


def verdict_of_one(experiment, paper, result, folder):
    """The verdict of a single seed, after what holds for every experiment was asserted."""
    assert experiment.paper == paper
    assert experiment.id.startswith(f"{paper}-")
    assert list(experiment.presets) == ["quick", "paper"]
    for preset in experiment.presets:
        json.dumps(experiment.scale(preset), allow_nan=False)
    verdict = experiment.check([result])
    assert all(math.isfinite(value) for value in verdict.numbers.values())
    for seeds in (1, 2):
        figures = experiment.figures([result] * seeds, folder)
        assert all(path.stat().st_size > 10_000 for path in figures)
    return verdict.verdict
