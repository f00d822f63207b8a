"""Torch's caches and ours together: no stale plan, and the right report also where torch's caches answer.

Each compilation runs in a process of its own, with the cache folders that the test gives it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import ROOT
from processes import ONE_THREAD

import autoremat

pytestmark = pytest.mark.slow


SCRIPT = """
import json, sys, warnings
import torch
from torch import nn
import autoremat
from autoremat.compiler import cache_key, compile_loop, partitioner

request = json.loads(sys.argv[1])
if request["source_hash"]:
    compile_loop.source_hash = cache_key.source_hash = lambda: request["source_hash"]
calls = []
original = partitioner.Partitioner.__call__
def counted(self, *args, **kwargs):
    calls.append(1)
    return original(self, *args, **kwargs)
partitioner.Partitioner.__call__ = counted

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

answers = []
for budget in request["budgets"]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    calls.clear()
    before = len(autoremat.reports())
    model = nn.Sequential(*(Block(32) for _ in range(2)))
    x = torch.randn(256, 32)
    options = {"memory_budget": budget, **request["options"]}
    compiled = torch.compile(lambda x: model(x).square().mean(), backend="autoremat", options=options)
    saved = {}
    def pack(tensor):
        if tensor is not x and not isinstance(tensor, nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    if request["train"]:
        for step in range(2):
            model.zero_grad()
            with autoremat.track_peak("cpu") as peak:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    loss = compiled(x)
                kept = sum(saved.values())
                saved.clear()
                loss.backward()
        gradient = sum(float(p.grad.double().abs().sum()) for p in model.parameters())
        measured = peak.bytes
    else:
        with torch.no_grad():
            loss, gradient, measured, kept = compiled(x), 0.0, 0, 0
    answers.append({
        "reports": [json.loads(r.to_json()) for r in autoremat.reports()[before:]],
        "calls": len(calls), "measured": measured, "kept": kept, "loss": float(loss), "gradient": gradient,
    })
print("ANSWER " + json.dumps(answers))
"""

SHARE, LESS = 0.9, 0.6
"""Budgets, as shares of the reference peak."""

VARYING = {"planning_seconds"}
"""What differs between two reports of the same plan, beside the places of kernels in code that is generated again."""


@dataclass
class Caches:
    """Cache folders of their own, and processes that use them."""

    folder: Path
    script: Path
    """Its path is part of the key: reports name source lines."""

    @property
    def records(self) -> list[Path]:
        return sorted((self.folder / "autoremat" / "reports").glob("*.json"))

    def run(self, *budgets: object, source_hash: str = "", train: bool = True, **options: object) -> list[dict[str, Any]]:
        request = {"budgets": budgets, "source_hash": source_hash, "options": options, "train": train}
        environment = {
            **os.environ,
            **ONE_THREAD,
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "AUTOREMAT_CACHE_DIR": str(self.folder / "autoremat"),
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, str(self.script), json.dumps(request)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        return json.loads(line.removeprefix("ANSWER "))


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Caches, dict[str, Any]]:
    """Caches that hold one compilation, and what it answered."""
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(SCRIPT)
    caches = Caches(tmp_path_factory.mktemp("cold"), script)
    (answer,) = caches.run(SHARE)
    assert answer["calls"] >= 1
    return caches, answer


@pytest.fixture
def caches(cold: tuple[Caches, dict[str, Any]], tmp_path: Path) -> Caches:
    """A copy of those caches, to spoil."""
    shutil.copytree(cold[0].folder, tmp_path / "copy")
    return Caches(tmp_path / "copy", cold[0].script)


def report_of(answer: dict[str, Any]) -> dict[str, Any]:
    (report,) = answer["reports"]
    return report


def lasting(report: dict[str, Any]) -> dict[str, Any]:
    kernels = [(kernel["name"], kernel["bytes"]) for kernel in report["kernels"]]
    return {key: value for key, value in report.items() if key not in VARYING} | {"kernels": kernels}


def test_two_budgets_never_share_an_entry_and_warm_starts_report_the_same(cold, caches):
    """The caches hold one budget; a new process asks for another and for that one, a third process for both again."""
    high = cold[1]
    low, again = caches.run(LESS, SHARE)
    low_again, high_again = caches.run(LESS, SHARE)
    assert low["calls"] >= 1
    assert [answer["calls"] for answer in (again, low_again, high_again)] == [0, 0, 0]
    assert report_of(low)["budget_bytes"] < report_of(high)["budget_bytes"]
    assert report_of(low)["recomputed_ops"] > report_of(high)["recomputed_ops"]
    assert low["kept"] < high["kept"]
    assert low["measured"] < high["measured"]
    for answer, expected in ((again, high), (high_again, high), (low_again, low)):
        assert lasting(report_of(answer)) == lasting(report_of(expected))
        assert answer["kept"] == expected["kept"]
        assert answer["measured"] == expected["measured"]
    for answer in (high, low, again, low_again):
        report = report_of(answer)
        assert report["compiled_peak_bytes"] is not None
        assert answer["kept"] == report["saved_bytes"] == sum(tensor["bytes"] for tensor in report["saved"])
        assert answer["measured"] <= report["budget_bytes"]
        assert answer["loss"] == pytest.approx(high["loss"], rel=1e-5)
        assert answer["gradient"] == pytest.approx(high["gradient"], rel=1e-4)


@pytest.mark.parametrize("damage", ["deleted", "broken"])
def test_a_lost_record_is_made_again(cold, caches, damage):
    (record,) = caches.records
    if damage == "deleted":
        record.unlink()
    else:
        record.write_text("{")
    found, warm = caches.run(SHARE, SHARE)
    # The compilation that restores the record counts as another attempt.
    expected = {**lasting(report_of(cold[1])), "replans": report_of(found)["replans"]}
    assert lasting(report_of(found)) == expected
    assert found["measured"] == cold[1]["measured"]
    assert caches.records == [record]
    assert warm["calls"] == 0
    assert lasting(report_of(warm)) == expected


def test_another_version_of_our_code_plans_anew(cold, caches):
    (changed,) = caches.run(SHARE, source_hash="of another version")
    assert changed["calls"] >= 1
    assert len(caches.records) == 2
    assert lasting(report_of(changed)) == lasting(report_of(cold[1]))


def test_options_that_change_the_plan_are_part_of_the_key(cold, caches):
    (best_effort,) = caches.run(1, on_infeasible="best_effort")
    report = report_of(best_effort)
    assert best_effort["calls"] >= 1
    assert report["budget_bytes"] == 1
    assert report["predicted_peak_bytes"] < report_of(cold[1])["predicted_peak_bytes"]
    assert len(caches.records) == 2


def test_inference_has_no_report_cold_or_warm(cold, caches):
    for answer in caches.run(SHARE, SHARE, train=False):
        assert answer["reports"] == []
        assert answer["calls"] == 0
    (trained,) = caches.run(SHARE)
    assert trained["calls"] == 0
    assert lasting(report_of(trained)) == lasting(report_of(cold[1]))


def test_code_from_a_cache_warns_of_constraints_again():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    hits = []
    for _ in range(2):
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters["aot_autograd"]
        before = counters["autograd_cache_hit"]
        compiled = torch.compile(model, backend="autoremat", options={"save": ["nothing.*"]})
        with pytest.warns(autoremat.ConstraintWarning, match="matches nothing"):
            compiled(torch.randn(64, 32)).sum().backward()
        hits.append(counters["autograd_cache_hit"] - before)
        assert "nothing.*" in autoremat.reports()[-1].constraint_warnings[0]
    assert hits == [0, 1]
