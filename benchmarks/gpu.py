"""The checks of a real CUDA device in several short calls: its tests, rates, peaks, step times, and peaks with CUDA graphs.

    python benchmarks/gpu.py                             # goes on where the last call ended; results in gpu-results/
    python benchmarks/gpu.py --minutes 9 --results DIR   # ends after 9 minutes and says what remains
    python benchmarks/gpu.py --rehearse                  # tiny sizes on the emulated card, results in a temporary folder

`make gpu` is the same. `docs/gpu.md` explains the calls and the results. This script imports no torch. Each stage runs in a
process of its own, so that a lost device or an end in the midst costs one unit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_rows import TRIES, Line, Rows

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))
from emulated_cuda import library  # noqa: E402

STAGES = ("tests", "rates", "launches", "offload", "duels", "CUDA graphs")
"""In the order of their worth."""

TEST_FILES = ("training/test_cuda.py", "measure/test_peak.py", "training/test_practices.py")
"""All with tests that are marked `gpu`."""

PACKAGES = {
    "torch": "torch", "triton": "triton", "numpy": "numpy", "scipy": "scipy", "networkx": "networkx", "ortools": "ortools",
    "immutabledict": "immutabledict", "pandas": "pandas", "absl": "absl-py", "platformdirs": "platformdirs", "rich": "rich",
    "click": "click", "transformers": "transformers", "pytest": "pytest", "hypothesis": "hypothesis",
}  # fmt: skip
"""Imported name and distribution of all that the stages need."""

GRACE = 20
"""Seconds that a unit may run on after the time is over, before its process is ended."""

PROBE = """
import importlib.util, json, platform, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
found = {"missing": missing, "python": platform.python_version()}
if "torch" not in missing:
    import torch
    found |= {"torch": torch.__version__, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
print(json.dumps(found))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="no unit is begun that may end later")
    parser.add_argument("--results", type=Path, default=None, help="folder of the rows and tables; default gpu-results")
    parser.add_argument("--wheels", type=Path, default=None, help="folder of wheels of packages that are missing here")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--at-once", type=int, default=1, help="stages that run side by side, after that of the rates")
    parser.add_argument("--units", type=int, default=None, help="at most so many units of each stage")
    parser.add_argument("--again", action="store_true", help="run the units again that failed")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the emulated card; nothing is published")
    arguments = parser.parse_args()
    until = time.time() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as site:
        install(arguments.wheels, Path(site))
        default = Path(tempfile.mkdtemp(prefix="rehearsal-")) if arguments.rehearse else ROOT / "gpu-results"
        results = (arguments.results or default).resolve()
        session = Session(results, until, Path(site), arguments.rehearse, arguments.units)
        if refusal := session.refusal():
            print(refusal)
            return 0 if refusal.startswith("skipped") else 2
        if arguments.again:
            session.rows.forget_errors()
        session.run_all(arguments.stages, arguments.at_once)
        session.show(arguments.stages)
        return int(session.has_failed(arguments.stages))


def install(wheels: Path | None, site: Path) -> None:
    """Unpacks the wheels into ``site``, and makes autoremat known to torch by its name if it is not installed."""
    if wheels is not None:
        files = sorted(map(str, wheels.glob("*.whl")))
        if not files:
            raise SystemExit(f"{wheels} has no wheels. Fill it as docs/gpu.md says, or leave the folder out.")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([*command, "--target", str(site), *files], check=True)
    try:
        importlib.metadata.distribution("autoremat")
    except importlib.metadata.PackageNotFoundError:
        (info := site / "autoremat-0.dist-info").mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: autoremat\nVersion: 0\n")
        backend = "autoremat = autoremat.compiler.dynamo_backend:backend"
        (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{backend}\n")


@dataclass
class Session:
    """One call: where it writes, when it ends, and how it starts the processes of the stages."""

    results: Path
    until: float
    site: Path
    rehearsed: bool
    units: int | None
    """The most units of a stage, or None."""
    broken: list[str] = field(default_factory=list)
    """Stages whose process ended by an error before it began a unit."""

    @property
    def rows(self) -> Rows:
        return Rows(self.results / "rows.jsonl")

    @property
    def environment(self) -> dict[str, str]:
        """Returns the environment of the stages: this tree, the wheels, and no look at a network."""
        folders = [ROOT, self.site, *([ROOT / "tests"] if self.rehearsed else [])]
        paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if self.rehearsed:  # the host's cores are few, and what its clock measures says nothing of a card
            found |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
            found |= {"AUTOREMAT_COST_MODEL": "roofline", "TORCHINDUCTOR_SHAPE_PADDING": "0"}
        return found

    def python(self, *arguments: str) -> list[str]:
        return [sys.executable, *(["-m", "emulated_cuda"] if self.rehearsed else []), *arguments]

    def refusal(self) -> str:
        """Returns why nothing can run here; empty if it can. Writes down the machine."""
        if self.rehearsed and (missing := library.missing()):
            return f"skipped: no emulated card: {missing}"
        (probe := self.site / "probe.py").write_text(PROBE)
        command = [*self.python(str(probe)), *PACKAGES]
        done = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        if missing := [PACKAGES[name] for name in found.pop("missing")]:
            return f"{sys.executable} lacks {', '.join(missing)}. Install them, or pass wheels as docs/gpu.md says."
        if found["device"] is None:
            return "skipped: there is no CUDA device, and nothing was written"
        if self.rehearsed:
            found["device"] = f"emulated {found['device']}"
        earlier = [line["machine"] for line in self.rows.lines() if "machine" in line]
        if earlier and earlier[-1] != found:
            return f"{self.results} has rows of {earlier[-1]}, and this is {found}. Choose another folder for the results."
        if not earlier:
            self.rows.append(machine=found)
        print(", ".join(f"{key} {value}" for key, value in found.items()) + f"; results in {self.results}", flush=True)
        return ""

    def run_all(self, stages: Sequence[str], at_once: int) -> None:
        """Runs stages, some of them side by side: most of their time is compilation. Timed steps run one after the other."""
        alone = [stage for stage in stages if at_once == 1 or stage == "rates"]
        for stage in alone:
            self.run(stage)
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(self.run, [stage for stage in stages if stage not in alone]))

    def run(self, stage: str) -> None:
        """Runs the remaining units of a stage, in a new process after each that ends in the midst of a unit."""
        while self.rows.remaining(stage) != [] and time.time() < self.until:
            before = len(list(self.rows.lines()))
            ended_well = self.test() if stage == "tests" else self.call(self.command(stage))
            if ended_well:
                return
            if len(list(self.rows.lines())) <= before + 1:  # the line with the units alone
                self.broken.append(stage)
                return

    def command(self, stage: str) -> list[str]:
        script = {"duels": "gpu_duels.py", "rates": "gpu_rates.py", "offload": "gpu_offload.py"}.get(stage, "gpu_peaks.py")
        arguments = ["--rows", str(self.rows.path), "--until", str(self.until), *(["--rehearse"] if self.rehearsed else [])]
        arguments += [] if self.units is None else ["--units", str(self.units)]
        return self.python(
            str(ROOT / "benchmarks" / script), *arguments, *(["--stage", stage] if script == "gpu_peaks.py" else [])
        )

    def call(self, command: Sequence[str], **options: Any) -> bool:
        """Runs a command until it ends or the time is over. Returns False if it ended by an error of its own."""
        process = subprocess.Popen(command, env=self.environment, cwd=ROOT, **options)
        try:
            process.wait(max(0.0, self.until - time.time()) + GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return True
        return process.returncode == 0

    def test(self) -> bool:
        """Runs the tests that need a CUDA device; their report and output become files among the results.

        Returns False if there is no report although there was time.
        """
        stage, report, output = "tests", self.results / "tests.xml", self.results / "tests.txt"
        self.rows.append(stage=stage, units=[stage])
        if self.rows.tries(stage, stage) >= TRIES:
            self.rows.append(stage=stage, unit=stage, error=f"the process ended {TRIES} times; see {output}")
            return True
        begin = time.time()
        self.rows.append(stage=stage, unit=stage, begun=round(begin))
        report.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default",
            f"--junitxml={report}", *(["-p", "emulated_cuda.plugin"] if self.rehearsed else []),
            *(str(ROOT / "tests" / name) for name in TEST_FILES[: 1 if self.rehearsed else None]),
        ]  # fmt: skip
        with output.open("w") as file:
            self.call(command, stdout=file, stderr=subprocess.STDOUT)
        if not report.exists():
            print(f"the tests ended without a report; see {output}", flush=True)
            return time.time() >= self.until
        row = outcome(report)
        self.rows.append(stage=stage, unit=stage, seconds=round(time.time() - begin, 2), row=row)
        print(f"tests: {row['passed']} passed, {len(row['failed'])} failed, {len(row['skipped'])} skipped", flush=True)
        return True

    def has_failed(self, stages: Sequence[str]) -> bool:
        errors = any("error" in line for stage in stages for line in self.rows.ends(stage).values())
        return errors or bool(self.broken) or any(row["failed"] for row in self.rows.rows("tests"))

    def show(self, stages: Sequence[str]) -> None:
        """Writes the tables, then prints them with the units that failed, were skipped or remain."""
        text = "\n".join(self.summary(stages)) + "\n"
        if any(self.rows.rows(stage) for stage in STAGES[1:]):
            command = [sys.executable, str(ROOT / "benchmarks" / "gpu_tables.py"), str(self.rows.path)]
            done = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE)
            text = done.stdout.decode() + text
        (self.results / "summary.txt").write_text(text)
        print(text)

    def summary(self, stages: Sequence[str]) -> Iterator[str]:
        for row in self.rows.rows("tests"):
            yield f"tests: {row['passed']} passed, {len(row['failed'])} failed, {len(row['skipped'])} skipped"
            yield from (f"  failed: {name}" for name in row["failed"])
            yield from (f"  skipped: {name}" for name in row["skipped"])
            yield from (f"  {name}: {properties}" for name, properties in row["properties"].items())
        for stage in stages:
            ends, remaining = self.rows.ends(stage), self.rows.remaining(stage)
            yield from (f"{stage}, {unit}: failed: {line['error']}" for unit, line in ends.items() if "error" in line)
            reasons = {line["skipped"] for line in ends.values() if "skipped" in line}
            yield from (f"{stage}: skipped: {reason}" for reason in reasons)
            seconds = sum(line.get("seconds", 0.0) for line in ends.values())
            left = "not begun" if remaining is None else f"{len(remaining)} remain" if remaining else "complete"
            yield f"{stage}: {len(ends)} units in {seconds:.0f} s, {left}{', and its process failed' * (stage in self.broken)}"
        if any(self.rows.remaining(stage) != [] for stage in stages):
            yield "the time is over or a stage ended early: the same command goes on"


def outcome(report: Path) -> Line:
    """Returns the outcome in a report of pytest: number of passed tests, names of the others, and recorded properties."""
    row: Line = {"passed": 0, "failed": [], "skipped": [], "properties": {}}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        skipped = case.find("skipped")
        if skipped is not None:
            row["skipped"].append(f"{name}: {skipped.get('message')}")
        elif case.find("failure") is not None or case.find("error") is not None:
            row["failed"].append(name)
        else:
            row["passed"] += 1
        if properties := {found.get("name"): found.get("value") for found in case.iter("property")}:
            row["properties"][name] = properties
    return row


if __name__ == "__main__":
    sys.exit(main())
