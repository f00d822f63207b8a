"""Gathered weights that are gathered again in the backward: the trade between memory, seconds and bytes sent.

    python benchmarks/gathers.py                     # about ten minutes on two cores
    python benchmarks/gathers.py --part measured     # the other part as in the files

A Llama of eight layers, each weight sharded over all ranks and gathered inside the graph, as SimpleFSDP does it.

- By simulation, for H100 cards, under three bandwidths and four budgets. The groups have 2 and 64 ranks that do not exist (the
  fake backend of torch). "Every gather saved" is the plan of a partitioner that repeats no collective. "Every gather repeated"
  is `reshard_after_forward` for all weights.
- Measured, with two gloo processes on a CPU and a small model. A row has the peaks of both ranks, and the gradients against
  those of torch's own backend of the same kind.

Written to `benchmarks/results/gathers.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from processes import run_ranks, values  # noqa: E402
from sharded_models import sharded_llama  # noqa: E402

import autoremat  # noqa: E402
from autoremat.basics.units import format_bytes, format_seconds  # noqa: E402
from autoremat.compiler.joint_graph import capture_and_price  # noqa: E402
from autoremat.compiler.planning import plan_graph  # noqa: E402
from autoremat.options.options import Options  # noqa: E402
from autoremat.options.values import bandwidth as parsed_bandwidth  # noqa: E402
from autoremat.planner.graph.op import COMMUNICATES, Trait  # noqa: E402
from autoremat.planner.plans.plan import Plan  # noqa: E402
from autoremat.report.report import Report  # noqa: E402
from autoremat.request.limits import Limits  # noqa: E402
from autoremat.tools.explain import Preview, previews  # noqa: E402

SIZES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
TOKENS, CARD = 2048, "H100-80GB"
WORLDS, BANDWIDTHS = (2, 64), ("400GB/s", "50GB/s", "10GB/s")
POSITIONS = (0.75, 0.5, 0.25, 0.05)
"""Budgets, as positions between the minimum peak (0) and that of the fastest plan (1)."""

SMALL = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
SMALL_BATCH, REPETITIONS = (2, 64), 4
SHARES = {"aot_eager": (1.0, 0.8, 0.65, 0.55), "inductor": (0.6,)}
"""Measured budgets by compiler, as shares of the peak without recomputation."""

ALL_GATHERS = ["_c10d_functional.all_gather*"]


@dataclass(frozen=True)
class Row:
    """A plan by simulation."""

    ranks: int
    bandwidth: str
    plan: str
    budget_bytes: int | None
    peak_bytes: int
    gathers_again: int
    bytes_again: int
    added_seconds: float
    gathering_seconds: float
    step_seconds: float
    gathered_bytes: int
    """Bytes of all gathered weights together."""


@dataclass(frozen=True)
class Measured:
    """A plan that two processes ran. Peaks are the largest of several steps, on the rank where that is largest."""

    compiler: str
    share: float
    budget_bytes: int
    predicted_bytes: int
    least_bytes: int
    peak_bytes: int
    gathers_again: int
    worst_gradient: float
    """Largest difference of a gradient to that of torch's own backend, over the largest element of that gradient."""


def gathers_again(plan: Plan) -> list[int]:
    """Returns the gathers that the plan repeats, as numbers of ops."""
    return [index for index in plan.recomputed if plan.graph.ops[index].traits & COMMUNICATES]


def row(ranks: int, bandwidth: str, name: str, report: Report) -> Row:
    plan = report.plan
    assert plan is not None
    again = gathers_again(plan)
    return Row(
        ranks, bandwidth, name, report.budget_bytes, plan.peak_bytes, len(again),
        sum(plan.graph.values[v].bytes for index in again for v in plan.graph.ops[index].outputs),
        plan.cost_seconds, sum(plan.graph.ops[index].seconds for index in again), plan.graph.step_seconds,
        sum(plan.graph.values[v].bytes for op in plan.graph.ops if Trait.GATHER in op.traits for v in op.outputs),
    )  # fmt: skip


def in_world(ranks: int) -> None:
    """Makes this process the first of ``ranks`` ranks, of which the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def traced(ranks: int) -> Preview:
    """Returns the step of a group, traced without weights and data."""
    in_world(ranks)
    with torch.device("meta"):
        model, tokens = sharded_llama(torch.bfloat16, **SIZES), torch.zeros((1, TOKENS), dtype=torch.int64)

    def step(tokens: torch.Tensor) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    (preview,), _ = previews(step, (tokens,), {}, Options(chunk_loss=False), CARD, lambda preview: preview)
    return preview


def simulated(preview: Preview, ranks: int, bandwidth: str) -> Iterator[Row]:
    """Yields the rows of plans of a step for one bandwidth."""
    request = replace(preview.context.request, interconnect_bandwidth=parsed_bandwidth(bandwidth))
    priced = capture_and_price(preview.priced.joint, replace(preview.context, request=request))
    assert priced is not None

    def planned(**changed: Any) -> Report:
        context = replace(preview.context, request=replace(request, **changed))
        report = plan_graph(priced, context).report
        assert report is not None
        return report

    def within(budget: int) -> Report:
        return planned(limits=Limits(budget))

    least = {"limits": Limits(1), "on_infeasible": "best_effort"}
    whole = Limits(reference_share=1.0)
    fastest, smallest = planned(limits=whole), planned(**least)
    yield row(ranks, bandwidth, "every gather saved: fastest", fastest)
    yield row(ranks, bandwidth, "every gather saved: minimum", planned(**least, save=ALL_GATHERS))
    repeated = planned(limits=whole, recompute=ALL_GATHERS)
    yield row(ranks, bandwidth, "every gather repeated: fastest", repeated)
    same = within(repeated.predicted_peak_bytes + repeated.code_headroom_bytes)
    yield row(ranks, bandwidth, "the same peak, planned", same)
    low, high = smallest.predicted_peak_bytes, fastest.predicted_peak_bytes
    for position in POSITIONS:
        budget = int(low + position * (high - low)) + fastest.code_headroom_bytes
        yield row(ranks, bandwidth, f"planned, {position:.0%} of the way", within(budget))
    yield row(ranks, bandwidth, "minimum", smallest)


def run_small(rank: int, compiler: str, shares: Sequence[float]) -> list[tuple[Any, ...]]:
    """Returns, for each share, a step of one rank: budget, prediction, floor, peak, repeated gathers and worst gradient."""
    torch.manual_seed(rank)
    tokens = torch.randint(0, SMALL["vocab_size"], SMALL_BATCH)
    model = sharded_llama(**SMALL)

    def gradients(step: Any) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        step(input_ids=tokens, labels=tokens).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected, found = gradients(torch.compile(model, backend=compiler)), []
    for share in shares:
        torch._dynamo.reset()
        options = {"memory_budget": share, "compiler": compiler, "cost_model": "roofline", "chunk_loss": False}
        compiled = torch.compile(model, backend="autoremat", options=options)
        differences = zip(gradients(compiled), expected, strict=True)
        worst = max(float((own - other).abs().max() / other.abs().max()) for own, other in differences)
        peaks = []
        for _ in range(REPETITIONS):
            model.zero_grad(set_to_none=True)
            with autoremat.track_peak() as tracked:
                compiled(input_ids=tokens, labels=tokens).loss.backward()
            peaks.append(tracked.bytes)
        report = autoremat.reports()[-1]
        predicted = report.compiled_peak_bytes or report.predicted_peak_bytes
        again = len(gathers_again(report.plan)) if report.plan is not None else 0
        found.append((report.budget_bytes, predicted, min(peaks), max(peaks), again, worst))
    return found


def measured(compiler: str, shares: Sequence[float]) -> Iterator[Measured]:
    """Yields steps of two processes under each share of the peak without recomputation."""
    from gathers import run_small as by_name  # the processes import it from there

    ranks = values(run_ranks(by_name, 2, timeout=900.0, args=(compiler, shares)))
    for share, outcomes in zip(shares, zip(*ranks, strict=True), strict=True):
        budgets, predicted, least, peaks, again, worst = zip(*outcomes, strict=True)
        assert len(set(again)) == 1, "the ranks repeat the same gathers"
        yield Measured(compiler, share, min(budgets), max(predicted), max(least), max(peaks), again[0], max(worst))


def tables(rows: Sequence[Row], runs: Sequence[Measured]) -> str:
    lines = [
        f"Llama, {SIZES['num_hidden_layers']} layers, hidden {SIZES['hidden_size']}, one sequence of {TOKENS} tokens per rank, "
        f"bfloat16, weights sharded; {CARD} by data sheet",
        "added: seconds above the step without recomputation, of which gathering takes the next column; nothing overlaps",
    ]
    for ranks in WORLDS:
        for bandwidth in BANDWIDTHS:
            chosen = [row for row in rows if (row.ranks, row.bandwidth) == (ranks, bandwidth)]
            if not chosen:
                continue
            first = chosen[0]
            share = first.gathered_bytes / first.peak_bytes
            lines += ["", f"{ranks} ranks, {bandwidth}; step {format_seconds(first.step_seconds)}; gathered weights "
                          f"{format_bytes(first.gathered_bytes)}, {share:.0%} of the fastest plan's peak"]  # fmt: skip
            lines += [f"{'plan':32}{'peak':>11}{'gathers again':>15}{'bytes again':>13}{'added':>11}{'gathering':>11}"]
            lines += [
                f"{row.plan:32}{format_bytes(row.peak_bytes):>11}{row.gathers_again:>15}{format_bytes(row.bytes_again):>13}"
                f"{format_seconds(row.added_seconds):>11}{format_seconds(row.gathering_seconds):>11}"
                for row in chosen
            ]
    lines += [
        "",
        f"measured: two gloo processes, hidden {SMALL['hidden_size']}; least and largest of {REPETITIONS} steps, larger rank",
        "the threads of gloo let go of tensors late, for which the plan leaves bytes of the budget free",
        f"{'compiler':11}{'share':>6}{'budget':>12}{'predicted':>12}{'least':>12}{'largest':>12}"
        f"{'gathers again':>15}{'gradients':>11}",
    ]
    lines += [
        f"{run.compiler:11}{run.share:>6}{format_bytes(run.budget_bytes):>12}{format_bytes(run.predicted_bytes):>12}"
        f"{format_bytes(run.least_bytes):>12}{format_bytes(run.peak_bytes):>12}{run.gathers_again:>15}{run.worst_gradient:>11.1e}"
        for run in runs
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("simulated", "measured"), help="only this part; the other one is that of the files")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    file = arguments.output / "gathers.json"
    known = json.loads(file.read_text()) if file.exists() else {"simulated": [], "measured": []}
    rows, runs = [Row(**row) for row in known["simulated"]], [Measured(**run) for run in known["measured"]]
    if arguments.part != "measured":
        steps = {ranks: traced(ranks) for ranks in WORLDS}
        rows = [row for ranks in WORLDS for bandwidth in BANDWIDTHS for row in simulated(steps[ranks], ranks, bandwidth)]
        dist.destroy_process_group()
        write(rows, runs, arguments.output)
    if arguments.part != "simulated":
        runs = []
        for compiler, shares in SHARES.items():
            runs += measured(compiler, shares)
            write(rows, runs, arguments.output)
    print(tables(rows, runs))
    return 1 if any(run.peak_bytes > run.budget_bytes for run in runs) else 0


def write(rows: Sequence[Row], runs: Sequence[Measured], folder: Path) -> None:
    """Writes a text and a JSON file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gathers.txt").write_text(tables(rows, runs))
    record = {"simulated": [asdict(row) for row in rows], "measured": [asdict(run) for run in runs]}
    (folder / "gathers.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
