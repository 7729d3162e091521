"""The regression tables and their splits."""

from pathlib import Path

import numpy as np
import pytest
import torch

from credo.errors import DataError, FileFormatError
from credo_papers.uci_tables import uci


def write_uci(folder: Path, **changes: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(10) for _ in range(20)]).astype("i4")
    arrays = {
        "yacht_X": rng.normal(size=(10, 2)).astype("f4"),
        "yacht_y": np.arange(10, dtype="f4"),
        "yacht_train_idx": order[:, :9],
        "yacht_test_idx": order[:, 9:],
    }
    np.savez(folder / "uci_yacht_concrete_wine.npz", **{**arrays, **changes})


def test_uci_splits(tmp_path: Path) -> None:
    write_uci(tmp_path)
    for split in (0, 19):
        x_train, y_train, x_test, y_test = uci("yacht", split, tmp_path)
        assert x_train.shape == (9, 2)
        assert x_test.shape == (1, 2)
        rows = torch.cat([y_train, y_test]).flatten()
        assert rows.sort().values.tolist() == list(range(10))
    with pytest.raises(DataError, match="splits 0 to 19, not 'yacht' with split 20"):
        uci("yacht", 20, tmp_path)


def test_uci_refuses_row_numbers_beyond_the_table(tmp_path: Path) -> None:
    write_uci(tmp_path, yacht_test_idx=np.full((20, 1), 10, "i4"))
    with pytest.raises(FileFormatError, match="row numbers"):
        uci("yacht", 0, tmp_path)


def test_uci_says_where_it_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CREDO_DATA", str(tmp_path))
    with pytest.raises(DataError, match="CREDO_DATA"):
        uci("yacht")
