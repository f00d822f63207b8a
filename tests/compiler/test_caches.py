"""Torch's caches and ours together: no stale plan, and the right report; each compilation runs in a process of its own."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import Block
from processes import run_ranks
from torch import nn

import autoremat
from autoremat.compiler import compile_loop, joint_graph
from autoremat.compiler import problem as records

pytestmark = pytest.mark.slow


def trained(_: int, budgets: Sequence[object], source_hash: str, train: bool, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What two steps of a model show, or one without gradients, after another under each budget."""
    if source_hash:
        compile_loop.source_hash = records.source_hash = lambda: source_hash
    calls, partition = [], joint_graph.Partitioner.__call__

    def counted(self: joint_graph.Partitioner, *args: Any, **keywords: Any) -> Any:
        calls.append(1)
        return partition(self, *args, **keywords)

    joint_graph.Partitioner.__call__ = counted
    answers = []
    for budget in budgets:
        torch._dynamo.reset()
        torch.manual_seed(0)
        calls.clear()
        before = len(autoremat.reports())
        model = nn.Sequential(*(Block(0.0) for _ in range(2)))
        found = steps(model, {"memory_budget": budget, **options}, 2 if train else 0)
        reports = [json.loads(report.to_json()) for report in autoremat.reports()[before:]]
        answers.append({"reports": reports, "calls": len(calls), **found})
    return answers


def steps(model: nn.Module, options: dict[str, Any], count: int) -> dict[str, float]:
    """The loss and the gradients of the last of so many steps, its measured peak and the bytes that it saves."""
    x = torch.randn(256, 32)
    compiled = torch.compile(lambda x: model(x).square().mean(), backend="autoremat", options=options)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is not x and not isinstance(tensor, nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    if not count:
        with torch.no_grad():
            return {"loss": float(compiled(x)), "gradient": 0.0, "measured": 0, "kept": 0}
    for _ in range(count):
        model.zero_grad()
        saved.clear()
        with autoremat.track_peak("cpu") as peak:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = compiled(x)
            kept = sum(saved.values())
            loss.backward()
    gradient = sum(float(p.grad.double().abs().sum()) for p in model.parameters())
    return {"loss": float(loss), "gradient": gradient, "measured": peak.bytes, "kept": kept}


SHARE, LESS = 0.9, 0.7
"""Budgets, as shares of the reference peak."""

VARYING = {"planning_seconds"}
"""What differs between two reports of the same plan."""


@dataclass
class Caches:
    """Cache folders of their own, and processes that use them."""

    folder: Path

    @property
    def records(self) -> list[Path]:
        return sorted((self.folder / "autoremat" / "reports").glob("*.json"))

    def run(self, *budgets: object, source_hash: str = "", train: bool = True, **options: object) -> list[dict[str, Any]]:
        folders = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "AUTOREMAT_CACHE_DIR": str(self.folder / "autoremat"),
        }
        call = (budgets, source_hash, train, options)
        return run_ranks(trained, 1, timeout=600, args=call, environment=folders, group=False)[0]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Caches, dict[str, Any]]:
    """Caches that hold one compilation, and what it answered."""
    caches = Caches(tmp_path_factory.mktemp("cold"))
    (answer,) = caches.run(SHARE)
    assert answer["calls"] >= 1
    return caches, answer


@pytest.fixture
def caches(cold: tuple[Caches, dict[str, Any]], tmp_path: Path) -> Caches:
    """A copy of those caches, to spoil."""
    shutil.copytree(cold[0].folder, tmp_path / "copy")
    return Caches(tmp_path / "copy")


def report_of(answer: dict[str, Any]) -> dict[str, Any]:
    (report,) = answer["reports"]
    return report


def lasting(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in VARYING}


def test_two_budgets_never_share_an_entry_and_warm_starts_report_the_same(cold, caches):
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
        assert answer["kept"] == report["saved_bytes"]
        assert answer["measured"] <= report["budget_bytes"]
        assert answer["loss"] == pytest.approx(high["loss"], rel=1e-5)
        assert answer["gradient"] == pytest.approx(high["gradient"], rel=1e-4)


def test_a_lost_record_is_made_again(cold, caches):
    (record,) = caches.records
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
