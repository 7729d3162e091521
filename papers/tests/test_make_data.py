"""The scripts that repackage data sets, on small originals of the originals' format."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from credo.data import load
from credo_papers.camvid import camvid
from credo_papers.uci_tables import uci

SCRIPT = Path(__file__).parents[1] / "make_data.py"
spec = importlib.util.spec_from_file_location("make_data", SCRIPT)
make_data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_data)


def real(file: str) -> dict[str, np.ndarray]:
    """The file that the project's own runs read."""
    path = Path(os.environ.get("CREDO_DATA", "nowhere"), file)
    if not path.exists():
        pytest.skip(f"CREDO_DATA names no folder with {file}")
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_every_command_says_where_its_original_is(capsys):
    for name in make_data.RECIPES:
        with pytest.raises(SystemExit):
            make_data.main([name, "--help"])
        printed = capsys.readouterr().out
        assert "Original:" in printed
        assert "Terms:" in printed


def test_a_missing_original_is_one_line(tmp_path, capsys):
    assert make_data.main(["camvid", str(tmp_path), str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_camvid_is_reduced_and_read(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "val", "test"):
        small = rng.integers(256, size=(120, 160, 3), dtype=np.uint8)
        classes = rng.integers(12, size=(120, 160), dtype=np.uint8)
        large = classes.repeat(3, 0).repeat(3, 1)
        large[::3], large[2::3] = 0, 0  # only the middle of a block counts
        save(small.repeat(3, 0).repeat(3, 1), tmp_path / "CamVid" / part / "0001.png")
        save(large, tmp_path / "CamVid" / f"{part}annot" / "0001.png")
    assert make_data.main(["camvid", str(tmp_path / "CamVid"), str(tmp_path)]) == 0
    scenes = camvid(tmp_path)
    assert scenes.test[0].shape == (1, 3, 120, 160)
    np.testing.assert_array_equal(scenes.test[1][0].numpy(), classes)
    np.testing.assert_allclose(scenes.test[0][0].movedim(0, -1).numpy() * 255, small, atol=1e-4)


def test_camvid_s_arrays_are_those_of_the_file_in_use(tmp_path):
    file = real("camvid_120x160.npz")
    for part in ("train", "val", "test"):
        for index in range(2):
            name = f"{file[f'names_{part}'][index]}.png"
            image, mask = file[f"x_{part}"][index], file[f"y_{part}"][index]
            save(image.repeat(3, 0).repeat(3, 1), tmp_path / part / name)
            save(mask.repeat(3, 0).repeat(3, 1), tmp_path / f"{part}annot" / name)
    made = make_data.camvid(tmp_path)
    assert made.keys() == file.keys()
    for name, array in made.items():
        assert array.dtype.kind == file[name].dtype.kind
        np.testing.assert_array_equal(array, file[name][: len(array)])


def test_notmnist_takes_as_many_of_each_letter_and_skips_broken_files(tmp_path):
    for letter in make_data.LETTERS:
        for index in range(4):
            save(np.full((28, 28), ord(letter), np.uint8), tmp_path / letter / f"{index}.png")
    (tmp_path / "A" / "0.png").write_bytes(b"")
    np.savez(tmp_path / "notmnist_10k.npz", **make_data.notmnist(tmp_path, each=3))
    letters = load("notmnist", tmp_path)
    x, y = letters.test
    assert y.bincount().tolist() == [3] * 10
    assert ((x[:, 0, 0, 0] * 255).round() == y + ord("A")).all()


def test_a_digit_is_cut_out_undistorted(tmp_path):
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[10:30, 20:30] = 200
    digit = make_data.crop(Image.fromarray(pixels), make_data.Box("1.png", 20, 10, 10, 20, 1))
    assert digit.shape == (32, 32, 3)
    assert digit[16, 16, 0] == 200
    assert digit[16, :4].max() == 0
    edge = make_data.crop(Image.fromarray(pixels), make_data.Box("1.png", 0, 0, 4, 20, 1))
    assert edge.shape == (32, 32, 3)


def test_house_numbers_are_read_from_their_description(tmp_path):
    h5py = pytest.importorskip("h5py", reason="SVHN's description is an HDF5 file")
    with h5py.File(tmp_path / "digitStruct.mat", "w") as file:
        references = h5py.special_dtype(ref=h5py.Reference)
        names = file.create_dataset("digitStruct/name", (1, 1), references)
        boxes = file.create_dataset("digitStruct/bbox", (1, 1), references)
        names[0, 0] = file.create_dataset("n", data=[[ord(c)] for c in "1.png"]).ref
        group = file.create_group("b")
        for key, value in (("left", 2), ("top", 3), ("width", 4), ("height", 5), ("label", 10)):
            group.create_dataset(key, data=[[float(value)]])
        boxes[0, 0] = group.ref
    assert list(make_data._digit_boxes(tmp_path / "digitStruct.mat")) == [
        make_data.Box("1.png", 2, 3, 4, 5, 0)
    ]


def test_cifar10h_is_counts_beside_true_labels(tmp_path):
    np.save(tmp_path / "counts.npy", np.eye(10, dtype=np.int64)[[7, 3]] * 50)
    record = bytes(3072)
    (tmp_path / "test_batch.bin").write_bytes(bytes([7]) + record + bytes([3]) + record)
    labels = ["--labels", str(tmp_path / "test_batch.bin")]
    arguments = ["cifar10h", str(tmp_path / "counts.npy"), str(tmp_path), *labels]
    assert make_data.main(arguments) == 0
    with np.load(tmp_path / "cifar10h_test_soft_labels.npz") as file:
        assert file["counts"].argmax(1).tolist() == file["y_test"].tolist() == [7, 3]
        assert (file["counts"].dtype, file["y_test"].dtype) == (np.uint8, np.uint8)


def write_tables(folder: Path, file: dict[str, np.ndarray]) -> None:
    """The originals that make these arrays."""
    for name, original in make_data.TABLES.items():
        place = folder / original / "data"
        place.mkdir(parents=True)
        x, y = file[f"{name}_X"], file[f"{name}_y"]
        np.savetxt(place / "data.txt", np.column_stack([x, y]))
        np.savetxt(place / "index_features.txt", np.arange(x.shape[1]))
        np.savetxt(place / "index_target.txt", [x.shape[1]])
        for part in ("train", "test"):
            for split, rows in enumerate(file[f"{name}_{part}_idx"]):
                np.savetxt(place / f"index_{part}_{split}.txt", rows)
        for setting in ("n_hidden", "n_epochs"):
            np.savetxt(place / f"{setting}.txt", [file[f"{name}_{setting}"]])


def test_tables_and_splits_are_made_and_read(tmp_path):
    file = {}
    for name in make_data.TABLES:
        order = np.stack([np.random.RandomState(s).permutation(10) for s in range(20)])
        x = np.random.default_rng(0).random((10, 2), "f4")
        file |= {f"{name}_X": x, f"{name}_y": np.arange(10.0)}
        file |= {f"{name}_train_idx": order[:, :8], f"{name}_test_idx": order[:, 8:]}
        file |= {f"{name}_n_hidden": np.array(50), f"{name}_n_epochs": np.array(40)}
    write_tables(tmp_path, file)
    assert make_data.main(["uci", str(tmp_path), str(tmp_path)]) == 0
    x, y, _, y_test = uci("wine_red", 3, tmp_path)
    np.testing.assert_array_equal(y.flatten().numpy(), file["wine_red_train_idx"][3])
    np.testing.assert_array_equal(x.numpy(), file["wine_red_X"][file["wine_red_train_idx"][3]])
    np.testing.assert_array_equal(y_test.flatten().numpy(), file["wine_red_test_idx"][3])


def test_the_tables_in_use_are_what_the_script_makes_of_such_originals(tmp_path):
    file = real("uci_yacht_concrete_wine.npz")
    write_tables(tmp_path, file)
    made = make_data.uci(tmp_path)
    assert made.keys() == file.keys()
    for name, array in made.items():
        assert (array.dtype, array.shape) == (file[name].dtype, file[name].shape)
        np.testing.assert_array_equal(array, file[name])


def test_pima_with_and_without_names(tmp_path):
    rows = "6,148,72,35,0,33.6,0.627,50,1\n1,85,66,29,0,26.6,0.351,31,0\n"
    for start in ("", "a,b,c,d,e,f,g,h,class\n"):
        (tmp_path / "pima.csv").write_text(start + rows)
        made = make_data.pima(tmp_path / "pima.csv")
        assert made["pima_X"].shape == (2, 8)
        assert made["pima_X"][0, 5] == np.float32(33.6)
        assert made["pima_y"].tolist() == [1, 0]
