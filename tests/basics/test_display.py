"""What results look like at a prompt, in ``print``, in ``rich.print`` and in a notebook."""

from __future__ import annotations

import html
import io
from html.parser import HTMLParser

import pytest
import rich.console
import torch
from torch import fx, nn

import autoremat
from autoremat.basics.display import PlainTable
from autoremat.capture.source_info import origin
from autoremat.planner.search.pareto_front import HEADROOM_NOTE
from autoremat.report.text_tables import short_source

OPTIONS = {"compiler": "aot_eager"}
ODD = "[red]<b>&\x1b[31m"


@pytest.fixture(scope="module")
def shown() -> dict[str, object]:
    """One of each that users get."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))), torch.randn(128, 32)
    model.add_module(ODD.replace(".", ""), nn.Linear(32, 32))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    report = autoremat.explain(loss, x, options={**OPTIONS, "memory_budget": 0.8})
    return {
        "Report": report,
        "Plan": report.plan,
        "ReportDiff": report.diff(autoremat.explain(loss, x, options=OPTIONS)),
        "StepProfile": autoremat.profile_step(loss, x, memory_budget=0.8, options=OPTIONS),
        "Pareto": autoremat.pareto(loss, x, points=3, torch_budgets=(), options=OPTIONS),
        "Fit": autoremat.max_batch(lambda size: torch.randn(size, 32), loss, "300KiB", options=OPTIONS),
    }


KINDS = ("Report", "Plan", "ReportDiff", "StepProfile", "Pareto", "Fit")


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_shows_a_line(shown, kind):
    text = repr(shown[kind])
    assert text.startswith(f"<{kind}: ")
    assert len(text) < 240
    assert "\n" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_rich_shows_what_print_shows(shown, kind):
    console = rich.console.Console(file=io.StringIO(), width=120)
    console.print(shown[kind])
    printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert printed == str(shown[kind]).splitlines()
    assert 3 <= len(printed) < 60


class Cells(HTMLParser):
    """The texts of the cells of all tables, and the names of all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.cells.append(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_notebook_shows_tables(shown, kind):
    found = Cells(shown[kind]._repr_html_())
    assert found.tags <= {"table", "caption", "tr", "th", "td", "br"}
    words = {"...", *" ".join(found.cells).split()}
    for printed in str(shown[kind]).split():  # part of a word, where a long path is wrapped
        assert any(printed in word for word in words), printed


def test_texts_are_no_markup_wherever_they_come_from():
    table = PlainTable(ODD, ("what",), numbers=0)
    table.add_row(ODD)
    for text in (str(table), "\n".join(Cells(table._repr_html_()).cells)):
        assert text.count("[red]<b>&\\x1b[31m") == 2, text
    assert "<b>" not in table._repr_html_()


def test_points_say_that_they_exclude_the_code_headroom(shown):
    assert str(shown["Pareto"]).splitlines()[-1] == HEADROOM_NOTE
    assert HEADROOM_NOTE in html.unescape(shown["Pareto"]._repr_html_())


@pytest.mark.parametrize(
    ("file", "source", "short"),
    [
        ("/v/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py",
         "transformers/models/llama/modeling_llama.py:7", "transformers/models/llama/modeling_llama.py:7"),
        ("/usr/lib/python3/dist-packages/timm/layers/mlp.py", "timm/layers/mlp.py:7", "timm/layers/mlp.py:7"),
        ("/home/me/project/src/model/train.py", "/home/me/project/src/model/train.py:7", "src/model/train.py:7"),
    ],
)  # fmt: skip
def test_lines_of_installed_packages_have_a_path_within_the_package(file, source, short):
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = f'  File "{file}", line 7, in forward\n    return x'
    assert origin(node) == ("", source)
    assert short_source(source) == short
