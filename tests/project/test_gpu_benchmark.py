"""`make gpu`: the files that it runs, and a part of its rehearsal on the emulated card."""

import json
import re
import subprocess
import sys
from types import ModuleType

import pytest
from emulated_cuda import library
from folders import ROOT, TESTS

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    return gpu


def test_every_file_with_tests_for_a_card_is_run_on_it(gpu):
    mark = re.compile(r"^(?:pytestmark = |@)pytest\.mark\.gpu$", re.MULTILINE)
    marked = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py") if mark.search(path.read_text())}
    assert marked == set(gpu.TEST_FILES)


@pytest.mark.slow
@pytest.mark.card
@pytest.mark.skipif(bool(library.missing()), reason=f"no emulated card: {library.missing()}")
def test_a_part_of_the_rehearsal(tmp_path):
    stages = ["--rehearse", "--stages", "rates", "CUDA graphs", "launches", "--units", "1", "--minutes", "30"]
    command = [sys.executable, BENCHMARKS / "gpu.py", "--results", tmp_path / "results", *stages]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results" / "rows.jsonl").read_text().splitlines()]
    rates, row = [line["row"] for line in lines if "row" in line]
    assert rates["kind"] == "products"
    assert all(case["measured"] > 0 < case["predicted"] for case in rates["cases"])
    assert row["measured"]["allocated_bytes"] == row["tensor_bytes"] <= row["replayed_bytes"] <= row["budget_bytes"]
    assert "CUDA graphs: skipped: the emulated card records" in done.stdout
    assert "the same command goes on" in done.stdout
