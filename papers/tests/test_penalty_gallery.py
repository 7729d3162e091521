"""The gallery of penalties: what hangs in it, and that the verdict can fail."""

import json
import math

import pytest

from credo_papers import find, penalty_gallery
from credo_papers.penalty_gallery import EXPERIMENT, GALLERY, GallerySettings


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    found = penalty_gallery.run_one(GallerySettings(), 0, tmp_path_factory.mktemp("run"))
    return json.loads(json.dumps(found, allow_nan=False))


def test_every_penalty_gets_the_theorems_answer(result):
    verdict = EXPERIMENT.check([result])
    assert verdict.verdict == "reproduced"
    assert verdict.numbers["right_verdicts"] == len(GALLERY)
    assert verdict.numbers["L1_alone_has_a_prior"] == 0
    assert verdict.numbers["L1_averaged_has_a_prior"] == 1
    assert all(math.isfinite(value) for value in verdict.numbers.values())
    answers = [picture["answer"] for picture in result["pictures"]]
    assert answers.count("Normal, scale 0.5") == 2
    assert answers.count("Laplace, scale 0.707") == 2


def test_a_wrong_verdict_or_density_is_not_a_reproduction(result):
    for wrong in (
        {"right_verdicts": len(GALLERY) - 1},
        {"largest_density_error": 1e-3},
    ):
        assert EXPERIMENT.check([result | wrong]).verdict == "not reproduced"


def test_the_gallery_is_drawn(result, tmp_path):
    few = result | {"pictures": [result["pictures"][index] for index in (1, 3, 11)]}
    (path,) = EXPERIMENT.figures([few], tmp_path)
    assert path.stat().st_size > 10_000


def test_it_is_registered_as_a_theorem_of_its_paper():
    experiment = find("001-penalty-gallery")
    assert experiment.theorem
    assert experiment.paper == "001"
    assert penalty_gallery.GALLERY[0].name == "L2_with_σ"
