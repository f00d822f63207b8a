"""Pipelines under a budget per stage: measured peaks, and recomputation by each stage's calls in flight beside one policy.

    python benchmarks/pipelines.py              # 4 processes on a CPU, the planned graphs uncompiled; --compiler inductor

Part 1: a pipeline of 4 stages, 8 micro-batches and gloo processes. Its budget is a share of the largest stage's peak without
recomputation. Each stage has three measured peaks. The first is without recomputation, the second with plans for a single call,
as without ``in_flight``. The third is with plans for all its calls in flight.

Part 2, by simulation: the same stages under 1F1B, and one budget for all. One policy for all stages is the first stage's plan,
which has the most calls in flight. By stage, each has the fastest plan that fits its own calls. The seconds are those of the
cost model (data sheet). They are those of recomputation per micro-batch, and of a whole 1F1B step without communication, in
which a stage waits for its neighbours. The slowest stage limits a pipeline, so the step gains less than the sum. Written to
`benchmarks/results/pipelines.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import pipelining

import autoremat
from autoremat.basics.errors import BudgetInfeasible
from autoremat.basics.units import format_bytes

ROOT = Path(__file__).resolve().parent.parent
STAGES, MICROBATCHES, WIDTH, BLOCKS = 4, 8, 128, 4
ROWS = 1024
"""Rows of a micro-batch."""
SHARES = (0.8, 0.65, 0.5)
PLAIN = {"memory_budget": 1.0}


class Block(nn.Module):
    """A normalised two-layer perceptron on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def stage_module() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def measured(rank: int, kind: str, options: dict[str, Any]) -> tuple[int, int]:
    """Returns the measured peak of a stage's second step, and the peak of its plan."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    module = stage_module()
    compiled = torch.compile(module, backend="autoremat", options=options)
    stage = pipelining.PipelineStage(compiled, rank, STAGES, torch.device("cpu"))
    schedule = getattr(pipelining, kind)(stage, MICROBATCHES, loss_of)
    whole, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH)
    given, named = [whole] if rank == 0 else [], {"target": target} if rank == STAGES - 1 else {}
    schedule.step(*given, **named)
    module.zero_grad(set_to_none=True)
    with autoremat.track_peak("cpu") as peak:
        schedule.step(*given, **named)
    return peak.bytes, autoremat.reports()[-1].peak_bytes


def worker(rank: int, folder: str, compiler: str, kinds: list[str]) -> None:
    """Measures all rows of part 1 as one rank, and writes them."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES)
    common: dict[str, Any] = {"compiler": compiler, "cost_model": "roofline", "progress": False}
    rows = []
    for kind in kinds:
        plain, _ = measured(rank, kind, common | PLAIN)
        plains: list[Any] = [None] * STAGES
        distributed.all_gather_object(plains, plain)
        for share in SHARES:
            budget = int(share * max(plains))
            one_call = common | {"memory_budget": budget, "in_flight": 1, "accumulate": False}
            before, _ = measured(rank, kind, one_call)
            try:
                peak, planned = measured(rank, kind, common | {"memory_budget": budget, "on_infeasible": "best_effort"})
            except BudgetInfeasible:
                raise RuntimeError("a best effort is never infeasible") from None
            report = autoremat.reports()[-1]
            rows.append(
                {
                    "schedule": kind, "share": share, "stage": rank, "in_flight": report.in_flight, "budget": budget,
                    "plain": plain, "one_call": before, "planned": planned, "measured": peak,
                    "fits": report.within_budget, "recomputed": report.recomputed_ops,
                }
            )  # fmt: skip
    Path(folder, f"{rank}.json").write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()


def in_processes(compiler: str, kinds: list[str]) -> list[dict[str, Any]]:
    """Returns the rows of part 1."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (folder, compiler, kinds), nprocs=STAGES)  # type: ignore[no-untyped-call]
        found = [row for rank in range(STAGES) for row in json.loads(Path(folder, f"{rank}.json").read_text())]
    return sorted(found, key=lambda row: (row["schedule"], -row["share"], row["stage"]))


def simulated(compiler: str) -> list[dict[str, Any]]:
    """Returns the rows of part 2: seconds of recomputation per micro-batch and stage, one policy beside plans by stage."""
    module, inputs = stage_module(), torch.randn(ROWS, WIDTH, requires_grad=True)
    common: dict[str, Any] = {"compiler": compiler, "cost_model": "roofline", "accumulate": True}

    def plan(calls: int, budget: float | int) -> autoremat.Report:
        options = common | {"memory_budget": budget, "in_flight": calls}
        return autoremat.explain(module, inputs, options=options, advice=False)

    baseline = plan(STAGES, 1.0)
    forward, step, rows = baseline.forward_seconds, baseline.step_seconds, []
    for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        budget = int(share * baseline.baseline_peak_bytes)
        try:
            by_stage = [plan(STAGES - stage, budget).recompute_seconds for stage in range(STAGES)]
        except BudgetInfeasible:
            break
        row: dict[str, Any] = {"share": share, "budget": budget, "step": step, "by_stage": by_stage, "one_policy": by_stage[0]}
        for name, extra in (("plain", [0.0] * STAGES), ("one_policy", [by_stage[0]] * STAGES), ("by_stage", by_stage)):
            row[f"{name}_pipeline"] = pipeline_seconds(forward, [step - forward + more for more in extra])
        rows.append(row)
    return rows


def pipeline_seconds(forward: float, backwards: list[float]) -> float:
    """Returns the seconds of a 1F1B step, given those of each stage's forward and backward of a micro-batch."""
    ended: dict[tuple[str, int, int], float] = {}
    orders = []
    for stage in range(STAGES):
        ahead = STAGES - stage
        order = [("F", m) for m in range(ahead)]
        for m in range(MICROBATCHES):
            order += [("B", m)] + ([("F", m + ahead)] if m + ahead < MICROBATCHES else [])
        orders.append(order)
    clocks, done = [0.0] * STAGES, [0] * STAGES
    while any(done[s] < len(orders[s]) for s in range(STAGES)):
        for s in range(STAGES):
            while done[s] < len(orders[s]):
                kind, m = orders[s][done[s]]
                neighbour = s - 1 if kind == "F" else s + 1
                if 0 <= neighbour < STAGES and (kind, neighbour, m) not in ended:
                    break
                begin = max(clocks[s], ended.get((kind, neighbour, m), 0.0))
                clocks[s] = ended[kind, s, m] = begin + (forward if kind == "F" else backwards[s])
                done[s] += 1
    return max(clocks)


def text(measured_rows: list[dict[str, Any]], simulated_rows: list[dict[str, Any]]) -> str:
    lines = ["schedule      share stage calls      budget  no recomp.  one call  all calls  used  recomputed"]
    for row in measured_rows:
        bytes_ = [format_bytes(row[name]) for name in ("budget", "plain", "one_call", "measured")]
        over = "" if row["measured"] <= row["budget"] else "  OVER" if row["fits"] else "  infeasible, best effort"
        lines.append(
            f"{row['schedule']:<13}{row['share']:>6.0%}{row['stage']:>6}{row['in_flight']:>6}{bytes_[0]:>12}{bytes_[1]:>12}"
            f"{bytes_[2]:>11}{bytes_[3]:>11}{row['measured'] / row['budget']:>6.0%}{row['recomputed']:>8}{over}"
        )
    lines += ["", "recomputation by simulation, as a share of a micro-batch's step, 1F1B, stages 0 to 3"]
    lines.append("share      budget  one policy  by stage                      sum saved  step: one policy  by stage")
    for row in simulated_rows:
        shares = [seconds / row["step"] for seconds in row["by_stage"]]
        one, total = row["one_policy"] / row["step"], sum(shares)
        saved = 1 - total / (STAGES * one) if one else 0.0
        listed = " ".join(f"{share:6.1%}" for share in shares)
        slower = [row[f"{name}_pipeline"] / row["plain_pipeline"] - 1 for name in ("one_policy", "by_stage")]
        lines.append(
            f"{row['share']:>5.0%}{format_bytes(row['budget']):>12}{one:>12.1%}  {listed}{saved:>10.0%}"
            f"{slower[0]:>+18.1%}{slower[1]:>+10.1%}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="aot_eager", choices=("aot_eager", "inductor"))
    parser.add_argument("--schedules", nargs="+", default=["Schedule1F1B", "ScheduleGPipe"])
    parser.add_argument("--simulate", action="store_true", help="part 2 alone; the rows of part 1 that are there stay")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name = "pipelines" if arguments.compiler == "aot_eager" else f"pipelines_{arguments.compiler}"
    if arguments.simulate:
        rows = json.loads((arguments.results / f"{name}.json").read_text())["measured"]
    else:
        rows = in_processes(arguments.compiler, arguments.schedules)
    planned = simulated(arguments.compiler)
    found = text(rows, planned)
    (arguments.results / f"{name}.txt").write_text(found)
    (arguments.results / f"{name}.json").write_text(json.dumps({"measured": rows, "simulated": planned}, indent=1) + "\n")
    print(found)


if __name__ == "__main__":
    main()
