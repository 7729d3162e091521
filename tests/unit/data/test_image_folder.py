"""Augmentation is what it says, and a folder of images gives well-formed crops or a named error."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torch import nn

import credo
from credo.data import image_folder
from credo.data.augment import (
    AREAS,
    RATIOS,
    FlippedAndShifted,
    centre_box,
    draw_moves,
    move,
    random_box,
)
from credo.data.image_folder import NO_LABEL, TRIES, Crops, ImageFolder, open_image
from credo.errors import DataError, FileFormatError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- flips and shifts -----------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 2])
def test_every_move_is_a_pad_a_flip_and_a_crop(padding: int) -> None:
    side = 2 * padding + 1
    moves = torch.cartesian_prod(torch.arange(2), torch.arange(side), torch.arange(side))
    images = torch.randn(len(moves), 3, 5, 7, generator=generator())
    moved = move(images, moves, padding)
    for image, (flip, top, left), found in zip(images, moves.tolist(), moved, strict=True):
        padded = np.pad(image.numpy(), ((0, 0), (padding, padding), (padding, padding)))
        padded = padded[:, :, ::-1] if flip else padded
        np.testing.assert_array_equal(found.numpy(), padded[:, top : top + 5, left : left + 7])


def test_moves_are_uniform_and_independent() -> None:
    moves = draw_moves(20_000, 2, generator())
    cells = (moves * torch.tensor([25, 5, 1])).sum(1).bincount(minlength=50)
    assert stats.chisquare(cells.numpy()).pvalue > 1e-6


def test_moves_for_another_number_of_images_are_refused() -> None:
    with pytest.raises(DataError, match=r"draw_moves\(4\)"):
        move(torch.zeros(4, 3, 8, 8), draw_moves(3))
    with pytest.raises(DataError, match="with 3 labels"):
        FlippedAndShifted(torch.zeros(4, 3, 8, 8), torch.zeros(3))


def test_training_on_moved_images_repeats_and_resumes_exactly(tmp_path: Path) -> None:
    x, y = torch.randn(24, 1, 6, 6, generator=generator()), torch.arange(24) % 3
    data = FlippedAndShifted(x, y, padding=2)

    def trained(epochs: int, folder: Path | None = None, seed: int = 0) -> torch.Tensor:
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        model = credo.Model(net, credo.likelihoods.Categorical())
        posterior = credo.fit(
            model, credo.MLE(lr=0.1), data, epochs=epochs, batch_size=8, folder=folder, seed=seed,
            progress=False,
        )  # fmt: skip
        return posterior.mean

    whole = trained(3)
    trained(2, tmp_path)
    assert torch.equal(trained(3, tmp_path), whole)
    data.padding = 0
    assert not torch.equal(trained(3), whole)


# --- crops ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**32))
def test_a_random_box_lies_in_the_image_and_is_never_too_long(w: int, h: int, seed: int) -> None:
    left, top, right, bottom = random_box(w, h, generator(seed))
    assert 0 <= left < right <= w * (1 + 1e-12)
    assert 0 <= top < bottom <= h * (1 + 1e-12)
    assert RATIOS[0] * (1 - 1e-9) <= (right - left) / (bottom - top) <= RATIOS[1] * (1 + 1e-9)


def test_areas_ratios_and_places_of_random_boxes_are_uniform() -> None:
    boxes = np.array([random_box(1000, 1000, generator(seed)) for seed in range(2000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    # Up to an area of 3/4 every ratio fits, so no draw was rejected.
    some = width * height < 0.75e6
    area, ratio = (width * height)[some] / 1e6, np.log(width / height)[some]
    assert stats.kstest(area, stats.uniform(AREAS[0], 0.75 - AREAS[0]).cdf).pvalue > 1e-4
    span = np.log(RATIOS[1] / RATIOS[0])
    assert stats.kstest(ratio, stats.uniform(np.log(RATIOS[0]), span).cdf).pvalue > 1e-4
    for low, size in ((boxes[some, 0], width[some]), (boxes[some, 1], height[some])):
        assert stats.kstest(low / (1000 - size), "uniform").pvalue > 1e-4


def test_a_long_image_gives_the_longest_centred_part() -> None:
    assert random_box(3000, 30, generator()) == pytest.approx((1480, 0, 1520, 30))
    assert random_box(30, 3000, generator()) == pytest.approx((0, 1480, 30, 1520))


def write(path: Path, pixels: np.ndarray, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_the_centre_is_that_of_the_image(tmp_path: Path) -> None:
    pixels = random_pixels(32, 48, 3)
    write(tmp_path / "a.png", pixels)
    crops = Crops(ImageFolder.find(tmp_path), side=28)
    # 7/8 of the shorter side are 28 pixels, from 2 and from 10.
    assert centre_box(48, 32) == (10, 2, 38, 30)
    expected = torch.from_numpy(pixels[2:30, 10:38]).permute(2, 0, 1)
    assert torch.equal(crops[0].image, expected)
    assert crops[0].problem == ""


def test_random_crops_are_a_function_of_their_seed_and_half_are_flipped(tmp_path: Path) -> None:
    ramp = np.tile(np.arange(200, dtype=np.uint8)[None, :, None], (150, 1, 3))
    write(tmp_path / "ramp.png", ramp)
    crops = Crops(ImageFolder.find(tmp_path), side=16)
    assert torch.equal(crops[0, 5].image, crops[0, 5].image)
    assert not torch.equal(crops[0, 5].image, crops[0, 6].image)
    images = [crops[0, seed].image.int() for seed in range(400)]
    falling = sum(bool(image[0, 8, 0] > image[0, 8, -1]) for image in images)
    assert abs(falling - 200) < 5 * 10  # binomial: a standard error of 10
    assert all(image.shape == (3, 16, 16) for image in images)


def test_crops_pass_through_worker_processes(tmp_path: Path) -> None:
    for i in range(4):
        write(tmp_path / "c" / f"{i}.png", random_pixels(9, 9, 3, seed=i))
    (tmp_path / "c" / "2.png").write_bytes(b"no image")
    crops = Crops(ImageFolder.find(tmp_path), side=8)
    keys = [[(0, 7), (2, 8)], [(3, 9)]]
    loader = torch.utils.data.DataLoader(crops, batch_sampler=keys, num_workers=1)
    first, second = loader
    assert first.image.shape == (2, 3, 8, 8)
    assert torch.equal(second.image[0], crops[3, 9].image)
    assert first.problem[0] == ""
    assert "2.png" in first.problem[1]


# --- files ----------------------------------------------------------------------------------------


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


RGB = Image.fromarray(random_pixels(6, 9, 3))
PALETTE = RGB.quantize(4)
ODD: dict[str, bytes] = {
    "grey": encoded(RGB.convert("L"), "JPEG"),
    "cmyk": encoded(RGB.convert("CMYK"), "JPEG"),
    "png named jpeg": encoded(RGB, "PNG"),
    "transparent": encoded(RGB.convert("RGBA"), "PNG"),
    "palette": encoded(PALETTE, "PNG", transparency=bytes(range(4))),
    "sixteen bits": encoded(Image.fromarray(np.full((6, 9), 40_000, np.uint16)), "PNG"),
    "one bit": encoded(RGB.convert("1"), "PNG"),
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD.keys())
def test_odd_images_become_rgb(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.JPEG"
    path.write_bytes(content)
    image = open_image(path)
    assert (image.mode, image.size) == ("RGB", (9, 6))


def png_of_size(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "does not unpack"),
    "text": (b"<html>not found</html>", "does not unpack"),
    "truncated jpeg": (encoded(RGB, "JPEG")[:-40], "does not unpack"),
    "truncated png": (encoded(RGB, "PNG")[:-40], "does not unpack"),
    "another format": (encoded(RGB, "BMP"), "does not unpack"),
    "postscript": (encoded(RGB, "EPS"), "does not unpack"),
    "large": (png_of_size(9000, 9000), r"9,000×9,000 pixels, but Credo unpacks at most"),
    "bomb": (png_of_size(2**31 - 1, 2**31 - 1), "DecompressionBomb"),
    "short of rows": (png_of_size(100, 100), "does not unpack"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_bad_images_are_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.JPEG"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message) as caught:
        open_image(path)
    assert "broken.JPEG" in str(caught.value)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(ODD)),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8),
    st.floats(0.2, 1),
)
def test_damaged_bytes_give_an_image_or_a_file_format_error(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    changes: list[tuple[float, int]],
    kept: float,
) -> None:
    content = bytearray(ODD[name])
    for where, value in changes:
        content[int(where * (len(content) - 1))] = value
    path = tmp_path_factory.getbasetemp() / "damaged.JPEG"
    path.write_bytes(content[: int(kept * len(content))])
    try:
        image = open_image(path)
    except FileFormatError:
        return
    assert image.mode == "RGB"
    assert image.width * image.height <= image_folder.MAX_PIXELS


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, name in enumerate(("dog/1.JPEG", "dog/0.jpg", "cat/0.PNG", "emu/5.png")):
        write(tmp_path / name, random_pixels(12, 12, 3, seed=index))
    (tmp_path / "cat" / "readme.txt").touch()
    (tmp_path / "cat" / "._0.PNG").touch()
    (tmp_path / "cat" / "deeper.png").mkdir()
    (tmp_path / ".cache").mkdir()
    return tmp_path


def test_a_folder_lists_its_images_by_class_and_name(folder: Path) -> None:
    found = ImageFolder.find(folder)
    assert found.classes == ("cat", "dog", "emu")
    assert [f"{f.parent.name}/{f.name}" for f in found.files] == [
        "cat/0.PNG", "dog/0.jpg", "dog/1.JPEG", "emu/5.png",
    ]  # fmt: skip
    assert found.labels.tolist() == [0, 1, 1, 2]
    assert found.is_labelled


def test_another_part_has_the_classes_of_training(folder: Path) -> None:
    classes = ("ant", "cat", "dog", "emu")
    assert ImageFolder.find(folder, classes).labels.tolist() == [1, 2, 2, 3]
    with pytest.raises(DataError, match=r"the class 'cat' \(and 1 more\)"):
        ImageFolder.find(folder, ("dog",))


def test_images_without_folders_have_no_labels(folder: Path) -> None:
    found = ImageFolder.find(folder / "dog", ("cat", "dog"))
    assert not found.is_labelled
    assert found.labels.tolist() == [NO_LABEL] * 2
    assert found.classes == ("cat", "dog")


def nothing(root: Path) -> None:
    (root / "cat").mkdir()


def an_empty_class(root: Path) -> None:
    nothing(root)
    write(root / "dog" / "0.png", random_pixels(4, 4, 3))


@pytest.mark.parametrize(
    ("make", "place", "message"),
    [
        (nothing, "", "has no images: it should have a folder for each class"),
        (an_empty_class, "", "cat should have images of a class, but has none"),
        (nothing, "missing", "which is no folder"),
    ],
)
def test_folders_without_images_are_refused(
    make: Callable[[Path], None], place: str, message: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=message):
        ImageFolder.find(tmp_path / place)


def test_unreadable_images_are_replaced_left_out_or_refused(folder: Path) -> None:
    (folder / "dog" / "0.jpg").write_bytes(b"broken")
    crops = Crops(ImageFolder.find(folder), side=8)
    replaced, left_out = crops[1, 3], crops[1]
    assert torch.equal(replaced.image, crops[2, 3].image)
    assert int(replaced.label) == 1
    assert not left_out.image.any()
    assert "0.jpg" in replaced.problem
    assert "0.jpg" in left_out.problem
    with pytest.raises(FileFormatError, match=r"0\.jpg"):
        Crops(ImageFolder.find(folder), side=8, strict=True)[1, 3]


def test_a_folder_of_nothing_but_broken_images_ends_training(tmp_path: Path) -> None:
    for i in range(TRIES + 2):
        (tmp_path / f"{i}.png").write_bytes(b"broken")
    crops = Crops(ImageFolder.find(tmp_path), side=8)
    with pytest.raises(FileFormatError, match=rf"{TRIES} images in a row .*3\.png"):
        crops[3, 0]
