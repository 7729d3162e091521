"""Figures show the numbers they were given, nothing is cut off, and no torch is needed."""

import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scipy.stats import binomtest

import credo
from credo import report
from credo.errors import DataError
from credo.metrics import reliability, retention
from credo.report.panels import wilson_interval
from credo.report.style import GREEN, PALE, VERMILLION

RNG = np.random.RandomState(0)
PROBS = RNG.dirichlet(np.full(4, 0.4), size=200)
LABELS = np.array([RNG.choice(4, p=p) for p in PROBS])
GRID = np.linspace(-5, 5, 50)
LONG_NAMES = [f"a method with the rather long name number {i}" for i in range(7)]

FIGURES = {
    "reliability": lambda: report.reliability_diagrams(
        {name: reliability(PROBS, LABELS) for name in ("MAP", "VI, η = 1", "VI, η = 0.02")}
    ),
    "one reliability": lambda: report.reliability_diagrams({"MAP": reliability(PROBS, LABELS)}),
    "seven reliabilities": lambda: report.reliability_diagrams(
        {name: reliability(PROBS, LABELS) for name in LONG_NAMES}, columns=3
    ),
    "retention": lambda: report.retention_curves(
        {name: [retention(PROBS.argmax(1) == LABELS, -PROBS.max(1))] * 2 for name in LONG_NAMES}
    ),
    "risk": lambda: report.retention_curves(
        {"VI": retention(PROBS.argmax(1) == LABELS, -PROBS.max(1))}, risk=True
    ),
    "shift": lambda: report.shift_curves(
        {shift: {name: RNG.rand(2, 6) for name in LONG_NAMES} for shift in "abcde"}, "accuracy"
    ),
    "intervals": lambda: report.interval_calibration(
        {name: (RNG.randn(99), 0.5 + RNG.rand(99)) for name in LONG_NAMES}
    ),
    "scatter": lambda: report.predicted_against_true(
        {name: (GRID + RNG.randn(50), 0.5 + RNG.rand(50)) for name in "abcde"}, GRID
    ),
    "entropy": lambda: report.entropy_histograms(
        {name: (RNG.rand(100), RNG.rand(100) + 1) for name in ("MAP", "VI")},
        most=np.log(10),
        notes={"MAP": "AUROC 0.856"},
    ),
    "images": lambda: report.image_grid(
        RNG.rand(7, 8, 8), PROBS[:7], LABELS[:7], ["cat", "dog", "ant", "bee"]
    ),
    "regression": lambda: report.regression_band(
        GRID, np.sin(GRID), 0.1 + 0 * GRID, 0.2 + 0 * GRID,
        observed=(GRID, np.sin(GRID)), truth=np.sin(GRID),
    ),
    "curves": lambda: report.curves(
        [1, 10, 100], {name: RNG.rand(3, 3) + i for i, name in enumerate(LONG_NAMES)},
        "width", "test NLL", logx=True, logy=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES.keys())
def test_nothing_is_cut_off(make, tmp_path: Path) -> None:
    figure: Figure = make()
    path = report.save(figure, tmp_path / "new" / "figure.png", dpi=50)
    assert path.read_bytes().startswith(b"\x89PNG")
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
    # a hundredth of an inch is less than a pixel on any screen
    assert box.x0 > -0.01
    assert box.y0 > -0.01
    assert box.x1 < width + 0.01
    assert box.y1 < height + 0.01


def test_figures_leave_matplotlibs_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    FIGURES["curves"]()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("figure", "columns"), [("seven reliabilities", 3), ("shift", 4), ("scatter", 4)]
)
def test_panels_wrap_into_rows(figure: str, columns: int) -> None:
    drawn: Figure = FIGURES[figure]()
    FigureCanvasAgg(drawn).draw()
    lefts = {round(axes.get_position().x0, 2) for axes in drawn.axes}
    assert len(lefts) == columns
    assert drawn.get_figwidth() == pytest.approx(3.1 * columns)
    assert drawn.get_figheight() > 2 * 2.5  # at least two rows


def test_panels_take_no_more_room_than_they_need() -> None:
    bins = {"MAP": reliability(PROBS, LABELS), "VI": reliability(PROBS, LABELS)}
    assert report.reliability_diagrams(bins).get_figwidth() == pytest.approx(6.2)
    with pytest.raises(DataError, match="columns must be a whole number"):
        report.reliability_diagrams(bins, columns=0)


def test_a_dollar_in_a_name_begins_no_formula(tmp_path: Path) -> None:
    figure = report.reliability_diagrams({r"$\nothing{$": reliability(PROBS, LABELS)})
    report.save(figure, tmp_path / "a.png")
    shifts = report.shift_curves({"a $ b": {r"$\nothing{$": [0.1, 0.2]}}, "NLL")
    report.save(shifts, tmp_path / "b.png")


def test_retention_curves_are_means_between_zero_and_the_best() -> None:
    curves = [retention([1, 1, 0, 1], [0.1, 0.2, 0.9, 0.4]), retention([1, 0, 1, 1], [4, 3, 2, 1])]
    mean, best = report.retention_curves({"VI": curves}).axes[0].lines
    np.testing.assert_allclose(mean.get_ydata(), (curves[0].accuracy + curves[1].accuracy) / 2)
    np.testing.assert_allclose(best.get_ydata(), curves[0].oracle)
    risk, _ = report.retention_curves({"VI": curves[0]}, risk=True).axes[0].lines
    np.testing.assert_allclose(risk.get_ydata(), [np.nan, np.nan, np.nan, 0.25])


def test_gaussian_errors_are_on_the_diagonal() -> None:
    std = 0.5 + RNG.rand(20_000)
    line = report.interval_calibration({"VI": (std * RNG.randn(20_000), std)}).axes[0].lines[1]
    # the standard error of a share of 20,000 is at most 0.0036: four of them
    np.testing.assert_allclose(line.get_ydata(), line.get_xdata(), atol=0.015)


@pytest.mark.parametrize(("hits", "trials"), [(0, 1), (3, 3), (1, 4), (50, 80), (499, 500)])
def test_wilson_interval_is_scipys(hits: int, trials: int) -> None:
    interval = wilson_interval(np.array([hits / trials]), np.array([trials]))
    expected = binomtest(hits, trials).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose(np.ravel(interval), expected, atol=1e-12)


def test_reliability_diagram_has_a_dot_for_every_filled_bin() -> None:
    bins = reliability(PROBS, LABELS, bins=10)
    upper, lower = report.reliability_diagrams({"VI": bins}).axes
    filled = bins.count > 0
    assert not filled.all()
    dots = upper.collections[-1].get_offsets()
    np.testing.assert_allclose(dots, np.c_[bins.confidence, bins.accuracy][filled])
    assert [text.get_text() for text in upper.texts] == [f"ECE {bins.error:.3f}"]
    np.testing.assert_allclose([bar.get_height() for bar in lower.patches], bins.count / 200)


def test_entropies_are_shares_and_rounding_loses_none() -> None:
    most = float(np.log(10))
    above = np.nextafter(most, 9)
    figure = report.entropy_histograms({"VI": ([0.0, 0.0, 1.0, above], [most])}, most=most, bins=8)
    inside = figure.axes[0].patches[0].get_data().values
    assert inside.sum() == 1
    assert (inside[0], inside[-1]) == (0.5, 0.25)


def test_images_colour_the_truth_green_and_the_mistake_vermillion() -> None:
    probs = [[0.1, 0.2, 0.7], [0.1, 0.8, 0.1]]
    figure = report.image_grid(np.zeros((2, 8, 8)), probs, [0, 1], "abc")
    mistaken, right = (
        [to_hex(bar.get_facecolor()).upper() for bar in axes.patches]
        for axes in figure.axes
        if axes.patches
    )
    assert mistaken == [GREEN, PALE, VERMILLION]
    assert right == [PALE, GREEN, PALE]
    titles = [axes.get_title() for axes in figure.axes if axes.images]
    assert titles == ["a, taken for c", "b, recognised"]


def test_bands_are_two_standard_deviations_wide() -> None:
    x = np.array([0.0, 1.0, 2.0])
    mean, epistemic, std = x**2, 0.1 + x, 0.3 + x
    axes = report.regression_band(x, mean, epistemic, std).axes[0]
    for band, width in zip(axes.collections, (std, epistemic), strict=True):
        corners = band.get_paths()[0].vertices
        for at, low, high in zip(x, mean - 2 * width, mean + 2 * width, strict=True):
            heights = corners[corners[:, 0] == at, 1]
            assert (heights.min(), heights.max()) == pytest.approx((low, high))


def test_curves_show_mean_and_deviation_of_the_seeds() -> None:
    runs = np.array([[1.0, 2.0], [3.0, 6.0], [5.0, 4.0]])
    axes = report.curves([0, 1], {"three": runs, "one": [7.0, 8.0]}, "x", "y").axes[0]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [3, 4])
    np.testing.assert_allclose(axes.lines[1].get_ydata(), [7, 8])
    (band,) = axes.collections  # one run has no band
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((1, 6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: report.reliability_diagrams({}), "at least one method's bins, but got none"),
        (lambda: report.entropy_histograms({}, 1.0), "at least one"),
        (lambda: report.curves([1], {}, "x", "y"), "at least one series"),
        (
            lambda: report.curves([1, 2], {"VI": [[1, 2, 3]]}, "x", "y"),
            r"'VI' has shape \(1, 3\).*T = 2",
        ),
        (
            lambda: report.image_grid(np.zeros((2, 8, 8)), [[1.0]], [0], "a"),
            r"\(2, 8, 8\), \(1, 1\) and \(1,\)",
        ),
        (
            lambda: report.regression_band([0, 1], [0, 1], [0, 1], [[0], [1]]),
            r"one shape \(N,\)",
        ),
    ],
)
def test_misshapen_input_is_refused(call, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


def test_report_needs_no_torch() -> None:
    # the package's own __init__ is left out: only what report itself imports counts
    package = Path(credo.__file__).parent
    script = (
        "import sys, types\n"
        f"stub = types.ModuleType('credo'); stub.__path__ = [{str(package)!r}]\n"
        "sys.modules['credo'] = stub\n"
        "import credo.report\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
