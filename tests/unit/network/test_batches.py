"""Examples cut, joined and converted in one place, whatever they came as."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.errors import DataError
from credo.network import batches

X, Y = torch.arange(10.0).reshape(5, 2), torch.arange(5)

FORMS = {
    "tensor": X,
    "tuple": (X, X[:, :1]),
    "mapping": {"left": X, "right": X[:, :1]},
}


class Frame:
    """As much of a data frame as is asked for: pandas is no dependency."""

    def __init__(self, **columns):
        self._columns = {name: np.asarray(values) for name, values in columns.items()}

    @property
    def columns(self):
        return list(self._columns)

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name):
        return Column(self._columns[name])

    def to_numpy(self):
        return np.stack(list(self._columns.values()), 1)


class Column:
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def to_numpy(self):
        return self.values


class Mixed(Frame):
    """Columns of several types, which pandas gives as an array of objects."""

    def to_numpy(self):
        return np.stack([c.astype(object) for c in self._columns.values()], 1)


def model():
    net = nn.Linear(2, 5)
    return credo.Model(net, credo.likelihoods.Categorical())


@pytest.mark.parametrize("form", FORMS)
def test_pieces_and_their_join_are_the_whole(form):
    parts = list(batches.pieces((FORMS[form], Y), 2))
    assert [len(targets) for _, targets in parts] == [2, 2, 1]
    inputs, targets = batches.joined(parts)
    assert torch.equal(targets, Y)
    assert type(inputs) is type(FORMS[form])
    for got, wanted in zip(batches.parts_of(inputs), batches.parts_of(FORMS[form]), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_chunks_are_in_the_weights_precision(form):
    found = list(batches.chunks(FORMS[form], 3, weights=torch.zeros(1, dtype=torch.float64)))
    assert [batches.number_of_examples(chunk) for chunk in found] == [3, 2]
    assert all(part.dtype == torch.float64 for part in batches.parts_of(found[0]))


def test_chosen_rows_keep_their_order():
    inputs, targets = batches.batch_rows((FORMS["mapping"], Y), torch.tensor([3, 0]))
    assert targets.tolist() == [3, 0]
    assert inputs["left"].tolist() == [[6.0, 7.0], [0.0, 1.0]]


def test_read_only_and_reversed_arrays_are_copied_without_a_warning():
    frozen = np.ones((3, 2))
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = batches.as_tensor(frozen)
        tensor += 1
        assert batches.as_tensor(np.arange(3)[::-1]).tolist() == [2, 1, 0]
    assert frozen.sum() == 6


def test_read_only_arrays_train_and_predict_without_a_warning():
    x, y = X.numpy().copy(), Y.numpy().copy()
    x.flags.writeable = y.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = credo.fit(model(), credo.MAP(), (x, y), epochs=1, progress=False)
        assert posterior.predict(x, samples=2).probs.shape == (5, 5)


def test_a_frame_of_numbers_is_trained_on_and_predicted():
    frame = Frame(a=[0.0, 1.0, 2.0], b=[1.0, 0.0, 1.0])
    labels = Column(np.array([0, 1, 2]))
    posterior = credo.fit(model(), credo.MAP(), (frame, labels), epochs=1, progress=False)
    assert posterior.predict(frame, samples=2).probs.shape == (3, 5)
    mixed = Mixed(a=[0, 1, 2], b=[1.0, 0.0, 1.0])
    assert batches.as_tensor(mixed).dtype == torch.float64


def test_columns_that_are_no_numbers_are_named():
    frame = Mixed(age=[1.0, 2.0], city=["Bern", "Basel"])
    with pytest.raises(DataError, match=r"the inputs, a Mixed, .* no numbers in city: encode"):
        credo.fit(model(), credo.MAP(), (frame, np.array([0, 1])), epochs=1, progress=False)


@pytest.mark.parametrize("data", [X, X.numpy(), Frame(a=[1.0])], ids=["tensor", "array", "frame"])
def test_inputs_without_targets_are_refused(data):
    with pytest.raises(DataError, match=r"give a tuple of both, \(inputs, targets\)"):
        credo.fit(model(), credo.MAP(), data, epochs=1, progress=False)


def test_a_loader_of_inputs_alone_is_predicted():
    posterior = credo.fit(model(), credo.MAP(), (X, Y), epochs=1, progress=False)
    alone = posterior.predict(DataLoader(TensorDataset(X), batch_size=2), samples=1)
    labelled = posterior.predict(DataLoader(TensorDataset(X, Y), batch_size=2), samples=1)
    # A product of five rows may round otherwise than products of two.
    torch.testing.assert_close(alone.probs, posterior.predict(X, samples=1).probs)
    assert torch.equal(labelled.probs, alone.probs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((X, X[:2]), r"different numbers of examples: their first dimensions are \[2, 5\]"),
        (X[:0], "the inputs are empty"),
        (torch.tensor(1.0), "without dimensions"),
    ],
)
def test_misfits_are_refused(inputs, message):
    with pytest.raises(DataError, match=message):
        batches.number_of_examples(inputs)


def test_a_batch_needs_targets():
    with pytest.raises(DataError, match="does the dataset yield inputs alone"):
        batches.unpack_batch((X,))
    with pytest.raises(DataError, match="needs its targets under one of"):
        batches.unpack_batch({"pixels": X})


def test_objects_are_refused_by_name():
    with pytest.raises(DataError, match="can't make a tensor of the targets"):
        credo.fit(model(), credo.MAP(), (X, np.array(list("abcde"))), epochs=1, progress=False)
