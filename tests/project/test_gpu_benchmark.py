"""`make gpu`: what a call leaves for the next one, what it refuses, and a part of its rehearsal on the emulated card."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from emulated_cuda import library
from folders import ROOT, TESTS

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu_rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_rows

    return gpu_rows


@pytest.fixture
def gpu(gpu_rows: ModuleType) -> ModuleType:
    import gpu

    return gpu


@pytest.fixture
def rows(gpu_rows: ModuleType, tmp_path: Path) -> Any:
    return gpu_rows.Rows(tmp_path / "rows.jsonl")


@pytest.fixture
def units(gpu_rows: ModuleType) -> Callable[..., list[Any]]:
    def make(*works: Callable[[], dict[str, Any]]) -> list[Any]:
        return [gpu_rows.Unit(f"unit {number}", work) for number, work in enumerate(works)]

    return make


def soon() -> float:
    return time.time() + 1000


def fail() -> dict[str, Any]:
    raise ValueError("no luck")


def test_a_unit_that_has_ended_is_not_run_again(rows, units, gpu_rows):
    ran: list[int] = []

    def skip() -> dict[str, Any]:
        raise gpu_rows.Skipped("not here")

    work = units(lambda: {"n": ran.append(0)}, fail, skip)
    assert rows.remaining("stage") is None
    for _ in range(2):
        rows.run("stage", work, soon())
    assert (ran, rows.remaining("stage")) == ([0], [])
    ends = rows.ends("stage")
    assert rows.rows("stage") == [{"n": None}]
    assert ends["unit 1"]["error"] == "ValueError: no luck"
    assert ends["unit 2"]["skipped"] == "not here"
    rows.forget_errors()
    assert rows.remaining("stage") == ["unit 1"]


def test_when_the_time_is_over_the_rest_remains(rows, units):
    work = units(dict, dict)
    rows.run("stage", work, time.time() - 1)
    assert rows.remaining("stage") == ["unit 0", "unit 1"]
    rows.append(stage="stage", unit="unit 0", row={}, seconds=5000)
    rows.run("stage", work, soon())  # the second may take as long as the first
    assert rows.remaining("stage") == ["unit 1"]


def test_a_lost_device_ends_the_process_and_costs_one_unit(rows, units):
    def lose() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(SystemExit, match="lost its device"):
        rows.run("stage", units(lose, dict), soon())
    assert rows.remaining("stage") == ["unit 1"]


def test_every_file_with_tests_for_a_card_is_run_on_it(gpu):
    mark = re.compile(r"^(?:pytestmark = |@)pytest\.mark\.gpu$", re.MULTILINE)
    marked = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py") if mark.search(path.read_text())}
    assert marked == set(gpu.TEST_FILES)


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--results", str(tmp_path / "results"), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return run


@pytest.mark.slow
@pytest.mark.card
@pytest.mark.skipif(bool(library.missing()), reason=f"no emulated card: {library.missing()}")
def test_a_part_of_the_rehearsal(call, tmp_path):
    done = call("--rehearse", "--stages", "rates", "CUDA graphs", "launches", "--units", "1", "--minutes", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results" / "rows.jsonl").read_text().splitlines()]
    rates, row = [line["row"] for line in lines if "row" in line]
    assert rates["kind"] == "products"
    assert all(case["measured"] > 0 < case["predicted"] for case in rates["cases"])
    assert row["measured"]["allocated_bytes"] == row["tensor_bytes"] <= row["replayed_bytes"] <= row["budget_bytes"]
    assert "CUDA graphs: skipped: the emulated card records" in done.stdout
    assert "the same command goes on" in done.stdout
