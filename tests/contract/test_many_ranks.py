"""Many ranks make the step that one rank would make with all their draws and all their data.

Float64; sums over ranks and over examples are taken in another order, a few roundings of 1e-16 each
through five steps of rates below one, hence 1e-12 where 1e-6 is what a user needs.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_work as work
import torch
from crew import Crew, Raised

import credo.collectives
from credo.autodiff.squares import Squares
from credo.errors import DataError, RankError
from credo.network import bind
from credo.network.selection import Selection

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
every = pytest.mark.parametrize("kind", list(work.KINDS))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    crew = Crew(2, tmp_path_factory.mktemp("crew"))
    yield crew
    crew.close()


def alone(kind: str, blocks: int = 1) -> Any:
    net = work.network()
    opt = work.make(kind, net)
    work.train(opt, net, 0, 5, blocks)
    return work.outcome(opt, net)


ROUNDING = {"EVON": 1e-7}
"""Directions that no gradient had are told apart by √ε of the moments: roundings grow by 1/√ε."""


def assert_same(found: Any, expected: Any, kind: str = "") -> None:
    assert not isinstance(found, Raised), found
    tolerance = ROUNDING.get(kind, 1e-12)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def assert_all_raised(answers: list[Any], kind: str, *parts: str) -> None:
    for answer in answers:
        assert isinstance(answer, Raised), answer
        assert answer.kind == kind, answer
        assert all(part in answer.message for part in parts), answer.message


# --- equalities -----------------------------------------------------------------------------------


@every
def test_half_batches_with_the_same_noise_are_the_whole_batch(kind: str, two: Crew) -> None:
    expected = alone(kind)
    for found in two.run(work.shares_of_a_batch, kind, (4, 4)):
        assert_same(found, expected, kind)


@every
@pytest.mark.parametrize("blocks", [1, 2])
def test_different_noise_is_that_of_several_samples(kind: str, blocks: int, two: Crew) -> None:
    expected = alone(kind, 2 * blocks)
    for found in two.run(work.own_draws, kind, blocks):
        assert_same(found, expected, kind)


@every
def test_divided_losses_are_added_on_each_rank(kind: str, two: Crew) -> None:
    expected = alone(kind, 4)
    for found in two.run(work.added_blocks, kind, 2):
        assert_same(found, expected, kind)


def test_vogn_weighs_ranks_by_their_examples(two: Crew) -> None:
    for found in two.run(work.shares_of_a_batch, "VOGN", (3, 5)):
        assert_same(found, alone("VOGN"))


@every
@pytest.mark.parametrize("draws", ["table", "normal"])
def test_weights_stay_equal_bit_by_bit(kind: str, draws: str, two: Crew) -> None:
    first, second = two.run(work.own_draws_of_own_data, kind, draws)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], work.weights(work.network(torch.float32)))


@every
def test_a_state_moves_between_numbers_of_ranks(kind: str, two: Crew) -> None:
    """One rank with two samples and two ranks with one are the same run, so each may go on."""
    whole = work.network()
    opt = work.make(kind, whole)
    work.train(opt, whole, 0, 3, 2)
    on_one = copy.deepcopy((opt.state_dict(), whole.state_dict()))
    work.train(opt, whole, 3, 6, 2)
    expected = work.outcome(opt, whole)

    for found in two.run(work.continued, kind, *on_one):
        assert_same(found, expected, kind)
    state, values = two.run(work.stopped, kind)[1]
    net = work.network(seed=5)
    other = work.make(kind, net, seed=77)
    net.load_state_dict(values)
    other.load_state_dict(state)
    work.train(other, net, 3, 6, 2)
    assert_same(work.outcome(other, net), expected, kind)


def test_notes_are_exact_in_half_precision(two: Crew) -> None:
    for total, notes in two.run(work.half_precision):
        assert total.dtype == torch.bfloat16
        assert float(total) == torch.tensor(257.0, dtype=torch.bfloat16)
        assert notes.tolist() == [[257.0], [258.0]], "bfloat16 has no 257"


def test_each_rank_can_train_for_itself(two: Crew) -> None:
    for rank, found in enumerate(two.run(work.small_groups)):
        net = work.network()
        opt = work.make("IVON", net)
        work.train(opt, net, 0, 3 + rank)
        assert_same(found, work.outcome(opt, net))


# --- DistributedDataParallel ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["EVON", "IVON", "VOGN", "Vadam", "VON"])
@pytest.mark.parametrize("way", ["given", "views", "no_sync", "hook"])
def test_ddp_that_does_not_average_changes_nothing(kind: str, way: str, two: Crew) -> None:
    expected = two.run(work.without_ddp, kind)[0]
    for found in two.run(work.with_ddp, kind, way):
        assert_same(found, expected)


@pytest.mark.parametrize("kind", ["EVON", "IVON", "VOGN", "Vadam", "VON"])
@pytest.mark.parametrize("way", ["network", "parameters"])
def test_plain_ddp_is_refused(kind: str, way: str, two: Crew) -> None:
    answers = two.run(work.with_ddp, kind, way)
    assert_all_raised(
        answers, "UnsupportedError", "no_sync", "leave_alone", "Give the optimizer the Distributed"
    )


def test_averages_made_by_others_are_noticed(two: Crew) -> None:
    answers = two.run(work.averaged_by_hand, "IVON")
    assert_all_raised(answers, "UnsupportedError", "the very same gradients")


def test_a_posterior_has_the_networks_own_names(two: Crew) -> None:
    names, mean = two.run(work.posterior_of_ddp)[0]
    assert names == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert mean.numel() == 26


# --- ranks that disagree --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["IVON", "VOGN"])
@pytest.mark.parametrize("counts", [(1, 2), (1, 0)])
def test_unequal_numbers_of_blocks_are_refused_everywhere(
    kind: str, counts: tuple[int, int], two: Crew
) -> None:
    answers = two.run(work.unequal_blocks, kind, counts)
    for error, nothing_lost, _ in answers:
        assert error[0] == "RankError"
        assert f"rank 0: {counts[0]}, rank 1: {counts[1]}" in error[1]
        assert nothing_lost
    assert torch.equal(answers[0][2][0], answers[1][2][0]), "and the next step works"


def test_no_draw_at_all(two: Crew) -> None:
    for error, _, _ in two.run(work.unequal_blocks, "IVON", (0, 0)):
        assert error[0] == "UnsupportedError"
        assert "with optimizer.sampled()" in error[1]


def test_different_weights_are_refused_and_can_be_made_equal(two: Crew) -> None:
    answers = two.run(work.different_weights, False)
    assert_all_raised(answers, "RankError", "rank 1 and rank 0 differ in their weights")
    first, second = two.run(work.different_weights, True)
    assert torch.equal(first[0], second[0])


def test_other_disagreements_are_named(two: Crew) -> None:
    answers = two.run(work.different_networks)
    assert_all_raised(answers, "RankError", "rank 1 and rank 0 differ in their number of weights")
    answers = two.run(work.one_rank_loads)
    assert_all_raised(answers, "RankError", "rank 1 and rank 0 differ in their step")


def test_ranks_that_join_after_the_optimizer_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    net = work.network()
    opt = work.make("IVON", net)
    monkeypatch.setattr(credo.collectives.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(credo.collectives.dist, "get_world_size", lambda: 4)
    with pytest.raises(RankError, match="4 ranks were joined after"):
        work.train(opt, net, 0, 1)


# --- numbers that are not finite ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["EVON", "IVON", "VOGN", "Vadam", "VON"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(kind: str, two: Crew) -> None:
    """The ranks' scalers then differ, which must not matter."""
    expected = two.run(work.after_a_skip, kind)[0]
    answers = two.run(work.overflow_on_one_rank, kind)
    assert [scale for _, scale, _ in answers] == [1024.0, 512.0]
    for nothing_changed, _, found in answers:
        assert nothing_changed
        assert_same(found, expected)


def test_nan_on_one_rank_is_an_error_on_all(two: Crew) -> None:
    assert_all_raised(two.run(work.nan_on_one_rank), "NonFiniteError", "0.weight")


# --- ranks that die -------------------------------------------------------------------------------


def test_a_rank_that_dies_is_named_by_the_others(tmp_path: Path) -> None:
    crew = Crew(3, tmp_path)
    try:
        first, dead, last = crew.run(work.one_dies)
    finally:
        crew.close()
    assert dead is None
    assert_all_raised([first], "RankError", "rank 0 stops, because rank 1 did not answer")
    assert_all_raised([last], "RankError", "rank 2 stops, because rank 1 did not answer")


def test_a_rank_that_hangs_is_named_after_the_timeout(two: Crew) -> None:
    waiting, _ = two.run(work.one_hangs)
    assert_all_raised([waiting], "RankError", "because rank 1 did not answer", "Timed out")


def test_a_slow_rank_is_waited_for(two: Crew) -> None:
    first, second = two.run(work.one_is_slow)
    assert torch.equal(first[0], second[0])


def python(*command: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "support")])
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def torchrun(ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    return python(*launcher, ranks, *command)


def test_torchrun_ends_when_a_rank_dies(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist, rank_work\n"
        "dist.init_process_group('gloo')\n"
        "rank_work.one_dies()\n"
    )
    run = torchrun(2, script)
    assert run.returncode != 0
    # Torchrun kills the survivors, perhaps before they have said the same.
    assert "rank 1 did not answer" in run.stderr or "(local_rank: 1)" in run.stderr


def test_the_launcher_example_runs_and_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    example = ROOT / "examples" / "train_cifar10_ranks.py"
    options = ["--synthetic", "--batch-size", "20", "--samples", "1", "--checkpoint",
               tmp_path / "checkpoint.pt"]  # fmt: skip
    first = torchrun(2, example, *options, "--epochs", "1")
    assert first.returncode == 0, first.stderr
    assert "2 rank(s), from epoch 0 of 1" in first.stdout
    second = python(example, *options, "--epochs", "2")
    assert second.returncode == 0, second.stderr
    assert "1 rank(s), from epoch 1 of 2" in second.stdout
    assert "epoch 2: loss" in second.stdout
    assert "accuracy" in second.stdout


def test_nothing_to_square_is_refused() -> None:
    with pytest.raises(DataError, match="the selection is empty"):
        Squares(bind(work.network()), Selection.of([]))
