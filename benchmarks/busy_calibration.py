"""Plans from rates that were measured on a busy machine: ``python benchmarks/busy_calibration.py`` (about ten minutes).

The device is calibrated twice, in cache folders of their own: idle, and beside one process per core that multiplies matrices.
Each model is planned at three budgets with both sets of rates, and by data sheet. All plans are then priced with the rates of
the idle machine. A row has the rates of the busy machine over those of the idle one: median, least and largest. It also has the
seconds that a plan adds to the step above the plan of the idle rates. Written to benchmarks/results/busy_calibration.txt and
.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import models  # noqa: E402

import autoremat  # noqa: E402
from autoremat.basics.errors import BudgetInfeasible  # noqa: E402
from autoremat.planner.cost import Rates  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "busy_calibration.txt"
MODELS = ("gpt2", "llama", "bert", "resnet", "unet")
SHARES = (0.8, 0.6, 0.45)
LOAD = "import torch; torch.set_num_threads(1); a = torch.randn(512, 512)\nwhile True: a @ a"


def explained(name: str, **options: Any) -> autoremat.Report:
    module, inputs = models.build(name)
    # Plans that the clock cuts short would differ for another reason than their rates.
    return autoremat.explain(module, *inputs, options={"time_limit": 120, "progress": False, **options})


def plan_all(folder: Path, cost_model: str) -> None:
    """Writes a plan of each model at each budget to ``folder``."""
    for name in MODELS:
        for share in SHARES:
            with contextlib.suppress(BudgetInfeasible):
                report = explained(name, memory_budget=share, cost_model=cost_model)
                report.plan.save(folder / f"{name}-{share}.json")


def price_all(folders: list[Path]) -> dict[str, list[float]]:
    """Returns the added seconds of each plan in ``folders``, as shares of the step, with the rates of this process."""
    found = {}
    for name in MODELS:
        for share in SHARES:
            files = [folder / f"{name}-{share}.json" for folder in folders]
            if all(file.exists() for file in files):
                plans = [explained(name, plan=str(file)).plan for file in files]
                found[f"{name} {share:.0%}"] = [plan.cost_seconds / plan.graph.step_seconds for plan in plans]
    return found


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """Keeps ``processes`` processes busy."""
    running = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def in_process(cache: Path, *arguments: str) -> str:
    """Returns the output of this script with a cache folder of its own."""
    environment = os.environ | {"AUTOREMAT_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", __file__, *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def rates_in(cache: Path) -> Rates:
    (file,) = (cache / "rates").glob("cpu-*.json")
    return Rates.from_json(file.read_text())


def ratios(idle: Rates, busy: Rates) -> list[float]:
    """Returns, for each rate, the seconds of the busy machine over those of the idle one at its largest amount."""
    found = []
    for name, curve in idle.curves.items():
        amount = curve.points[-1][0]
        found.append(busy.curves[name].seconds(amount) / curve.seconds(amount))
    return found


def measured() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folders = {kind: Path(temporary, kind) for kind in ("idle", "busy", "roofline")}
        for kind, folder in folders.items():
            folder.mkdir()
            model = "roofline" if kind == "roofline" else "calibrated"
            with load(os.cpu_count() or 1) if kind == "busy" else contextlib.nullcontext():
                in_process(folder, "--plan", str(folder), model)
        priced = json.loads(in_process(folders["idle"], "--price", *map(str, folders.values())).splitlines()[-1])
        return {"ratios": ratios(rates_in(folders["idle"]), rates_in(folders["busy"])), "plans": priced}


def text(found: dict[str, Any]) -> str:
    slower = found["ratios"]
    lines = [
        f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        f"seconds of the rates, busy over idle: median {statistics.median(slower):.2f}, least {min(slower):.2f}, "
        f"largest {max(slower):.2f}",
        "",
        "added by a plan, % of the step, with the rates of the idle machine; planned with",
        f"{'model':14}{'idle rates':>12}{'busy rates':>12}{'data sheet':>12}",
    ]
    lines += [f"{name:14}" + "".join(f"{added:12.2%}" for added in row) for name, row in found["plans"].items()]
    for number, name in ((1, "busy rates"), (2, "data sheet")):
        more = [row[number] - row[0] for row in found["plans"].values()]
        lines.append(f"{name} over idle rates: mean {statistics.mean(more):+.2%}, worst {max(more):+.2%} of the step")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs=2, metavar=("FOLDER", "COST_MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--price", nargs="+", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.plan:
        plan_all(Path(arguments.plan[0]), arguments.plan[1])
    elif arguments.price:
        print(json.dumps(price_all([Path(folder) for folder in arguments.price])))
    else:
        found = measured()
        RESULTS.write_text(text(found))
        RESULTS.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        print(text(found))


if __name__ == "__main__":
    main()
