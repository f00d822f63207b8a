"""The kernels of code that Inductor generates for a CPU: what they compute, read and write, by their seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autoremat
from autoremat.basics.units import format_seconds
from autoremat.planner.cost.durations import arithmetic_seconds, overlapped
from autoremat.planner.graph.op import Kind
from autoremat.report.text_tables import as_text, figures

ROWS, WIDTH, WORDS = 4096, 64, 3000
FLOAT = 4


def explained(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> autoremat.Report:
    return autoremat.explain(function, *inputs, lower=True, options={"cost_model": "roofline"})


def forward_seconds(report: autoremat.Report) -> dict[str, float]:
    """Returns the seconds of the forward's kernels, by the name of the last op that they compute."""
    assert report.plan is not None
    names = [report.plan.graph.ops[index].name for index in report.plan.schedule.forward]
    kernels = zip(names, report.kernels, strict=False)
    return {name: kernel.seconds for name, kernel in kernels if kernel is not None and kernel.seconds is not None}


def seconds_of(report: autoremat.Report, op: str, read: int, written: int) -> float:
    """Returns the seconds of a kernel that computes one op beside so many bytes."""
    assert report.plan is not None
    graph = report.plan.graph
    index = next(index for index, one in enumerate(graph.ops) if one.name == op)
    return overlapped(graph, arithmetic_seconds(graph)[index], read, written)


def test_kernels_read_what_the_code_reads():
    """The table's picked rows, a slice of the gates, and the whole of the tokens."""
    words = nn.Embedding(WORDS, WIDTH)

    def loss(tokens: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return ((words(tokens) * gates[:, :WIDTH]).view(ROWS, WIDTH) @ words.weight[:WIDTH]).mean()

    report = explained(loss, torch.zeros(ROWS, dtype=torch.int64), torch.ones(ROWS, 4 * WIDTH))
    table = min(WORDS, ROWS) * WIDTH * FLOAT  # a part of it may be read twice, and all of it once
    read, written = ROWS * 8 + table + ROWS * WIDTH * FLOAT, ROWS * WIDTH * FLOAT
    assert forward_seconds(report)["mul"] == pytest.approx(seconds_of(report, "mul", read, written))


def test_the_report_has_the_seconds_of_the_code_beside_those_of_the_rules():
    layers = nn.Sequential(nn.Linear(16, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 8, bias=False))
    report = explained(lambda x: layers(x).mean(), torch.ones(ROWS, 16))
    assert report.plan is not None
    assert report.code_seconds is not None
    seconds, products = forward_seconds(report), [op for op in report.plan.graph.ops if op.kind is Kind.EXTERN]
    moved = ROWS * WIDTH * FLOAT
    assert seconds["tanh"] == pytest.approx(seconds_of(report, "tanh", moved, moved))
    assert [seconds[op.name] for op in products if op.forward] == [op.seconds for op in products if op.forward]
    assert sum(seconds.values()) == pytest.approx(report.code_seconds[0])
    assert report.seconds == sum(report.code_seconds) > sum(op.seconds for op in products)
    assert autoremat.Report.from_json(report.to_json()).seconds == report.seconds

    text = dict(figures(report))["predicted time"]
    assert text.startswith(format_seconds(report.seconds))
    assert f"the rules of fusion predict {format_seconds(report.predicted_seconds)}, " in text
    table = as_text(report.op_bytes_table()).splitlines()
    assert table[1].split()[:3] == ["simulated", "replayed", "seconds"]
    assert any(line.split()[4:7] == [*format_seconds(seconds["tanh"]).split(), "tanh"] for line in table)
