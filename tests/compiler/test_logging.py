"""What is logged: a line per graph, why a plan is made again, and the report in torch's structured trace."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from folders import ROOT
from torch import nn

import autoremat

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
options = {"memory_budget": 0.9, "compiler": "aot_eager", "on_infeasible": "best_effort"}
torch.compile(model, backend="autoremat", options=options)(torch.randn(64, 8)).sum().backward()
"""


def test_one_line_per_graph_at_info(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    with caplog.at_level(logging.INFO, logger="autoremat"):
        compiled = torch.compile(model, backend="autoremat", options={"compiler": "aot_eager"})
        compiled(torch.randn(64, 8)).sum().backward()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "autoremat"]
    assert line == autoremat.reports()[-1].summary()
    for word in ("no budget", "peak", "->", "recomputation", "optimum", "planned in"):
        assert word in line


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.mark.slow
def test_torch_switches_it_on_and_traces_the_report(tmp_path):
    done = run(TORCH_LOGS="+autoremat", TORCH_TRACE=str(tmp_path))
    lines = [line for line in done.stderr.splitlines() if "budget" in line and "peak" in line]
    assert len([line for line in lines if " INFO" in line or line.startswith("I")]) == 1, done.stderr
    (trace,) = tmp_path.glob("*.log")
    text = trace.read_text().splitlines()
    marks = [number for number, line in enumerate(text) if '"autoremat_report"' in line]
    assert len(marks) == 1
    payload = []
    for line in text[marks[0] + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line[1:])
    report = autoremat.Report.from_json("\n".join(payload))
    assert report.predicted_peak_bytes > 0
    assert json.loads(text[marks[0]].split("] ", 1)[1])["artifact"]["encoding"] == "json"
