"""`DESIGN.md` is short, its links and those of the READMEs lead somewhere, and its figures are those of a run."""

import re
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from folders import ROOT
from layers import LAYERS

DESIGN = (ROOT / "DESIGN.md").read_text()
READMES = [page for page in sorted((ROOT / "autoremat").glob("*/README.md")) if page.parent.name != "passes"]  # a link
PAGES = [ROOT / "DESIGN.md", ROOT / "passes" / "README.md", *READMES]
FIRST = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT")]
SOURCES = [path for folder in ("autoremat", "passes", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")

MOST_BYTES = 12_000

of_its_torch = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page has figures of torch 2.13")


@pytest.fixture
def five_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script with the page's example, on the one core that the page speaks of."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import five_ops

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield five_ops
    torch.set_num_threads(threads)


def absent(lines: Iterator[str]) -> list[str]:
    """The lines that the page lacks, whatever their spaces."""
    page = " ".join(DESIGN.split())
    return [line for line in lines if " ".join(line.split()) not in page]


@of_its_torch
def test_the_page_has_the_figures_of_the_first_stages(five_ops):
    found = five_ops.stages()
    assert absent(five_ops.execution_rows(found)) == []
    assert absent(five_ops.plan_rows(found)) == []
    assert absent(five_ops.figures(found)) == []


@of_its_torch
@pytest.mark.slow
def test_the_page_has_the_figures_of_code_and_of_steps_that_run(five_ops):
    found = five_ops.code()
    assert absent(five_ops.code_figures(found)) == []
    assert found.report.replans == 0


def test_the_page_is_short():
    assert len(DESIGN.encode()) <= MOST_BYTES


def test_the_page_names_every_package_in_the_sequence_of_the_layers():
    table = DESIGN.split("## 2. Packages")[1].split("## 3.")[0]
    named = [name.strip("`") for name in re.findall(r"^\| \[?(`[a-z_/.]+`)", table, re.MULTILINE)]
    names = [name.removesuffix(".py").removesuffix("/api").replace("/", ".") for name in named]
    assert [*names, "cli", "__main__", ""] == [*LAYERS]
    assert {*map(str, PAGES[1:])} <= {f"{ROOT / link}" for link in LINK.findall(table)}


@pytest.mark.parametrize("page", [*PAGES, *FIRST], ids=lambda page: f"{page.relative_to(ROOT)}")
def test_links_lead_somewhere_and_named_modules_exist(page):
    text = page.read_text()
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []
    modules = [f"/{path.relative_to(ROOT).as_posix()}" for path in SOURCES]
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert [name for name in named if not any(module.endswith(f"/{name}") for module in modules)] == []
