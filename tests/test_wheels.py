"""What the two distributions hold, and that each works installed by itself."""

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNTIME = {
    "torch", "numpy", "scipy", "scikit-learn", "safetensors", "filelock", "joblib", "rich", "typer"
}  # fmt: skip
pytestmark = pytest.mark.slow
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def build(source: Path, tree: Path) -> zipfile.ZipFile:
    """The wheel of a source tree, from a copy, so that nothing of an older build gets into it."""
    junk = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (source / name).exists():
            shutil.copy(source / name, tree)
    for name in ("src", "credo_papers", "tests"):
        if (source / name).is_dir():
            shutil.copytree(source / name, tree / name, ignore=junk)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tree / "dist")],
        cwd=tree, capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next((tree / "dist").glob("*.whl")))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(ROOT, tmp_path_factory.mktemp("wheel") / "library")


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(ROOT / "papers", tmp_path_factory.mktemp("wheel") / "papers")


def requirements(wheel: zipfile.ZipFile) -> list[str]:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []


def test_the_library_s_wheel_has_the_library_only(library: zipfile.ZipFile) -> None:
    files = [name for name in library.namelist() if ".dist-info/" not in name]
    modules = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")}
    templates = ROOT / "src" / "credo" / "report" / "templates"
    data = {p.relative_to(ROOT / "src").as_posix() for p in templates.iterdir()}
    assert set(files) == modules | data | {"credo/py.typed"}
    assert "credo/report/templates/page.html.j2" in files
    rooms = {part for name in files for part in Path(name).parts}
    assert not rooms & {"tests", "papers", "credo_papers", "experiments", "ledger", "bench"}


def test_the_library_needs_matplotlib_for_an_extra_only(library: zipfile.ZipFile) -> None:
    needed = {r.split(">=")[0].split("==")[0] for r in requirements(library) if "extra" not in r}
    assert needed == RUNTIME
    plots = [r for r in requirements(library) if r.startswith("matplotlib")]
    assert plots
    assert all("extra" in r for r in plots)


def test_the_papers_wheel_has_the_ledger_and_the_entry_point(papers: zipfile.ZipFile) -> None:
    names = papers.namelist()
    assert not [name for name in names if "test" in Path(name).name]
    for entry in (ROOT / "papers" / "credo_papers" / "ledger").glob("*.json"):
        assert f"credo_papers/ledger/{entry.name}" in names
    version = importlib.metadata.version("credo-bayes")
    assert f"credo-bayes[plots]=={version}" in requirements(papers)
    entry_points = papers.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert entry_points.split() == ["[credo.commands]", "papers", "=", "credo_papers"]


def run_installed(
    wheels: list[zipfile.ZipFile], script: str, folder: Path, without: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script where nothing is installed but the wheels and this machine's other packages."""
    installed, others = folder / "installed", folder / "others"
    others.mkdir()
    for wheel in wheels:
        wheel.extractall(installed)
    left_out = ("credo", "_credo", "__editable__", *without)
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(left_out) and package.suffix != ".pth":
            (others / package.name).symlink_to(package)
    start = f"import sys; sys.path += [{str(installed)!r}, {str(others)!r}]\n"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + script],
        cwd=folder, capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip


def test_the_library_works_without_matplotlib_and_without_the_papers(
    library: zipfile.ZipFile, tmp_path: Path
) -> None:
    script = (
        "import credo, torch\n"
        "net = torch.nn.Linear(2, 1)\n"
        "data = torch.randn(8, 2), torch.randn(8, 1)\n"
        "model = credo.Model(net, credo.likelihoods.Gaussian(0.1))\n"
        "credo.fit(model, credo.VI(), data, epochs=1, progress=False).predict(data[0])\n"
        "assert 'matplotlib' not in sys.modules\n"
        "from credo.cli import main\n"
        "sys.exit(10 * main(['list']) + main(['demo']))\n"
    )
    done = run_installed([library], script, tmp_path, without=("matplotlib", "mpl_toolkits"))
    assert done.returncode == 11, done.stderr
    about_papers, about_plots = done.stderr.splitlines()
    assert "pip install credo-papers" in about_papers
    assert 'pip install "credo-bayes[plots]"' in about_plots


def test_both_wheels_together_list_the_experiments(
    library: zipfile.ZipFile, papers: zipfile.ZipFile, tmp_path: Path
) -> None:
    script = "from credo.cli import main\nsys.exit(main(['list', '--short']))\n"
    done = run_installed([library, papers], script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "003-kl-weights" in done.stdout
