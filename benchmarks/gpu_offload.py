"""Steps on a CUDA device whose saved tensors wait on the host: peaks, moved bytes, gradients and step times.

`benchmarks/gpu.py` runs this script. The budget is a share of plain Inductor's measured peak. Inductor, recomputation alone and
recomputation with offload take steps in turn. No emulation shows whether copies hide behind kernels.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch._dynamo.config as dynamo_config
from gpu_duels import PLAIN, Contestant, Workload, compiled_rival, prepared, prepared_ours, unused_text, workload
from gpu_rows import Line, Rows, Unit, parser_of
from gpu_steps import Step, in_turn, largest_difference, ratio_of, summary_of
from lowering import Device
from peaks import mebibytes
from rich.table import Table

import autoremat
from autoremat.host_memory.links import link_of
from autoremat.measure.calibration import host_link_of
from autoremat.planner.cost.durations import stalls_of
from autoremat.planner.cost.links import PLANNED_SHARE, assumed_host_link

CASES = (
    ("Llama 8B, 8 layers", 0.55), ("GPT-2 medium", 0.25), ("Llama 1B", 0.35), ("Llama 8B, 8 layers", 0.48), ("ViT-L", 0.3),
)  # fmt: skip
"""Models and shares of Inductor's peak."""

HOST_MEMORY = "48GiB"

ALONE, TOGETHER = "recomputation", "with offload"

ROUNDS, STEPS_PER_SAMPLE = 5, 3


@dataclass(frozen=True)
class Planned:
    """A step of autoremat: what was planned, and what was measured."""

    result: Contestant
    budget_bytes: int
    replayed_bytes: int
    predicted_seconds: float
    stall_seconds: float
    """At the rate for which the plan is made."""
    stall_seconds_at_best: float
    planned_moved_bytes: int
    """To the host in a step, and as many back."""
    to_host_bytes: int
    from_host_bytes: int
    held_bytes: int
    """Of all buffers on the host."""
    gradient_error: float
    """The largest difference from Inductor's gradients, over the largest gradient."""
    to_plain: float = 0.0
    """Step time over that of Inductor, the median over the rounds."""


@dataclass(frozen=True)
class Row:
    """One model under one budget."""

    model: str
    share: float
    plain: Contestant
    repeated_error: float
    """The difference of two steps of Inductor, as that of gradients."""
    to_host: float
    """Measured rates of the link, in bytes per second."""
    from_host: float
    alone: Planned
    together: Planned


def gradients_of(work: Workload, step: Step) -> list[torch.Tensor]:
    """Returns the gradients of one more step."""
    step()
    found = [parameter.grad for parameter in work.model.parameters() if parameter.grad is not None]
    work.model.zero_grad(set_to_none=True)
    return found


def planned(work: Workload, budget: int, expected: Sequence[torch.Tensor], **options: object) -> tuple[Step, Planned]:
    """Returns the step under a budget with its figures but its time. The smallest peak replaces a budget that is too small."""
    step, result, budget, _ = prepared_ours(work, budget, **options)
    report = autoremat.reports()[-1]
    link = link_of(torch.empty(0, device=Device.chosen).device)
    before = dict(link.moved)
    error = largest_difference(gradients_of(work, step), expected)
    plan = report.plan
    return step, Planned(
        result=result,
        budget_bytes=budget,
        replayed_bytes=report.compiled_peak_bytes or report.predicted_peak_bytes,
        predicted_seconds=report.predicted_seconds,
        stall_seconds=report.stall_seconds,
        stall_seconds_at_best=sum(stalls_of(plan.graph, plan.schedule, 1 / PLANNED_SHARE)),
        planned_moved_bytes=report.moved_bytes,
        to_host_bytes=link.moved["to_host_bytes"] - before["to_host_bytes"],
        from_host_bytes=link.moved["from_host_bytes"] - before["from_host_bytes"],
        held_bytes=link.pool.held_bytes,
        gradient_error=error,
    )


def row(name: str, share: float, rehearsed: bool) -> Line:
    """Returns the row of one unit."""
    work = workload(name, rehearsed)
    plain_step, plain = prepared(work, compiled_rival(work, PLAIN))
    expected = gradients_of(work, plain_step)
    repeated = largest_difference(gradients_of(work, plain_step), expected)
    budget = int(share * plain.memory.allocated_bytes)
    steps, found = {PLAIN: plain_step}, {}
    steps[ALONE], found[ALONE] = planned(work, budget, expected)
    steps[TOGETHER], found[TOGETHER] = planned(work, budget, expected, host_memory="1MiB" if rehearsed else HOST_MEMORY)
    del expected
    samples = in_turn(steps, 1 if rehearsed else ROUNDS, 1 if rehearsed else STEPS_PER_SAMPLE)
    work.model.zero_grad(set_to_none=True)
    medians = {key: summary_of(seconds).median for key, seconds in samples.items()}
    timed = {
        key: replace(one, result=replace(one.result, seconds=medians[key]), to_plain=ratio_of(samples[key], samples[PLAIN]))
        for key, one in found.items()
    }
    link = assumed_host_link(torch.cuda.get_device_name()) if rehearsed else host_link_of(Device.chosen)
    assert link is not None, "the device has memory of its own"
    return asdict(
        Row(
            name, share, replace(plain, seconds=medians[PLAIN]), repeated, link.to_host, link.from_host,
            timed[ALONE], timed[TOGETHER],
        )
    )  # fmt: skip


def units(rehearsed: bool) -> list[Unit]:
    return [
        Unit(f"{name} at {share:.0%}", functools.partial(row, name, share, rehearsed))
        for name, share in CASES[: 2 if rehearsed else None]
    ]


def table_of(rows: Sequence[Line]) -> Table:
    """Returns recomputation alone and with offload, side by side."""
    table = Table(title="Offload: peaks and moved bytes in MiB; step times in ms, and over that of Inductor")
    table.add_column("model", no_wrap=True)
    table.add_column("way", no_wrap=True)
    for column in ("budget", "replayed", "peak", "planned to move", "to the host", "from the host", "held", "predicted",
                   "stalls", "measured", "to Inductor", "gradient's error", "of repetition", "compile, s"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        plain = row["plain"]
        table.add_row(
            f"{row['model']} at {row['share']:.0%}", PLAIN, "", "", mebibytes(plain["memory"]["allocated_bytes"]), *[""] * 6,
            f"{1e3 * plain['seconds']:.2f}", "", "", f"{row['repeated_error']:.1e}", f"{plain['compile_seconds']:.0f}",
        )  # fmt: skip
        for way, one in ((ALONE, row["alone"]), (TOGETHER, row["together"])):
            moved = [one[key] for key in ("planned_moved_bytes", "to_host_bytes", "from_host_bytes", "held_bytes")]
            peaks = [one["budget_bytes"], one["replayed_bytes"], one["result"]["memory"]["allocated_bytes"]]
            seconds = [one["predicted_seconds"], one["stall_seconds"], one["result"]["seconds"]]
            table.add_row(
                "", way, *map(mebibytes, (*peaks, *moved)), *(f"{1e3 * each:.2f}" for each in seconds),
                f"{one['to_plain']:.3f}", f"{one['gradient_error']:.1e}", "", f"{one['result']['compile_seconds']:.0f}",
            )  # fmt: skip
    return table


def verdict(rows: Sequence[Line]) -> str:
    """Returns how offload compares with recomputation alone."""
    ways = [row[way] for row in rows for way in ("alone", "together")]
    plans = [(one["result"]["memory"], one["replayed_bytes"]) for one in ways]
    over = sum(one["result"]["memory"]["allocated_bytes"] > one["budget_bytes"] for one in ways)
    wrong = sum(
        not row["together"]["planned_moved_bytes"] == row["together"]["to_host_bytes"] == row["together"]["from_host_bytes"]
        for row in rows
    )
    ratios = sorted(row["together"]["result"]["seconds"] / row["alone"]["result"]["seconds"] for row in rows)
    rates = ", ".join(f"{rows[-1][key] / 1e9:.1f}" for key in ("to_host", "from_host"))
    return "; ".join(
        [
            f"{len(rows)} rows; {over} peaks over their budget",
            unused_text(plans),
            f"{wrong} move other bytes than planned",
            f"step times with offload to those without: from {ratios[0]:.3f} to {ratios[-1]:.3f}",
            f"the link, GB/s to the host and from it: {rates}",
        ]
    )


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    Device.chosen = torch.device("cuda", torch.cuda.current_device())
    dynamo_config.recompile_limit = 1000  # the code of a model is compiled once for each contestant
    dynamo_config.accumulated_recompile_limit = 1000
    warnings.simplefilter("ignore", autoremat.BudgetWarning)
    Rows(arguments.rows).run("offload", units(arguments.rehearse), arguments.until, arguments.units)


if __name__ == "__main__":
    main()
