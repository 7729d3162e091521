"""Streams, heads, learners' folders and reports of continual learning."""

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import credo
import credo.train.loop
from credo.continual import (
    EWC,
    SI,
    Joint,
    KroneckerLaplace,
    MultiHead,
    Naive,
    OnlineEWC,
    Replay,
    Report,
    Stream,
    Task,
    Training,
    permuted,
    rotated,
    run,
    sequence,
    split,
)
from credo.continual.baselines import Remembered, chosen_rows
from credo.continual.heads import IMPOSSIBLE
from credo.continual.streams import turned
from credo.data import digits
from credo.errors import CheckpointError, DataError, UnsupportedError
from credo.metrics.forgetting import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forgetting_per_task,
    forward_transfer,
)
from credo.network.batches import joined
from credo.train.progress import Reporter

# --- metrics --------------------------------------------------------------------------------------

MATRIX = [[0.9, 0.5, 0.2], [0.95, 0.8, 0.3], [0.6, 0.7, 1.0]]


def test_transfer_and_forgetting_of_a_matrix_made_by_hand():
    assert average_accuracy(MATRIX) == pytest.approx((0.6 + 0.7 + 1.0) / 3)
    assert backward_transfer(MATRIX) == pytest.approx(((0.6 - 0.9) + (0.7 - 0.8)) / 2)
    # The first task was at its best after the second.
    assert forgetting_per_task(MATRIX) == pytest.approx([0.95 - 0.6, 0.8 - 0.7])
    assert forgetting(MATRIX) == pytest.approx((0.35 + 0.1) / 2)
    before = [0.5, 0.4, 0.1]
    assert forward_transfer(MATRIX, before) == pytest.approx(((0.5 - 0.4) + (0.3 - 0.1)) / 2)


def test_one_task_has_an_average_and_nothing_to_forget():
    assert average_accuracy([[0.7]]) == 0.7
    for number in (backward_transfer([[0.7]]), forgetting([[0.7]]), forward_transfer([[0.7]], [0])):
        assert math.isnan(number)


def test_matrices_that_cannot_be_meant_are_refused():
    with pytest.raises(DataError, match=r"\(T, T\)"):
        average_accuracy([[0.5, 0.5]])
    with pytest.raises(DataError, match="each of 3 tasks"):
        forward_transfer(MATRIX, [0.1, 0.2])


# --- streams --------------------------------------------------------------------------------------


def test_permuted_tasks_hold_the_same_pixels_in_another_order():
    data = digits()
    stream = permuted(data, tasks=3, seed=1)
    x, data_test = data.train[0].flatten(1), data.test[0].flatten(1)
    assert torch.equal(stream[0].train[0], x)
    for task in stream[1:]:
        assert torch.equal(task.train[0].sort(1).values, x.sort(1).values)
        assert not torch.equal(task.train[0], x)
        # Training and test images in the same order: their joint columns are the old ones.
        moved, whole = torch.cat([task.train[0], task.test[0]]), torch.cat([x, data_test])
        assert Counter(map(tuple, moved.T.tolist())) == Counter(map(tuple, whole.T.tolist()))
        assert torch.equal(task.train[1], data.train[1])
    assert not torch.equal(stream[1].train[0], stream[2].train[0])
    assert stream.head_sizes == (10,)
    assert not stream.multi_head


@pytest.mark.parametrize("make", [permuted, rotated, split], ids=lambda make: make.__name__)
def test_streams_are_functions_of_their_seed(make):
    first, again, other = (
        make("digits", seed=seed, num_data=50, num_test=20) for seed in (3, 3, 4)
    )
    for a, b in zip(first, again, strict=True):
        assert a.name == b.name
        for part in ("train", "test"):
            for x, y in zip(getattr(a, part), getattr(b, part), strict=True):
                assert torch.equal(x, y)
        assert len(a.train[1]) == 50
        assert len(a.test[1]) == 20
    assert not torch.equal(first[0].train[0], other[0].train[0])


def test_permutations_do_not_depend_on_how_many_examples_are_kept():
    whole, few = permuted("digits", tasks=2), permuted("digits", tasks=2, num_data=30)
    rows = {tuple(row) for row in whole[1].train[0].tolist()}
    assert all(tuple(row) in rows for row in few[1].train[0].tolist())


def test_split_labels_count_within_a_head_or_stay():
    data = digits()
    many, one = split(data), split(data, heads="single")
    assert [task.head for task in many] == [0, 1, 2, 3, 4]
    assert many[3].classes == (6, 7)
    rows = torch.isin(data.train[1], torch.tensor([6, 7]))
    assert torch.equal(many[3].train[0], data.train[0][rows])
    assert torch.equal(many[3].train[1] + 6, data.train[1][rows])
    assert torch.equal(one[3].train[1], data.train[1][rows])
    assert one.head_sizes == (10,)
    uneven = split(data, per_task=[[0, 1, 2], [9, 8]])
    assert uneven.head_sizes == (3, 2)
    assert uneven[1].train[1].tolist() == [
        {9: 0, 8: 1}[int(label)] for label in data.train[1] if int(label) in (8, 9)
    ]
    with pytest.raises(DataError, match="do not divide"):
        split(data, per_task=3)
    with pytest.raises(DataError, match="groups of the classes"):
        split(data, per_task=[[0, 10]])
    with pytest.raises(DataError, match="heads must be one of 'multi', 'single'"):
        split(data, heads="both")


def test_turning_by_quarters_is_exact_and_by_other_angles_close_to_it():
    images = torch.rand(3, 1, 9, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(turned(images, 0), images)
    assert torch.equal(turned(images, 90), images.rot90(1, (2, 3)))
    assert torch.equal(turned(images, -90), images.rot90(-1, (2, 3)))
    near = turned(images, 90.01)
    assert (near - turned(images, 90)).abs().max() < 0.01
    with pytest.raises(DataError, match=r"\(N, C, H, W\)"):
        turned(torch.zeros(3, 4), 10)


def test_any_data_sets_make_a_stream():
    data = digits()
    toy = SimpleNamespace(name="toy", train=data.train, test=data.test, classes=("a",) * 10)
    stream = sequence([data, toy], num_data=20)
    assert [task.name for task in stream] == ["digits", "toy"]
    assert stream.head_sizes == (10, 10)
    single = sequence([data, toy], heads="single")
    assert single[1].head is None


def test_tasks_and_streams_that_cannot_be_meant_are_refused():
    x, y = torch.zeros(3, 2), torch.zeros(3)
    with pytest.raises(DataError, match="2 targets"):
        Task("a", (x, y[:2]), (x, y))
    task = Task("a", (x, y), (x, y))
    with pytest.raises(DataError, match="different names"):
        Stream("twice", (task, task))
    with pytest.raises(DataError, match="no tasks"):
        Stream("none", ())
    with pytest.raises(DataError, match="or none"):
        Stream("mixed", (task, Task("b", (x, y), (x, y), head=0)))
    with pytest.raises(DataError, match=r"num_data must be .* but it is 0"):
        split("digits", num_data=0)


# --- heads ----------------------------------------------------------------------------------------


def test_a_mixed_batch_gets_the_outputs_of_each_head():
    net = MultiHead(nn.Linear(4, 6), 6, (2, 3, 2))
    x, heads = torch.randn(5, 4), torch.tensor([2, 0, 1, 1, 2])
    outputs = net(x, heads)
    for row, head in enumerate(heads.tolist()):
        alone = net(x[row : row + 1], heads[row : row + 1])
        torch.testing.assert_close(outputs[row], alone[0])
        size = (2, 3, 2)[head]
        torch.testing.assert_close(alone[0, :size], net.heads[head](net.body(x[row])))
        assert (alone[0, size:] == IMPOSSIBLE).all()
    assert torch.softmax(outputs, 1)[0, 2] == 0
    with pytest.raises(DataError, match="heads 0 to 2"):
        net(x, torch.full((5,), 3))


# --- learners -------------------------------------------------------------------------------------

SETTINGS = Training(epochs=2, batch_size=32, lr=3e-3)
LEARNERS = {
    "naive": lambda model: Naive(model, SETTINGS),
    "joint": lambda model: Joint(model, SETTINGS),
    "replay": lambda model: Replay(model, SETTINGS, size=40),
    "ewc": lambda model: EWC(model, SETTINGS, strength=10.0),
    "online": lambda model: OnlineEWC(model, SETTINGS, decay=0.9),
    "sampled": lambda model: EWC(model, SETTINGS, curvature="fisher", strength=10.0),
    "kronecker": lambda model: KroneckerLaplace(model, SETTINGS),
    "si": lambda model: SI(model, SETTINGS),
}


def stream_of(tasks=3, num_data=120):
    whole = split("digits", num_data=num_data, num_test=60)
    return Stream(whole.name, whole.tasks[:tasks])


def model_for(stream, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # Dropout and batch norm: torch's own generator and buffers must resume too.
        body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)
        )
        return credo.Model(MultiHead(body, 16, stream.head_sizes), credo.likelihoods.Categorical())


class Killer(Reporter):
    """Ends training after some steps, as a crash would."""

    def __init__(self, steps):
        self.steps = steps

    def step(self, epoch, batch, nll):
        self.steps -= 1
        if not self.steps:
            raise RuntimeError("killed")


@pytest.mark.parametrize("name", LEARNERS)
def test_resuming_inside_a_task_and_between_tasks_is_exact(name, tmp_path, monkeypatch):
    monkeypatch.setattr(credo.train.loop, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    stream = stream_of()
    undisturbed = LEARNERS[name](model_for(stream))
    expected = run(undisturbed, stream, progress=False)

    killed = LEARNERS[name](model_for(stream))
    killed.learn(stream[0], tmp_path, progress=False)
    with pytest.raises(RuntimeError, match="killed"):
        killed.learn(stream[1], tmp_path, progress=Killer(6))
    resumed = LEARNERS[name](model_for(stream, seed=99))  # its weights come from the folder
    assert resumed.restore(tmp_path)
    assert resumed.learned == [stream[0].name]
    report = run(resumed, stream, tmp_path, progress=False)

    assert torch.equal(resumed.model.bind().vector, undisturbed.model.bind().vector)
    for mine, theirs in zip(report.rows[1:], expected.rows[1:], strict=True):
        assert mine == theirs
    assert report.memory_bytes[1:] == expected.memory_bytes[1:]
    again = run(LEARNERS[name](model_for(stream, seed=5)), stream, tmp_path, progress=False)
    assert again.to_json() == json.loads(json.dumps(report.to_json()))


@pytest.mark.parametrize("name", LEARNERS)
def test_packing_keeps_everything_the_next_task_needs(name):
    stream = stream_of(2)
    learner, copy = (LEARNERS[name](model_for(stream, seed)) for seed in (0, 8))
    learner.learn(stream[0], progress=False)
    tensors, meta = learner.pack()
    assert learner.memory_bytes == sum(
        t.numel() * t.element_size() for k, t in tensors.items() if k.startswith("memory.")
    )
    copy.unpack({k: t.clone() for k, t in tensors.items()}, json.loads(json.dumps(meta)))
    for each in (learner, copy):
        each.learn(stream[1], progress=False)
    assert torch.equal(copy.model.bind().vector, learner.model.bind().vector)
    assert copy.memory_bytes == learner.memory_bytes


def test_memory_is_what_it_says():
    stream = stream_of(2)
    size = model_for(stream).random.size
    for name, bytes_after in {
        "naive": (0, 0),
        "si": (8 * size, 8 * size),
        "ewc": (8 * size + 8, 2 * (8 * size + 8)),
        "online": (8 * size + 8, 8 * size + 8),
        "replay": (40 * (64 * 4 + 8 + 8), 80 * (64 * 4 + 8 + 8)),
    }.items():
        report = run(LEARNERS[name](model_for(stream)), stream, progress=False)
        assert tuple(report.memory_bytes) == bytes_after, name


def test_a_state_of_other_settings_is_refused(tmp_path):
    stream = stream_of(2)
    EWC(model_for(stream), SETTINGS).learn(stream[0], tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="another learner"):
        EWC(model_for(stream), SETTINGS, strength=2.0).restore(tmp_path)
    with pytest.raises(CheckpointError, match="another learner"):
        SI(model_for(stream), SETTINGS).restore(tmp_path)
    other = split("digits", per_task=[[5, 6], [0, 1]], num_data=50)
    with pytest.raises(CheckpointError, match="not 'digits 5 6'"):
        run(EWC(model_for(stream), SETTINGS), other, tmp_path, progress=False)
    assert not SI(model_for(stream), SETTINGS).restore(tmp_path / "nowhere")


def test_learners_refuse_what_they_cannot_do():
    stream = stream_of(1)
    model = model_for(stream)
    learner = Naive(model, SETTINGS)
    learner.learn(stream[0], progress=False)
    with pytest.raises(DataError, match="learned already"):
        learner.learn(stream[0], progress=False)
    for make, words in (
        (lambda: EWC(model, structure="low_rank"), "structure"),
        (lambda: EWC(model, curvature="hessian"), "curvature"),
        (lambda: EWC(model, strength=0.0), "strength"),
        (lambda: OnlineEWC(model, decay=1.5), "decay"),
        (lambda: SI(model, damping=-1.0), "damping"),
        (lambda: Replay(model, choice="best"), "choice"),
        (lambda: Training(optimizer="muon"), "optimizer"),
        (lambda: Training(epochs=0), "epochs"),
    ):
        with pytest.raises(DataError, match=words):
            make()
    regression = credo.Model(nn.Linear(64, 1), credo.likelihoods.Gaussian(scale=1.0))
    with pytest.raises(UnsupportedError, match="accuracy"):
        run(Naive(regression), stream)


def test_zero_fisher_information_is_never_silent():
    x, y = torch.zeros(20, 4), torch.zeros(20, dtype=torch.long)
    task = Task("nothing", (x, y), (x, y), (0, 1))
    net = nn.Linear(4, 2)
    with torch.no_grad():
        net.bias.copy_(torch.tensor([200.0, -200.0]))  # so sure that p(1 − p) is 0
    learner = EWC(credo.Model(net, credo.likelihoods.Categorical()), SETTINGS)
    with pytest.warns(UserWarning, match="is zero"):
        learner.learn(task, progress=False)


def test_replay_sees_its_memory_in_every_step():
    stream = stream_of(2)
    learner = Replay(model_for(stream), SETTINGS, size=20, weight=0.5)
    learner.learn(stream[0], progress=False)
    memory = learner.regulariser(stream[1])
    assert isinstance(memory, Remembered)
    (_, heads), targets = memory.memory
    assert heads.tolist() == [0] * 20
    assert targets.bincount().tolist() == [10, 10]


def test_a_balanced_choice_takes_what_there_is():
    labels = torch.tensor([0] * 50 + [1] * 3 + [2] * 20)
    rows = chosen_rows(labels, 15, "balanced", torch.Generator().manual_seed(0))
    assert labels[rows].bincount().tolist() == [6, 3, 6]
    assert len(set(rows.tolist())) == 15
    assert len(chosen_rows(torch.randn(9), 4, "balanced")) == 4


def test_concatenation_keeps_heads_beside_their_examples():
    stream = stream_of(2)
    (x, heads), y = joined([task.train_data for task in stream])
    assert len(x) == len(y) == len(heads) == 240
    assert heads.tolist() == [0] * 120 + [1] * 120


# --- reports --------------------------------------------------------------------------------------


def test_the_report_scores_what_the_learner_predicts(tmp_path):
    stream = stream_of(2)
    learner = Naive(model_for(stream), SETTINGS)
    report = run(learner, stream, tmp_path, progress=False)
    for j, task in enumerate(stream):
        probs = learner.predict(task.test[0], task).probs
        right = (probs.argmax(1) == task.test[1]).double().mean()
        assert report.accuracy[1, j] == pytest.approx(float(right))
        assert report.nll[1, j] == pytest.approx(credo.metrics.nll(probs, task.test[1]))
        assert report.ece[1, j] == pytest.approx(float(credo.metrics.ece(probs, task.test[1])))
    numbers = report.summary()
    assert numbers["average_accuracy"] == pytest.approx(report.accuracy[1].mean())
    assert numbers["forgetting"] == pytest.approx(report.accuracy[0, 0] - report.accuracy[1, 0])
    stored = Report.from_json(json.loads((tmp_path / "report.json").read_text()))
    assert stored == report
    assert np.isfinite(list(numbers.values())).all()


def test_the_report_is_a_table(capsys):
    from rich.console import Console

    rows = [
        {"accuracy": row, "nll": [0.1] * 3, "ece": [0.02] * 3} for row in MATRIX
    ]  # fmt: skip
    report = Report(
        "EWC", ["a", "b", "c"], {"accuracy": [0.5] * 3}, rows, [1.0] * 3, [0, 0, 2_000_000]
    )
    Console(width=120).print(report.table())
    text = capsys.readouterr().out
    assert "76.7 % on average" in text
    assert "forgetting 22.5" in text
    assert "2.00 MB" in text


def test_a_progress_bar_does_not_change_the_result(capsys):
    stream = stream_of(2)
    shown, silent = (Naive(model_for(stream), SETTINGS) for _ in range(2))
    run(shown, stream, progress=True)
    run(silent, stream, progress=False)
    assert torch.equal(shown.model.bind().vector, silent.model.bind().vector)
