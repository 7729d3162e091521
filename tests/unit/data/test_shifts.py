"""Shifts: the identity at severity 0, ever further from it, the same by seed; named refusals."""

from __future__ import annotations

import pickle
from itertools import pairwise

import documented
import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn.functional import avg_pool2d

from credo.data import digits, shifts
from credo.data.shifts import IMAGES, SEVERITIES, TABLES, on_pixels, rolled, rotated
from credo.errors import DataError, UnsupportedError


def photographs(size: int, grey: bool) -> Tensor:
    """Pieces of scikit-learn's two photographs, averaged down to images of this size."""
    photos = torch.from_numpy(np.stack(load_sample_images().images)).permute(0, 3, 1, 2) / 255
    pieces = photos.unfold(2, 4 * size, 3 * size).unfold(3, 4 * size, 3 * size)
    pieces = avg_pool2d(pieces.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 4 * size, 4 * size), 4)
    return (pieces.mean(1, keepdim=True) if grey else pieces).clamp(0, 1)


def table(rows: int = 400) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x @ torch.diag(torch.tensor([3.0, 1.0, 0.5, 2.0]).double()) + 5


SETS = {"grey": photographs(28, grey=True), "coloured": photographs(32, grey=False)}


def distances(shift, x: Tensor) -> list[float]:
    """The mean over images of the root mean square change, at severities 1 to 5."""
    changes = [(shift(x, severity) - x).flatten(1) for severity in SEVERITIES]
    return [float(change.square().mean(1).sqrt().mean()) for change in changes]


# --- what all share -------------------------------------------------------------------------------


@pytest.mark.parametrize("x", SETS.values(), ids=SETS.keys())
@pytest.mark.parametrize("name", IMAGES)
def test_severity_goes_ever_further_from_the_images(name, x):
    assert torch.equal(IMAGES[name](x, 0), x)
    steps = [0.0, *distances(IMAGES[name], x)]
    assert all(b > a for a, b in pairwise(steps)), steps


@pytest.mark.parametrize("name", IMAGES)
def test_severity_never_returns_on_tiny_images(name):
    if name == "pixelate":
        pytest.skip("eight pixels make blocks of seven, six or five, which are no steps")
    steps = distances(IMAGES[name], digits().test[0])
    assert steps[0] > 0
    assert all(b >= a for a, b in pairwise(steps)), steps


@pytest.mark.parametrize("name", IMAGES)
def test_images_stay_images_and_the_seed_decides(name):
    x = SETS["coloured"].double()
    kept = x.clone()
    once, again, other = (IMAGES[name](x, 4, seed) for seed in (7, 7, 8))
    assert torch.equal(x, kept)
    assert once.shape == x.shape
    assert once.dtype == x.dtype
    assert 0 <= float(once.min()) <= float(once.max()) <= 1
    assert torch.equal(once, again)
    drawn = name.endswith("noise") or name in ("haze", "occlusion")
    assert torch.equal(once, other) != drawn
    half = IMAGES[name](x.half(), 4, seed=7)
    assert half.dtype == torch.float16
    if name == "shot_noise":
        return  # other rates draw other counts
    assert float((half.double() - once).abs().mean()) < 0.02  # 11 bits, and JPEG's 256 levels


@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES.keys())
def test_table_severity_goes_ever_further(kind):
    train = table()
    shift = kind(train)
    labels = torch.arange(len(train))
    same = shift.with_labels(train, labels, 0)
    assert torch.equal(same[0], train)
    assert torch.equal(same[1], labels)
    moved = [shift.with_labels(train, labels, severity)[0] for severity in SEVERITIES]
    away = [float((x - train).square().mean()) for x in moved]
    if kind is shifts.CovariateTilt:
        away = [float(shift.scores(x).mean()) for x in moved]
    assert all(b > a for a, b in pairwise([0.0, *away])), away
    assert not torch.equal(moved[2], shift.with_labels(train, labels, 3, seed=5)[0])
    assert moved[0].dtype == train.dtype


@pytest.mark.parametrize("shift", [IMAGES["jpeg"], on_pixels("haze", 0.1, 0.5)], ids=str)
def test_shifts_reach_other_processes(shift):
    x = SETS["grey"] if shift is IMAGES["jpeg"] else (SETS["grey"] - 0.1) / 0.5
    assert torch.equal(pickle.loads(pickle.dumps(shift))(x, 2), shift(x, 2))


def test_every_parameter_is_documented():
    assert not documented.gaps({"credo.data.shifts": shifts})


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((1, 1, 8, 8)), "needs a torch tensor, but got ndarray"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.uint8), r"torch.uint8 \(of uint8 pixels: x.float"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.int64), "needs floating-point numbers"),
        (torch.zeros(8, 8, 8), "adds the channel"),
        (torch.zeros(8, 8), r"needs images \(N, C, H, W\)"),
        (torch.zeros(0, 1, 8, 8), "at least one pixel"),
        (torch.full((1, 1, 8, 8), 200.0), "reach from 200 to 200: divide pixels of 0 to 255"),
        (torch.full((1, 1, 8, 8), -0.5), "on_pixels"),
        (torch.full((1, 1, 8, 8), float("nan")), "nan or infinite"),
    ],
)
def test_what_is_no_image_is_refused_by_name(x, words):
    for severity in (0, 3):
        with pytest.raises(DataError, match=words):
            IMAGES["contrast"](x, severity)


@pytest.mark.parametrize("severity", [-1, 6, 2.5, "3", True, None])
def test_severities_are_zero_to_five(severity):
    with pytest.raises(DataError, match="rotation: severity must be a whole number from 0"):
        IMAGES["rotation"](SETS["grey"], severity)
    with pytest.raises(DataError, match="missingness: severity must be a whole number from 0"):
        shifts.Missingness(table())(table(), severity)


def test_unknown_names_get_the_nearest_one():
    with pytest.raises(DataError, match="Did you mean 'gaussian_blur'"):
        shifts.image_shift("gausian_blur")


# --- against other code ---------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", shifts.ROTATIONS)
def test_rotated_is_the_published_protocol(degrees):
    """Ovadia et al. turn arrays (N, 28, 28, 1) by scipy and cut out the centre."""
    x = SETS["grey"][:3]
    turned = ndimage.rotate(x.permute(0, 2, 3, 1).numpy(), degrees, axes=[-2, -3])
    top, left = (side // 2 - 14 for side in turned.shape[1:3])
    expected = turned[:, top : top + 28, left : left + 28, 0]
    np.testing.assert_allclose(rotated(x, degrees)[:, 0].numpy(), expected, atol=1e-6)


def test_many_images_are_turned_as_few_are():
    x = torch.rand(200, 1, 10, 12)  # more planes than pixels: the matrix
    assert len(x) > 120
    # float32 sums of 120 products of order one, against float64 splines
    torch.testing.assert_close(rotated(x, 33)[:5], rotated(x[:5], 33), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        rotated(rotated(x, 90), -90)[..., 1:-1], x[..., 1:-1], atol=1e-5, rtol=0
    )
    assert torch.equal(rotated(x, 360), x)


def test_rolled_is_cyclic_along_the_width():
    x = SETS["grey"]
    for pixels in shifts.ROLLS:
        expected = np.roll(x.permute(0, 2, 3, 1).numpy(), pixels, axis=-2)
        np.testing.assert_array_equal(rolled(x, pixels).permute(0, 2, 3, 1).numpy(), expected)
    assert shifts.ROLLS[0] == 2
    assert shifts.ROLLS[-1] == 26
    two_pixels = IMAGES["translation"](x, 1)
    assert torch.equal(two_pixels, rolled(x, 2))


def test_blur_is_that_of_scipy():
    x = SETS["coloured"].double()
    for severity, scale in zip(SEVERITIES, IMAGES["gaussian_blur"].amounts, strict=True):
        radius = max(1, int(np.ceil(4 * scale)))
        expected = ndimage.gaussian_filter(
            x.numpy(), (0, 0, scale, scale), mode="nearest", radius=(0, 0, radius, radius)
        )
        blurred = IMAGES["gaussian_blur"](x, severity).numpy()
        np.testing.assert_allclose(blurred, expected, atol=1e-12)


def test_pixelate_is_that_of_pillow():
    x = (SETS["coloured"][:3] * 255).round() / 255
    for severity, factor in zip(SEVERITIES, IMAGES["pixelate"].amounts, strict=True):
        ours = IMAGES["pixelate"](x, severity)
        for image, found in zip(x, ours, strict=True):
            picture = Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy())
            small = picture.resize((int(32 * factor),) * 2, Image.Resampling.BOX)
            back = np.asarray(small.resize((32, 32), Image.Resampling.BOX)) / 255
            # Pillow rounds to whole levels after each of three passes
            assert np.abs(found.permute(1, 2, 0).numpy() - back).max() <= 1.6 / 255


def test_brightness_is_that_of_hue_saturation_and_value():
    import colorsys

    x = SETS["coloured"][:1].double()
    x[0, :, 0, 0] = 0.0  # black has no hue
    found = IMAGES["brightness"](x, 5)
    for row, column in ((0, 0), (3, 9), (20, 14), (31, 31)):
        hue, saturation, value = colorsys.rgb_to_hsv(*x[0, :, row, column].tolist())
        expected = colorsys.hsv_to_rgb(hue, saturation, min(1.0, value + 0.3))
        assert found[0, :, row, column].tolist() == pytest.approx(expected, abs=1e-12)


def test_noise_has_the_strength_it_says():
    x = torch.full((50, 1, 32, 32), 0.5, dtype=torch.float64)
    entries = x.numel()
    for severity, scale in zip(SEVERITIES, IMAGES["gaussian_noise"].amounts, strict=True):
        change = IMAGES["gaussian_noise"](x, severity, seed=severity) - x
        # the standard error of a standard deviation is σ/√(2n); five of them
        assert float(change.std()) == pytest.approx(scale, rel=5 / (2 * entries) ** 0.5)
    for severity, photons in zip(SEVERITIES, IMAGES["shot_noise"].amounts, strict=True):
        change = IMAGES["shot_noise"](x, severity, seed=severity) - x
        assert float(change.var()) == pytest.approx(0.5 / photons, rel=10 / (2 * entries) ** 0.5)
    for severity, share in zip(SEVERITIES, IMAGES["impulse_noise"].amounts, strict=True):
        found = IMAGES["impulse_noise"](x, severity, seed=severity)
        hit = found != 0.5
        assert abs(float(hit.double().mean()) - share) < 5 * (share / entries) ** 0.5
        assert abs(float(found[hit].mean()) - 0.5) < 2.5 / int(hit.sum()) ** 0.5


def test_occlusions_cover_each_other_and_lie_anywhere():
    x = torch.zeros(200, 1, 28, 28)
    covered = [IMAGES["occlusion"](x, severity) == 0.5 for severity in SEVERITIES]
    for small, large in pairwise(covered):
        assert bool((large | ~small).all())
    assert [int(c[0].sum()) for c in covered] == [6**2, 8**2, 11**2, 14**2, 17**2]
    # 200 squares at 23 places each way miss one with probability (22/23)²⁰⁰ = 1e-4
    assert bool(covered[0].any(0)[0].any(0).all())
    assert bool(covered[0].any(0)[0].any(1).all())


def test_haze_is_thick_and_smooth():
    x = SETS["grey"]
    cloud = IMAGES["haze"](x, 5)
    assert float(cloud.std((-2, -1)).mean()) < float(x.std((-2, -1)).mean())
    assert float(cloud.mean()) > 0.3
    assert float(cloud.min()) < 0.3


# --- standardised images --------------------------------------------------------------------------


def test_shifts_of_standardised_images_are_those_of_their_pixels():
    from credo.data import standardise

    x = SETS["coloured"]
    (scaled,) = standardise(x)
    mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3), correction=0)
    for name, shift in IMAGES.items():
        expected = (shift(x, 3) - mean[:, None, None]) / std[:, None, None]
        found = on_pixels(name, mean, std)(scaled, 3)
        if name == "shot_noise":  # other rates draw other counts
            assert float((found - expected).mean()) == pytest.approx(0, abs=0.01)
        elif name == "jpeg":  # rounding moves some pixels by a level
            assert float((found - expected).abs().mean()) < 0.01
        else:
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert torch.equal(on_pixels("jpeg", mean, std)(scaled, 0), scaled)


def test_the_wrong_mean_is_noticed():
    x = (SETS["grey"] - 0.3) / 0.2
    with pytest.raises(DataError, match=r"pixels reach from .* instead of \[0, 1\]"):
        on_pixels("contrast", 0.5, 0.5)(x, 1)
    with pytest.raises(DataError, match="images \\(N, C, H, W\\) of 3 channels"):
        on_pixels("contrast", [0.3] * 3, [0.2] * 3)(x, 1)
    with pytest.raises(DataError, match="positive std for each channel"):
        on_pixels("contrast", [0.3, 0.2], 0.2)
    with pytest.raises(DataError, match="positive std"):
        on_pixels("contrast", 0.3, 0.0)


# --- tables ---------------------------------------------------------------------------------------


def test_feature_noise_is_in_units_of_the_columns():
    train = table(4000)
    train[:, 3] = 7.0
    change = shifts.FeatureNoise(train)(train, 3) - train
    assert float(change[:, 3].abs().max()) == 0
    for column in range(3):
        expected = 0.5 * float(train[:, column].std())
        assert float(change[:, column].std()) == pytest.approx(expected, rel=5 / 8000**0.5)


def test_missing_entries_hold_the_training_mean_and_stay_missing():
    train, x = table(500), table(300) + 1
    shift = shifts.Missingness(train)
    before = torch.zeros_like(x, dtype=torch.bool)
    for severity, share in zip(SEVERITIES, shift.amounts, strict=True):
        found = shift(x, severity)
        lost = found != x
        means = train.mean(0).expand_as(x)
        torch.testing.assert_close(found[lost], means[lost], atol=1e-12, rtol=0)
        assert bool((lost | ~before).all())
        assert abs(float(lost.double().mean()) - share) < 5 * (share / x.numel()) ** 0.5
        before = lost


def test_tilted_rows_are_drawn_by_their_weights_with_their_labels():
    train = table(2000)
    tilt = shifts.CovariateTilt(train)
    score = tilt.scores(train)
    assert float(score.mean()) == pytest.approx(0, abs=1e-12)
    assert float(score.std(correction=0)) == pytest.approx(1, abs=1e-12)
    # the tilt of a standard normal score moves its mean by a
    labels = torch.arange(len(train))
    for severity in (1, 2, 3):
        weights = tilt.weights(train, severity)
        assert float(weights.sum()) == pytest.approx(1)
        x, y = tilt.with_labels(train, labels, severity)
        assert torch.equal(x, train[y])
        expected = float((weights * score).sum())
        spread = float((weights * (score - expected) ** 2).sum()) ** 0.5
        assert abs(float(tilt.scores(x).mean()) - expected) < 5 * spread / len(x) ** 0.5


def test_inputs_without_labels_are_not_tilted():
    tilt = shifts.CovariateTilt(table())
    with pytest.raises(UnsupportedError, match="with_labels"):
        tilt(table(), 2)
    with pytest.raises(DataError, match="400 rows and 3 labels"):
        tilt.with_labels(table(), torch.arange(3), 2)


@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(5), r"needs a table \(N, D\)"),
        (torch.zeros(5, 4, dtype=torch.int64), "needs floating-point"),
        (torch.zeros(0, 4), "at least one row"),
        (torch.full((5, 4), float("inf")), "nan or infinite"),
        (torch.zeros(5, 3), "training table of 4 columns, but got one of 3"),
    ],
)
def test_what_is_no_table_is_refused_by_name(kind, x, words):
    shift = kind(table())
    with pytest.raises(DataError, match=words):
        shift.with_labels(x, torch.zeros(len(x)), 2)
    with pytest.raises(DataError, match="two rows at least"):
        kind(table()[:1])
