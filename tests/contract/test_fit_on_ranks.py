"""`credo.fit` on several ranks: the run of one process with minibatches of all of them.

Float64, 54 steps, and a last minibatch of which one rank has more than the other. Sums over ranks
and over examples are taken in another order, roundings of 1e-16 that optimizers with a square root
in the denominator enlarge; 1e-6 is what a user needs, 1e-8 what is asked here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fit_work as work
import pytest
import torch
from crew import Crew, Raised

import credo
from credo.train.feed import make_feed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:the network does not look trained:UserWarning"),
]

ROOT = Path(__file__).parents[2]
every = pytest.mark.parametrize("name", work.METHODS)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    crew = Crew(2, tmp_path_factory.mktemp("crew"))
    yield crew
    crew.close()


def assert_close(found: Any, expected: Any, tolerance: float = 1e-8) -> None:
    assert not isinstance(found, Raised), found
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def assert_same_records(found: list[Any], expected: list[Any], tolerance: float = 1e-8) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in ("nll", "val_nll", "val_accuracy", "step", "epoch", "rates"):
            assert one[name] == pytest.approx(other[name], rel=tolerance), name


def assert_all_raised(answers: list[Any], kind: str, *parts: str) -> None:
    for answer in answers:
        assert isinstance(answer, Raised), answer
        assert answer.kind == kind, answer
        assert all(part in answer.message for part in parts), answer.message


def assert_same_bits(answers: list[Any]) -> None:
    (first, log), (second, other_log) = answers
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert log == other_log


# --- equalities -----------------------------------------------------------------------------------


@every
def test_two_ranks_make_the_steps_of_one_with_the_same_noise(name: str, two: Crew) -> None:
    expected, expected_log = work.fitted(name)
    for found in two.run(work.fitted, name):
        assert not isinstance(found, Raised), found
        assert_close(found[0], expected)
        assert_same_records(found[1], expected_log)


def test_a_rank_without_a_part_counts_nothing(tmp_path: Path) -> None:
    names = ["MAP", "VI", "IVON", "VOGN", "Laplace"]
    crew = Crew(3, tmp_path)
    try:
        answers = {name: crew.run(work.fitted_by_three, name) for name in names}
    finally:
        crew.close()
    for name in names:
        expected, expected_log = work.fitted_by_three(name)
        for found in answers[name]:
            assert not isinstance(found, Raised), found
            assert_close(found[0], expected)
            assert_same_records(found[1], expected_log)


def test_learned_noise_is_that_of_all_ranks(two: Crew) -> None:
    expected = work.with_learned_noise()
    for found in two.run(work.with_learned_noise):
        assert not isinstance(found, Raised), found
        for (posterior, noise), (other, other_noise) in zip(found, expected, strict=True):
            assert_close(posterior, other)
            torch.testing.assert_close(noise, other_noise, rtol=1e-8, atol=1e-8)


def test_ranks_that_draw_for_themselves_are_samples(two: Crew) -> None:
    expected = work.one_batch_for_all(samples=2)
    for found in two.run(work.one_batch_for_all, 1):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["MAP", "VI", "IVON", "VOGN"])
def test_all_ranks_have_the_same_posterior_bit_by_bit(name: str, two: Crew) -> None:
    """With draws, dropout, statistics and even first weights of their own."""
    answers = two.run(work.each_with_its_own, name)
    assert not isinstance(answers[0], Raised), answers[0]
    assert_same_bits(answers)


def test_datasets_are_shared_as_tensors_are(two: Crew) -> None:
    expected = work.datasets()[0]
    for found in two.run(work.datasets):
        for one in found:
            assert_close(one, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [5, 8, 21])
def test_parts_make_up_the_minibatch(size: int, n: int) -> None:
    """Whatever the numbers: all examples once, parts equal but for one, stand-ins known."""
    model = credo.Model(work.network(), credo.likelihoods.Categorical())

    class Place:
        def __init__(self, rank: int) -> None:
            self.size, self.rank, self.several = size, rank, size > 1

    x, y = work.data(n)
    feeds = [make_feed((x, y), 2 * size, model, ranks=Place(r)) for r in range(size)]
    whole = make_feed((x, y), 2 * size, model)
    parts = [list(feed.batches(7, 1)) for feed in feeds]
    for number, (inputs, _) in enumerate(whole.batches(7, 1)):
        own = [
            part[number][0]
            for feed, part in zip(feeds, parts, strict=True)
            if not feed.stands_in(number)
        ]
        assert torch.equal(torch.cat(own), inputs)
        assert max(map(len, own)) - min(map(len, own)) <= 1
        assert all(len(part[number][0]) for part in parts)
    assert sum(len(t) for feed in feeds for _, t in feed.own_batches(7, 1)) == n


# --- the folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MAP", "VI", "IVON", "VOGN"])
def test_a_killed_run_goes_on_bit_for_bit(name: str, two: Crew, tmp_path: Path) -> None:
    whole = two.run(work.each_with_its_own, name, tmp_path / "whole")
    cut = two.run(work.killed_and_resumed, name, tmp_path / "cut")
    assert not isinstance(cut[0], Raised), cut[0]
    assert_same_bits(cut)
    # A mean of buffers is taken at each checkpoint, of which the cut run had more: roundings.
    assert_close(cut[0][0], whole[0][0], 1e-12)
    assert_same_records(cut[0][1], whole[0][1], 1e-12)
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2, 3], "one rank writes"


@pytest.mark.parametrize("name", ["MAP", "VI", "IVON", "VOGN", "Laplace"])
def test_a_run_moves_between_numbers_of_ranks(name: str, two: Crew, tmp_path: Path) -> None:
    """By the same call: the run keeps its minibatches of eight, four on each of two ranks."""
    two.run(work.begun, name, tmp_path / "whole")
    expected, expected_log = two.run(work.continued, name, tmp_path / "whole")[0]
    two.run(work.begun, name, tmp_path / "to one")
    found, log = work.continued(name, tmp_path / "to one")
    assert_close(found, expected)
    assert [r["nll"] for r in log] == pytest.approx([r["nll"] for r in expected_log], rel=1e-8)

    work.begun(name, tmp_path / "to two")
    expected, _ = work.continued(name, tmp_path / "to two")
    work.begun(name, tmp_path / "to two again")
    for found, _ in two.run(work.continued, name, tmp_path / "to two again"):
        assert_close(found, expected)


def test_another_batch_size_is_refused_with_the_remedy(two: Crew, tmp_path: Path) -> None:
    two.run(work.begun, "MAP", tmp_path)
    with pytest.raises(credo.errors.CheckpointError, match=r"batch_size=4 on each of 2 ranks"):
        work.fit(work.METHODS["MAP"](), epochs=4, folder=tmp_path, batch_size=5)


# --- data of the user's own -----------------------------------------------------------------------


def test_a_loader_with_a_distributed_sampler(two: Crew) -> None:
    answers = two.run(work.through_loaders, "distributed")
    assert not isinstance(answers[0], Raised), answers[0]
    assert_same_bits(answers)


def test_loaders_that_do_not_share_are_refused(two: Crew) -> None:
    answers = two.run(work.through_loaders, "plain")
    assert_all_raised(answers, "DataError", "RandomSampler", "DistributedSampler(dataset)")
    answers = two.run(work.through_loaders, "another number")
    assert_all_raised(answers, "DataError", "is for 3 ranks, but there are 2")
    answers = two.run(work.through_loaders, "uneven")
    assert_all_raised(answers, "RankError", "the DataLoader of rank 0 ended after 3 batches")


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [credo.HMC(), credo.SGLD(), credo.VariationalLaplace()])
def test_methods_that_do_not_spread_say_so(method: Any, two: Crew) -> None:
    answers = two.run(work.refused, method)
    name = type(method).__name__
    assert_all_raised(
        answers, "UnsupportedError", f"{name} can't be trained by 2 ranks", "credo.VI"
    )


def test_what_a_method_can_not_spread_is_refused(two: Crew) -> None:
    answers = two.run(work.refused, credo.Laplace(evidence_every=1))
    assert_all_raised(answers, "UnsupportedError", "evidence_every", "optimise_prior")


def test_more_ranks_than_examples(two: Crew) -> None:
    assert_all_raised(two.run(work.refused, credo.MAP(), 1), "DataError", "can't be shared by 2")


def test_ranks_that_differ_are_named(two: Crew, tmp_path: Path) -> None:
    answers = two.run(work.other_settings, tmp_path / "settings")
    assert_all_raised(answers, "RankError", "rank 1 and rank 0 differ in their settings")
    answers = two.run(work.other_networks)
    assert_all_raised(answers, "RankError", "rank 1 and rank 0 differ in their number of weights")
    answers = two.run(work.weights_written_on_one_rank)
    assert_all_raised(answers, "RankError", "rank 1 and rank 0 differ in their state")


def test_ranks_that_see_different_folders(two: Crew, tmp_path: Path) -> None:
    two.run(work.other_folders, [tmp_path / "one", tmp_path / "one"])
    answers = two.run(work.other_folders, [tmp_path / "one", tmp_path / "two"])
    assert_all_raised(answers, "RankError", "differ in their view of the run's folder")


# --- mishaps --------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_all_ranks(two: Crew) -> None:
    assert_all_raised(two.run(work.nan_on_one_rank), "NonFiniteError", "the loss is nan at step 3")


def test_an_interrupt_of_one_rank_stops_all_after_the_same_step(two: Crew, tmp_path: Path) -> None:
    expected = work.told(work.fit(work.METHODS["MAP"](), epochs=4))
    for text, found in two.run(work.one_is_interrupted, tmp_path):
        assert "call fit again with folder=" in text
        assert_close(found, expected)


def test_a_rank_that_dies_ends_all_and_is_named(tmp_path: Path) -> None:
    crew = Crew(2, tmp_path)
    try:
        alive, dead = crew.run(work.one_dies, tmp_path / "run")
    finally:
        crew.close()
    assert dead is None
    assert_all_raised([alive], "RankError", "rank 0 stops, because rank 1 did not answer")
    assert (tmp_path / "run" / "state.safetensors").exists()


@pytest.mark.parametrize("members", [1, 3])
def test_members_of_an_ensemble_are_trained_by_different_ranks(
    members: int, two: Crew, tmp_path: Path
) -> None:
    """Whole minibatches and noise of their own: bit for bit those of one process."""
    alone = work.ensemble(members)
    for answer in two.run(work.ensemble, members):
        assert not isinstance(answer, Raised), answer
        assert answer[0].keys() == alone[0].keys()
        assert all(torch.equal(answer[0][name], alone[0][name]) for name in alone[0])
        for one, other in zip(answer[1], alone[1], strict=True):
            assert one.keys() == other.keys()
            for name in ("nll", "val_nll", "kl", "members"):
                assert one[name] == pytest.approx(other[name], rel=1e-12), name
    begun = two.run(work.ensemble, members, tmp_path / "run", 2)
    assert not isinstance(begun[0], Raised), begun[0]
    resumed = work.ensemble(members, tmp_path / "run")
    assert all(torch.equal(resumed[0][name], alone[0][name]) for name in alone[0])


def test_members_that_need_a_last_pass_get_it_on_every_rank(two: Crew) -> None:
    alone = work.ensemble(3, laplace=True)[0]
    for answer in two.run(work.ensemble, 3, None, 4, True):
        assert not isinstance(answer, Raised), answer
        assert answer[0].keys() == alone.keys()
        assert all(torch.equal(answer[0][name], alone[name]) for name in alone)


def test_the_script_of_the_page_runs_under_torchrun(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "ranks.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *launcher, str(script)], cwd=tmp_path, env={**os.environ, **path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.split()
    assert float(first) == float(second)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
