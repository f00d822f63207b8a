"""The documentation: its Python blocks run, its build has no warning, and it explains every error."""

import inspect
import json
import re
import runpy
import subprocess
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import ROOT

import autoremat
from autoremat import cli
from autoremat.basics import errors
from autoremat.options.options import OWN_KEYS, configure

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- not run: .+ -->\n+)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A Python block; a comment before it says why it cannot be run here."""

TORCH_RANGE = re.compile(r"\b2\.(\d+)\s+to\s+2\.(\d+)\b")

FROM_ELSEWHERE = re.compile(r'<(?:script|img)[^>]* src="https?:|<link[^>]* rel="(?:stylesheet|preconnect)"[^>]* href="https?:')


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line, code) of each Python block."""
    text = page.read_text()
    return [(text[: match.start(2)].count("\n"), match[2]) for match in BLOCK.finditer(text) if not match[1]]


def run_page(page: Path) -> None:
    """Run the blocks of a page one after the other, as one program that is given nothing."""
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), names)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files that the blocks write land here."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)  # Dynamo reads it of every input
        yield


def test_the_first_block_of_every_page_is_one_that_runs():
    firsts = [(page.name, BLOCK.search(page.read_text())) for page in PAGES]
    assert not [name for name, first in firsts if first is not None and first[1]]


WITH_BLOCKS = [page for page in PAGES[1:] if blocks(page)]

LONG = {"explain.md"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name in LONG)) for page in WITH_BLOCKS]
)
def test_the_python_blocks_run(page, elsewhere, capsys):
    configure(compiler="aot_eager")  # nothing waits for a C++ compiler
    run_page(page)
    assert "None" not in re.split(r"[^\w.]+", capsys.readouterr().out), "a figure that nobody has says nothing"


def test_the_quick_start_runs_as_it_is_printed(elsewhere, capsys):
    configure(compiler="aot_eager")
    page = PAGES[0]
    assert len(blocks(page)) == 1
    run_page(page)
    printed = capsys.readouterr().out
    assert "largest saved tensors" in printed
    report = autoremat.reports()[-1]
    assert 0 < int(printed.splitlines()[-1]) <= report.budget_bytes
    assert "(examples/quickstart.py)" in page.read_text()
    assert (ROOT / "examples" / "quickstart.py").is_file()


def test_the_notebook_plans_for_its_card_and_trains(elsewhere, capsys, monkeypatch):
    pytest.importorskip("transformers")
    configure(compiler="aot_eager")
    notebook = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    for cell in json.loads((ROOT / "examples" / "lora_for_a_t4.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"]).replace("LAYERS, LENGTH = 32, 4096", "LAYERS, LENGTH = 1, 256")
            exec(compile(code, "lora_for_a_t4.ipynb", "exec"), vars(notebook))
    assert "of T4 leave" in capsys.readouterr().out
    assert notebook.losses[-1] < notebook.losses[0]
    assert 0 < notebook.peak.bytes <= notebook.report.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "tutorial.md"])
def test_the_first_pages_run_under_inductor(page, elsewhere):
    run_page(next(path for path in PAGES if path.name == page))


def test_every_error_and_warning_is_explained():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    kinds = [
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
    ]
    assert len(kinds) > 7
    sections = Counter(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    assert {name: sections[name] for name in kinds} == dict.fromkeys(kinds, 1)


def test_pages_say_what_the_code_says():
    pages = runpy.run_path(str(ROOT / "docs" / "hooks" / "pages.py"))["PAGES"]
    assert len(pages) == 2
    for path, written in pages.items():
        assert written(path.read_text()) == path.read_text(), "python docs/hooks/pages.py writes it anew"


def test_every_public_name_is_in_the_reference_once():
    listed = Counter(re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    apart = {"policies": "planner.constraints.policies"} | {name: "basics.errors" for name in vars(errors)}
    public = [name for name in autoremat.__all__ if name != "__version__"]
    assert not [name for name in public if listed[f"autoremat.{apart.get(name, name)}"] != 1]


def test_every_option_and_command_is_mentioned():
    text = "\n".join(page.read_text() for page in PAGES)
    assert not [key for key in OWN_KEYS if f"`{key}`" not in text and f'"{key}"' not in text and f"{key}=" not in text]
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert not [name for name in cli.main.commands if f"autoremat {name}" not in page]


def test_every_range_of_torch_versions_is_the_supported_one():
    first, last = errors.SUPPORTED_MINORS[0], errors.SUPPORTED_MINORS[-1]
    texts = {page.name: page.read_text() for page in [*PAGES, ROOT / "DESIGN.md"]}
    ranges = [(name, int(found[1]), int(found[2])) for name, text in texts.items() for found in TORCH_RANGE.finditer(text)]
    assert {name for name, *_ in ranges} >= {"README.md", "index.md", "troubleshooting.md"}
    assert {tuple(bounds) for _, *bounds in ranges} == {(first, last)}, ranges
    assert f'"torch>=2.{first},<2.{last + 1}"' in (ROOT / "pyproject.toml").read_text()


def test_every_page_is_in_the_table_of_contents():
    contents = (ROOT / "mkdocs.yml").read_text()
    assert not [page.name for page in PAGES[1:] if page.name not in contents]


@pytest.mark.slow
def test_the_build_has_no_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        assert not FROM_ELSEWHERE.search(page.read_text()), page
    planner = (tmp_path / "planner.html").read_text()
    assert "<math" in planner
    assert "arithmatex" not in planner
    assert ":class:" not in (tmp_path / "api.html").read_text()
