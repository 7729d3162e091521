"""The page says what the evidence says, in every kind, and nothing in it can break out of it."""

import dataclasses
import functools
import json
import math
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from evidences import HOSTILE, classes, numbers, pixels

from credo.errors import DataError, MissingExtraError
from credo.metrics import reliability, reliability_of_confidence
from credo.report import Evidence, Run, comparison_page, run_page

VOID = {"meta", "link", "img", "input", "br"}
MAKE = {
    "classes": classes,
    "rows": lambda: classes(("MAP", "VI"), pictures=False, seeds=1),
    "numbers": numbers,
    "pixels": pixels,
    "hostile": lambda: classes((HOSTILE, "VI"), seeds=2),
    "one run": lambda: classes(("MAP",), seeds=1),
}


@functools.cache
def page_of(kind: str) -> str:
    return comparison_page(MAKE[kind](), "A title")


class Reader(HTMLParser):
    """The page as its text, its headings, its attributes; unbalanced tags are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append((tag, found))
        if "id" in found:
            self.ids.append(str(found["id"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, f"<{tag}/> closes itself outside of SVG"
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text.setdefault(tag, []).append(data)

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [found for name, found in self.elements if name == tag]

    def texts(self, tag: str) -> str:
        return " ".join(" ".join(self.text.get(tag, [])).split())


@pytest.mark.parametrize("name", MAKE)
def test_it_is_well_formed_and_ids_are_unique(name: str) -> None:
    reader = Reader(page_of(name))
    assert reader.open == []
    assert len(set(reader.ids)) == len(reader.ids)
    used = set(re.findall(r'(?:href="|url\()#([\w-]+)', page_of(name)))
    assert used <= set(reader.ids)


@pytest.mark.parametrize("name", MAKE)
def test_it_loads_nothing_from_elsewhere(name: str) -> None:
    assert "://" not in page_of(name)
    reader = Reader(page_of(name))
    for tag, found in reader.elements:
        for source in ("src", "href"):
            if source in found:
                assert str(found[source]).startswith(("#", "data:")), tag
    policy = next(m["content"] for m in reader.all("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "@import" not in page_of(name)


@pytest.mark.parametrize("name", MAKE)
def test_every_figure_says_what_it_shows(name: str) -> None:
    reader = Reader(page_of(name))
    plots = [found for _, found in reader.elements if found.get("class") == "plot"]
    assert len(plots) == len([f for _, f in reader.elements if f.get("role") == "img"]) > 0
    assert all(len(str(plot["aria-label"])) > 25 for plot in plots)
    assert all(image["alt"] for image in reader.all("img"))
    assert all(svg.get("aria-hidden") == "true" for svg in reader.all("svg"))


@pytest.mark.parametrize("name", MAKE)
def test_figures_are_xml_by_themselves(name: str) -> None:
    found = re.findall(r"<svg .*?</svg>", page_of(name), flags=re.DOTALL)
    assert found
    for svg in found:
        ElementTree.fromstring(svg)


def test_hostile_names_are_text_everywhere() -> None:
    made = MAKE["hostile"]()
    evil = dataclasses.replace(
        made,
        classes=(HOSTILE, "b", "c"),
        about={HOSTILE: {HOSTILE: HOSTILE}, "notes": [HOSTILE]},
        runs=[*made.runs, Run(HOSTILE + "2", 0, error=HOSTILE)],
    )
    page = comparison_page(evil, HOSTILE)
    reader = Reader(page)
    assert reader.open == []
    own = [s for s in reader.all("script") if "type" not in s]
    assert len(own) == 1
    assert {s["type"] for s in reader.all("script") if s not in own} == {"application/json"}
    assert "alert(" not in "".join(re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL))
    assert HOSTILE in reader.texts("h1")
    assert HOSTILE in reader.texts("table")
    assert "49" not in reader.texts("h1")


def test_marks_are_json_with_known_methods() -> None:
    page = page_of("hostile")
    blocks = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page)
    *marks, methods = (json.loads(block) for block in blocks)
    assert methods["m0"][0] == HOSTILE
    assert {mark[2] for rows in marks for mark in rows} <= {"", *methods}
    assert all(len(mark) == 5 for rows in marks for mark in rows)


def headings(page: str) -> list[str]:
    return re.findall(r"<h2 [^>]*>([^<]*)</h2>", page)


def test_sections_follow_the_kind_of_evidence() -> None:
    about_classes, about_numbers = headings(page_of("classes")), headings(page_of("numbers"))
    both = {"The table", "Compared with MAP", "Does it know when it is wrong?"}
    both |= {"What happens under shift?", "Does it notice foreign data?", "Examples to look at"}
    assert both <= set(about_classes)
    assert both <= set(about_numbers)
    assert "Is the confidence right?" in about_classes
    assert "Are the intervals right?" in about_numbers
    assert {"What does it cost?", "How did training go?"} <= set(about_classes)
    assert {"Is the confidence right?", "Examples to look at"} <= set(headings(page_of("pixels")))
    assert "Compared with MAP" not in headings(page_of("one run"))


def test_without_evidence_only_the_table_and_the_words_remain() -> None:
    page = comparison_page(Evidence("classification", [Run("MAP", 0, {"nll": 0.3})]))
    assert headings(page) == [
        "The table", "What the numbers mean, and what they do not", "What made this",
    ]  # fmt: skip


def cells(page: str) -> dict[str, list[str]]:
    """The rows of the first table by method."""
    table = re.search(r"<table class=\"scores.*?</table>", page, flags=re.DOTALL)
    assert table is not None
    rows = {}
    for row in re.findall(r"<tr.*?</tr>", table.group(), flags=re.DOTALL)[1:]:
        first, *rest = (
            " ".join(re.sub(r"<[^>]*>", " ", cell).split())
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row, flags=re.DOTALL)
        )
        rows[first] = rest
    return rows


def test_the_table_holds_means_errors_the_floor_and_reasons() -> None:
    runs = [
        Run("A", 0, {"nll": 0.1, "ece": 0.02, "ece_floor": 0.01}),
        Run("A", 1, {"nll": 0.3, "ece": 0.04, "ece_floor": 0.01}),
        Run("B", 0, {"nll": 0.5, "ece": 0.01, "ece_floor": 0.01}),
        Run("B", 1, error="NonFiniteError: at step 3"),
        Run("C", 0, error="too large"),
        Run("C", 1, error="too large"),
    ]
    page = comparison_page(Evidence("classification", runs))
    rows = cells(page)
    assert rows["A"] == ["0.200 ± 0.100", "0.030 ± 0.010 floor 0.010"]
    assert rows["B 1 of 2 runs"] == ["0.500", "0.010 floor 0.010"]
    assert rows["C"] == ["failed · seeds 0, 1: too large"]
    assert "seed 1: NonFiniteError: at step 3" in page
    assert page.count('class="best"') == 2


def test_what_may_be_chance_is_marked_and_what_is_not_is_not() -> None:
    def run(name: str, seed: int, nll: float) -> Run:
        return Run(name, seed, {"nll": nll})

    runs = [run("best", s, 0.10 + 0.01 * s) for s in range(5)]
    runs += [run("close", s, 0.10 + 0.01 * s + 0.02 * (-1) ** s) for s in range(5)]
    runs += [run("far", s, 0.90 + 0.01 * s + 1e-4 * (-1) ** s) for s in range(5)]
    page = comparison_page(Evidence("classification", runs))
    rows = cells(page)
    assert "≈" in rows["close"][0]
    assert "≈" not in rows["far"][0]
    assert "close can’t be told apart from it" in page
    # best is the base: of the two differences to it one is told apart
    assert page.count(", told apart") == 2  # in the label, and in the mark


def test_one_seed_is_compared_by_examples_and_says_so() -> None:
    reader = Reader(page_of("rows"))
    assert "paired by test example" in reader.texts("p")
    assert "paired by seed" not in reader.texts("p")
    labels = [str(f.get("aria-label")) for _, f in reader.elements if f.get("role") == "img"]
    assert any("NLL minus that of MAP" in label and "95 %" in label for label in labels)
    assert any("ECE minus that of MAP" in label and "95 %" not in label for label in labels)


def test_the_reference_wins_nothing() -> None:
    runs = [Run(n, s, {"nll": v + s / 99}) for n, v in (("A", 0.2), ("B", 0.3), ("HMC", 0.1))
            for s in (0, 1)]  # fmt: skip
    page = comparison_page(Evidence("classification", runs, about={"reference": "HMC"}))
    assert "Lowest NLL: A" in page
    assert "HMC minus" not in page
    assert "Lowest NLL: HMC" in comparison_page(Evidence("classification", runs))


def test_examples_are_the_most_uncertain_and_the_surest_mistakes() -> None:
    entropy = np.array([0.1, 0.9, 0.2, 0.3])
    arrays = {
        "entropy": entropy, "confidence": np.array([0.99, 0.4, 0.95, 0.7]),
        "correct": np.array([1, 1, 0, 0]), "predicted": np.array([0, 1, 2, 2]),
    }  # fmt: skip
    evidence = Evidence(
        "classification", [Run("VI", 0, {"nll": 1.0}, arrays)], np.arange(256.0).reshape(4, 8, 8),
        np.array([0, 1, 0, 1]), ("ant", "bee", "cat"),
    )  # fmt: skip
    page = comparison_page(evidence)
    said = re.findall(r'class="said">([^<]*)<', page)
    assert said == ["bee, 40%", "cat, 70%", "cat, 95%", "ant, 99%", "cat, 95%", "cat, 70%"]
    some = dataclasses.replace(evidence, inputs=evidence.inputs[1:3], input_index=np.array([1, 2]))  # type: ignore[index]
    page = comparison_page(some)
    assert re.findall(r'class="said">([^<]*)<', page) == ["bee, 40%", "cat, 95%", "cat, 95%"]
    assert "the 2 of 4 test examples that were kept" in page


def test_rows_of_a_table_are_shown_under_their_features() -> None:
    reader = Reader(page_of("numbers"))
    assert "age" in reader.texts("th")
    assert "x4" in reader.texts("th")  # beyond the names that are known
    assert not reader.all("img")


def test_training_without_kl_is_absent_from_its_figure() -> None:
    history = [{"epoch": e, "nll": 1.0 / (e + 1), "flag": True} for e in range(3)]
    with_kl = [{**record, "kl": 5.0} for record in history]
    runs = [Run("MAP", 0, {"nll": 1}, history=history), Run("VI", 0, {"nll": 1}, history=with_kl)]
    page = comparison_page(Evidence("classification", runs))
    label = re.search(r'aria-label="(KL to the prior[^"]*)"', page)
    assert label is not None
    assert "VI 5" in label.group(1)
    assert "MAP" not in label.group(1)


def test_scores_that_are_not_finite_are_dashes() -> None:
    runs = [Run("A", 0, {"nll": math.nan, "ece": math.inf}), Run("B", 0, {"nll": 0.5})]
    rows = cells(comparison_page(Evidence("classification", runs)))
    assert rows == {"A": ["—", "—"], "B": ["0.500", "—"]}


def test_many_methods_keep_looks_of_their_own() -> None:
    names = [f"method {i}" for i in range(20)]
    page = comparison_page(Evidence("classification", [Run(n, 0, {"nll": 1.0}) for n in names]))
    chips = re.findall(r"<label>.*?(<svg.*?</svg>)", page, flags=re.DOTALL)
    assert len(set(chips)) == 20


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        (Evidence("classification", []), "at least one run, but the evidence has none"),
        (Evidence("ranking", [Run("A", 0)]), "one of classification.*but it is 'ranking'"),
    ],
)
def test_evidence_that_is_none_is_refused(evidence: Evidence, message: str) -> None:
    with pytest.raises(DataError, match=message):
        comparison_page(evidence)


def test_all_runs_may_have_failed() -> None:
    page = comparison_page(Evidence("regression", [Run("A", 0, error="no memory")]))
    assert cells(page) == {"A": ["failed · seed 0: no memory"]}


def test_without_jinja2_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r'pip install "credo-bayes\[report\]"'):
        comparison_page(Evidence("classification", [Run("A", 0, {"nll": 1.0})]))


def test_runs_of_fit_have_a_page_without_best_or_meaning() -> None:
    history = [{"epoch": e, "nll": 1.0 / (e + 1)} for e in range(3)]
    runs = [Run(n, s, {"Training NLL": 0.3}, history=history) for s, n in enumerate("ab")]
    page = run_page(runs, "Mine")
    assert headings(page) == ["At the end of training", "How did training go?", "What made this"]
    assert 'class="best"' not in page
    assert Reader(page).open == []


def test_reliability_of_confidence_is_that_of_probabilities() -> None:
    rng = np.random.RandomState(3)
    probs = rng.dirichlet(np.full(4, 0.4), size=300)
    labels = rng.randint(0, 4, 300)
    whole = reliability(probs, labels)
    part = reliability_of_confidence(probs.max(1), probs.argmax(1) == labels)
    np.testing.assert_array_equal(part.count, whole.count)
    np.testing.assert_allclose(part.accuracy, whole.accuracy)
    np.testing.assert_allclose(part.confidence, whole.confidence)
