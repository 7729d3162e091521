"""CamVid's reader on made-up files, the U-Net, and the segmentation experiment in miniature."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import jaccard_score
from torchmetrics.functional.classification import multiclass_calibration_error

import credo
from credo.errors import DataError, FileFormatError
from credo_papers import segmentation
from credo_papers.camvid import SegmentationSet, camvid
from credo_papers.experiment import JUDGEMENTS
from credo_papers.segmentation import Maps, borders, class_ece, class_iou
from credo_papers.unet import build_unet

VOID = 11


# --- the reader -----------------------------------------------------------------------------------


def write_camvid(folder: Path, **changes: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 3), ("val", 1), ("test", 2)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (n, 120, 160, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = rng.integers(0, 12, (n, 120, 160), dtype=np.uint8)
    arrays |= changes
    # the real file has texts too, which must not get in the way
    np.savez_compressed(folder / "camvid_120x160.npz", classes=np.array(["Sky"]), **arrays)
    return arrays


def test_camvid_has_channels_first_in_unit_range_and_whole_masks(tmp_path: Path) -> None:
    arrays = write_camvid(tmp_path)
    scenes = camvid(tmp_path)
    assert len(scenes.classes) == scenes.void == VOID
    for part, n in (("train", 3), ("val", 1), ("test", 2)):
        images, masks = getattr(scenes, part)
        assert images.shape == (n, 3, 120, 160)
        assert (images.dtype, masks.dtype) == (torch.float32, torch.int64)
        expected = arrays[f"x_{part}"].transpose(0, 3, 1, 2).astype("f4") / np.float32(255)
        np.testing.assert_array_equal(images.numpy(), expected)
        np.testing.assert_array_equal(masks.numpy(), arrays[f"y_{part}"])
        assert images.is_contiguous()


def test_camvid_is_found_by_the_environment_and_missed_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREDO_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"'camvid' needs one of camvid_120x160\.npz"):
        camvid()
    write_camvid(tmp_path)
    assert len(camvid().train[0]) == 3
    monkeypatch.delenv("CREDO_DATA")
    with pytest.raises(DataError, match="set the environment variable CREDO_DATA"):
        camvid()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_val": np.full((1, 120, 160), 12, "u1")}, "'val' should hold classes .* reach 12"),
        ({"y_test": np.zeros((1, 120, 160), "u1")}, "images of 'test' should be"),
        ({"x_test": np.zeros((2, 60, 80, 3), "u1")}, "images of 'test' should be"),
        ({"x_train": np.zeros((3, 3, 120, 160), "u1")}, "images of 'train' should be"),
        ({"x_train": np.zeros((3, 120, 160, 3), "f4")}, "float32"),
        ({"y_train": np.full((3, 120, 160), -1, "i2")}, "int16"),
        ({"y_train": np.zeros((), "u1")}, "images of 'train' should be"),
        ({"x_val": np.zeros((0, 120, 160, 3), "u1")}, "should hold numbers"),
        ({"y_val": np.array(["road"])}, "should be plain numbers"),
    ],
)
def test_camvid_refuses_other_arrays(tmp_path: Path, changes: dict, message: str) -> None:
    write_camvid(tmp_path, **changes)
    with pytest.raises(FileFormatError, match=message):
        camvid(tmp_path)


def test_camvid_refuses_damaged_files(tmp_path: Path) -> None:
    write_camvid(tmp_path)
    path = tmp_path / "camvid_120x160.npz"
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"\x00" * 100):
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match="camvid_120x160"):
            camvid(tmp_path)
    np.savez(path, x_train=np.zeros((1, 120, 160, 3), "u1"))
    with pytest.raises(FileFormatError, match="y_train"):
        camvid(tmp_path)


# --- the network ----------------------------------------------------------------------------------


def test_unet_depends_on_the_seed_alone_and_takes_any_size() -> None:
    torch.manual_seed(3)
    expected_next = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (build_unet((8, 16, 24), 3, 5, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected_next)
    x = torch.randn(2, 3, 13, 18, generator=torch.Generator().manual_seed(0))
    assert first(x).shape == (2, 5, 13, 18)
    assert torch.equal(first(x), again(x))
    assert not torch.allclose(first(x), other(x))


def test_levels_of_the_unet_halve_the_resolution_and_come_back() -> None:
    net = build_unet((8, 16, 24), 3, 5, seed=0)
    shapes = []
    for block in (*net.down, *net.up):
        block.register_forward_hook(
            lambda _, given, out: shapes.append((given[0].shape, out.shape))
        )
    net(torch.zeros(1, 3, 13, 18))
    fine, middle, coarse = (13, 18), (6, 9), (3, 4)
    assert [(tuple(given[1:]), tuple(out[1:])) for given, out in shapes] == [
        ((3, *fine), (8, *fine)),
        ((8, *middle), (16, *middle)),
        ((16, *coarse), (24, *coarse)),
        ((24 + 16, *middle), (16, *middle)),  # the coarser level beside the way down's own
        ((16 + 8, *fine), (8, *fine)),
    ]


def test_images_of_a_batch_do_not_mix() -> None:
    net = build_unet((8, 16), 3, 5, seed=0).double()
    x = torch.randn(3, 3, 12, 16, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]), rtol=1e-10, atol=1e-10)


# --- what is measured -----------------------------------------------------------------------------


def random_masks(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(seed))


def test_borders_equal_a_look_at_every_neighbour() -> None:
    masks = random_masks((3, 7, 9)).clamp(8, VOID)
    expected = torch.zeros_like(masks, dtype=torch.bool)
    for n, i, j in np.ndindex(*masks.shape):
        here = masks[n, i, j]
        for a, b in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
            if 0 <= a < 7 and 0 <= b < 9 and VOID not in (here, masks[n, a, b]):
                expected[n, i, j] |= here != masks[n, a, b]
    assert torch.equal(borders(masks, VOID), expected)
    assert 0 < expected.float().mean() < 1


def test_iou_equals_sklearns_jaccard_index() -> None:
    y, predicted = (random_masks((500,), seed).clamp(max=9) for seed in (0, 1))
    ours = class_iou(predicted, y, classes=11)
    np.testing.assert_allclose(ours[:10], jaccard_score(y, predicted, average=None), rtol=1e-12)
    assert ours[10] is None


def test_class_ece_equals_torchmetrics_on_the_pixels_of_that_prediction() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(2000, 4, generator=generator, dtype=torch.float64).mul(2).softmax(1)
    probs[:, 3] = 0
    probs /= probs.sum(1, keepdim=True)
    y = torch.multinomial(probs.sqrt(), 1, generator=generator).squeeze(1)
    ours = class_ece(probs, y)
    for label in range(3):
        chosen = probs.argmax(1) == label
        theirs = multiclass_calibration_error(probs[chosen], y[chosen], 4, n_bins=15)
        # torchmetrics adds up in float32
        assert ours[label] == pytest.approx(float(theirs), abs=1e-5)
        assert ours[label] > 0.02
    assert ours[3] is None


def test_scores_leave_void_out_and_see_uncertainty_where_it_is() -> None:
    masks = torch.zeros(1, 8, 8, dtype=torch.int64)
    masks[:, :, 4:], masks[:, 0] = 1, VOID
    probs = torch.full((1, 2, 8, 8), 0.1)
    probs[:, 0, :, :4], probs[:, 1, :, 4:] = 0.9, 0.9
    probs[:, :, 3, 3] = torch.tensor([0.4, 0.6])  # wrong, at the border, and unsure
    probs[:, :, 0] = torch.tensor([1.0, 0.0])[None, :, None]  # nonsense on void
    entropy = -(probs * probs.clamp_min(1e-9).log()).sum(1)
    maps = Maps(probs, entropy, mutual_information=0.1 * entropy)
    found = segmentation.scores(maps, masks, VOID)
    assert found["accuracy"] == pytest.approx(55 / 56)
    assert found["class_iou"] == pytest.approx([27 / 28, 28 / 29])
    assert found["mean_iou"] == pytest.approx((27 / 28 + 28 / 29) / 2)
    assert found["nll"] == pytest.approx(-(55 * math.log(0.9) + math.log(0.4)) / 56, rel=1e-6)
    assert found["entropy_auroc"] == 1.0
    sure, unsure = (-p * math.log(p) - (1 - p) * math.log(1 - p) for p in (0.9, 0.6))
    assert found["entropy_inside"] == pytest.approx(sure, rel=1e-5)
    assert found["entropy_border"] == pytest.approx((13 * sure + unsure) / 14, rel=1e-5)
    information = segmentation.information_scores(maps, masks, VOID)
    assert information["information_auroc"] == 1.0
    rise = found["entropy_border"] - found["entropy_inside"]
    difference = information["information_border"] - information["information_inside"]
    assert difference == pytest.approx(0.1 * rise, rel=1e-4)


# --- the experiment -------------------------------------------------------------------------------


def made_up_scenes() -> SegmentationSet:
    """Rectangles in the colour of their class on a background of class 0, with noise."""
    generator = torch.Generator().manual_seed(0)
    colours = torch.rand(11, 3, generator=generator)

    def part(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        masks = torch.zeros(n, 24, 32, dtype=torch.int64)
        for mask in masks:
            for label in range(1, 11):
                top, left = (int(torch.randint(0, m, (), generator=generator)) for m in (18, 24))
                mask[top : top + 8, left : left + 10] = label
        images = colours[masks].movedim(-1, 1)
        images = (images + 0.15 * torch.randn(images.shape, generator=generator)).clamp(0, 1)
        masks[:, :2] = VOID
        return images, masks

    classes = tuple(f"class {i}" for i in range(11))
    return SegmentationSet("made up", part(16), part(2), part(5), classes, VOID, "rectangles")


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("segmentation")
    settings = segmentation.SegmentationSettings(
        epochs=3, reduction=2, num_data=16, batch_size=8, labels_per_image=12, prediction_samples=4
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credo_papers.segmentation.camvid", made_up_scenes)
        result = segmentation.run_one(settings, 0, folder)
        assert segmentation.run_one(settings, 0, folder) == result  # resumes to the same numbers
    return result, folder


def test_miniature_run_scores_both_methods(miniature: tuple[dict, Path]) -> None:
    result, folder = miniature
    json.dumps(result, allow_nan=False)
    for name in segmentation.TITLES:
        records = (folder / name / "metrics.jsonl").read_text().splitlines()
        nll = [json.loads(record)["nll"] for record in records]
        assert nll[-1] < nll[0]
        # the likelihood sums over the 12·16 pixels, of which the void ones don't count
        assert nll[0] < 192 * 2 * math.log(11)
        assert 0 < result[f"{name}_accuracy"] <= 1
        assert 0 <= result[f"{name}_entropy_inside"] <= math.log(11)
        assert len(result[f"{name}_class_ece"]) == len(result[f"{name}_class_iou"]) == 11
    assert result["ivon_information_inside"] > 0
    assert result["ivon_information_inside"] < result["ivon_entropy_inside"]
    assert sum(result["class_share"]) == pytest.approx(1)
    # both methods weigh the prior alike: 192 pixels that count for 12 labels
    temperatures = {
        name: json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[0])
        for name in segmentation.TITLES
    }
    assert {record["temperature"] for record in temperatures.values()} == {16.0}


def test_scenes_are_the_test_images_themselves(miniature: tuple[dict, Path]) -> None:
    images, masks = made_up_scenes().test
    for scene in miniature[0]["scenes"]:
        i = scene["index"]
        pooled = images[i].reshape(3, 12, 2, 16, 2).mean((2, 4)).movedim(0, -1)
        torch.testing.assert_close(
            torch.tensor(scene["image"]) / 255, pooled, atol=0.5 / 254, rtol=0
        )
        assert torch.equal(torch.tensor(scene["truth"]), masks[i, ::2, ::2])
        assert np.shape(scene["entropy"]) == np.shape(scene["mutual_information"]) == (12, 16)
        assert np.min(scene["mutual_information"]) >= 0
        assert np.all(np.array(scene["mutual_information"]) <= np.array(scene["entropy"]) + 1)


def test_figures_are_drawn_even_of_classes_that_nobody_predicts(
    miniature: tuple[dict, Path], tmp_path: Path
) -> None:
    result = miniature[0] | {"map_class_ece": [0.1] * 10 + [None]}
    files = segmentation.figures([result, result], tmp_path)
    assert [file.name for file in files] == ["segmentation.png", "class-calibration.png"]
    assert all(file.stat().st_size > 10_000 for file in files)


def test_the_verdict_goes_both_ways(miniature: tuple[dict, Path]) -> None:
    def verdict(seeds: int = 3, **changes: float) -> str:
        numbers = {"ivon_accuracy": 0.8}
        for kind in ("entropy", "information"):
            numbers |= {f"ivon_{kind}_auroc": 0.8, f"ivon_{kind}_border": 0.6,
                        f"ivon_{kind}_inside": 0.2}  # fmt: skip
        numbers |= changes
        results = [
            miniature[0] | {k: v + 0.01 * seed for k, v in numbers.items()} for seed in range(seeds)
        ]
        found = segmentation.check(results)
        assert found.verdict in JUDGEMENTS
        gain = np.mean([r["ivon_nll"] - r["map_nll"] for r in results])
        assert found.numbers["nll_gain"] == pytest.approx(gain)
        return found.verdict

    assert verdict() == "reproduced"
    assert verdict(seeds=1) == "inconclusive"
    assert verdict(ivon_accuracy=0.5) == "inconclusive"
    for kind in ("entropy", "information"):
        assert verdict(**{f"ivon_{kind}_auroc": 0.4}) == "not reproduced"
        assert verdict(**{f"ivon_{kind}_auroc": 0.49}) == "inconclusive"
        assert verdict(**{f"ivon_{kind}_inside": 0.7}) == "not reproduced"


def test_per_pixel_rates_serve_every_resolution() -> None:
    """Images of K equal pixels train like images of one pixel: only then is lr "per pixel"."""
    settings = segmentation.SegmentationSettings(epochs=1, labels_per_image=1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, 1, 1, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (16, 1, 1), generator=generator)
    means, scales = [], []
    for side in (1, 6):
        net = torch.nn.Conv2d(3, 4, 1).double()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.1)
        model = credo.Model(net, credo.likelihoods.Categorical(ignore_index=VOID))
        method = segmentation._methods(settings, pixels=side**2)["ivon"]
        repeated = x.expand(-1, -1, side, side), y.expand(-1, side, side)
        posterior = credo.fit(model, method, repeated, epochs=5, batch_size=8, progress=False)
        means.append(posterior.mean)
        scales.append(posterior.q.scale)
    torch.testing.assert_close(means[0], means[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(scales[0], scales[1], rtol=1e-9, atol=1e-12)
