"""The wheel holds everything: built from what git tracks, installed into a fresh environment, found by name."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from folders import ROOT
from reports import report_for

from autoremat.basics import environment
from autoremat.basics.errors import ISSUES

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel, built from a copy of the tracked files."""
    pytest.importorskip("build")
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs the git repository")
    source = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        origin, copy = ROOT / name, source / name
        if origin.is_symlink() or origin.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin, copy, follow_symlinks=False)
    # By default the wheel is built from the sdist: what the sdist lacks, the wheel lacks too.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel installed and nothing of ours besides; torch comes from this environment."""
    home = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", "--system-site-packages", home, cwd=built)
    (wheel,) = built.glob("*.whl")
    own = next((home / "lib").glob("python*")) / "site-packages"
    # An environment made from a virtual environment sees only the system's packages, not that environment's.
    outer = [path for path in sys.path if path.endswith("site-packages")]
    (own / "outer.pth").write_text("\n".join(outer))
    run(home / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall",
        "--ignore-installed", wheel, cwd=built)  # fmt: skip
    return home / "bin" / "python"


def modules(names: list[str], prefix: str) -> set[str]:
    return {name for name in names if name.startswith(prefix) and name.endswith((".py", ".pyi", "py.typed"))}


def test_wheel_holds_every_module_and_no_tests(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "autoremat").rglob("*.py")}
    expected |= {f"autoremat/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "passes").rglob("*.py")} | {
        "autoremat/py.typed",
        "autoremat/__init__.pyi",
    }
    assert modules(names, "autoremat/") == expected
    assert {name.split("/")[0].split("-")[0] for name in names} == {"autoremat"}


def test_sdist_holds_what_its_tests_read_and_the_pages(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    unread = {name for name in tracked if name.startswith("benchmarks/results/") and Path(name).name not in tests}
    expected = {name for name in tracked if name not in unread and (ROOT / name).is_file()}
    assert expected - names == {".gitignore"}
    assert "autoremat/passes/building.py" in names  # the link to `passes/`: tests run from the unpacked folder
    assert not {name for name in names if "__pycache__" in name or name.startswith("demo-results")}


def test_the_readme_of_a_package_index_has_absolute_links(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    address = f"{ISSUES.removesuffix('/issues')}/%s/v{version('autoremat')}/docs/"
    assert f"]({address % 'raw'}demo.png)" in metadata
    assert f"]({address % 'blob'}budgets.md)" in metadata
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata) == []
    assert f"Project-URL: Issues, {ISSUES}" in metadata
    assert "Description-Content-Type: text/markdown" in metadata


def test_the_command_is_installed_with_what_it_needs(python, tmp_path):
    command = python.parent / "autoremat"
    assert "version" in run(command, "--version", cwd=tmp_path)
    (tmp_path / "report.json").write_text(report_for(None).to_json())
    assert "least possible" in run(command, "report", "report.json", "--html", "report.html", cwd=tmp_path)
    assert (tmp_path / "report.html").exists()


def test_the_backend_is_found_by_name_without_an_import_of_ours(python, tmp_path, monkeypatch):
    monkeypatch.setenv(environment.BUDGET, "1MiB")
    code = (
        "import torch, sys\n"
        "assert 'autoremat' in torch._dynamo.list_backends()\n"
        "assert 'autoremat.compiler' not in sys.modules\n"  # torch has loaded the names for Accelerate, and nothing else
        "m = torch.nn.Linear(4, 4)\n"
        "c = torch.compile(m, backend='autoremat', options={'compiler': 'aot_eager'})\n"
        "c(torch.ones(2, 4)).sum().backward()\n"
        "import autoremat\n"
        "(report,) = autoremat.reports()\n"
        "print(report.budget_bytes, report.compiler, m.weight.grad is not None)"
    )
    assert run(python, "-c", code, cwd=tmp_path).strip() == f"{2**20} aot_eager True"
