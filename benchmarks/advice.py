"""Will it fit, and how? What `autoremat.explain` says about six real jobs, and about the steps that its advice leads to.

    python benchmarks/advice.py                         # all jobs
    python benchmarks/advice.py --only vit-h sdxl
    python benchmarks/advice.py --layers 4              # four layers planned, see below

Models have no weights (meta device) and are planned for a card by name, which holds parameters, gradients, the optimizer's
state and the inputs, too. A job is several ways to train, in sequence: what does not fit is followed by what its advice names.
Weights have 16 bits; adapters have rank 16. With `--layers`, so many are planned. Parameters, gradients and optimizer state of
the others, and one saved input of each, count as given memory of the device; predicted times are those of the planned layers.
Each row is a process of its own. Written to `benchmarks/results/advice.txt` and
`.json`; rows of jobs that are not asked for stay.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from advice_models import Step, llama, olmoe, sdxl, vit_huge, with_adapters

import autoremat
from autoremat.basics.errors import BudgetInfeasible, DeviceTooSmall
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.multigraph.device_budget import DeviceBudget, LedgerRow

RESULTS = Path(__file__).resolve().parent / "results"
LLAMA_3 = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 128256}  # fmt: skip
LLAMA_2_13B = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40}


def adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters)


@dataclass(frozen=True)
class Job:
    """Ways to train one model on one card, by name; ``layers`` is the model's own number."""

    title: str
    card: str
    layers: int
    saved_bytes: int
    """Bytes of the input of one layer, which every plan saves."""
    ways: dict[str, tuple[Callable[[int], Step], Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = field(hash=False)


JOBS = {
    "7b": Job("7B, 4k tokens, 24 GB", "RTX 4090", 32, 2 * 4096 * 4096, {
        "AdamW": (lambda layers: llama(layers, 1, 4096), adamw),
        "adapters, AdamW": (lambda layers: with_adapters(llama(layers, 1, 4096)), adamw),
    }),
    "13b-lora": Job("13B with adapters, 4k tokens, 24 GB", "RTX 4090", 40, 2 * 4096 * 5120, {
        "adapters, AdamW": (lambda layers: with_adapters(llama(layers, 1, 4096, **LLAMA_2_13B)), adamw),
        "adapters on 8-bit weights, AdamW": (lambda layers: with_adapters(llama(layers, 1, 4096, **LLAMA_2_13B), 8), adamw),
    }),
    "8b-128k": Job("8B, 128k tokens, 80 GB", "H100-80GB", 32, 2 * 131072 * 4096, {
        "AdamW": (lambda layers: llama(layers, 1, 131072, **LLAMA_3), adamw),
        "adapters, AdamW": (lambda layers: with_adapters(llama(layers, 1, 131072, **LLAMA_3)), adamw),
        "adapters, AdamW, attention without a mask": (
            lambda layers: with_adapters(llama(layers, 1, 131072, masked=False, **LLAMA_3)), adamw
        ),
    }),
    "vit-h": Job("ViT-H, 512 images, 16 GB", "V100-16GB", 32, 2 * 512 * 257 * 1280, {
        "AdamW": (lambda layers: vit_huge(layers, 512), adamw),
    }),
    "sdxl": Job("SDXL U-Net, 4 images of 1024 pixels, 24 GB", "RTX 4090", 10, 6 * 2 * 4 * 1024 * 1280, {
        "AdamW": (lambda layers: sdxl(layers, 4), adamw),
        "adapters, AdamW": (lambda layers: with_adapters(sdxl(layers, 4)), adamw),
    }),
    "moe": Job("mixture of experts of 7B (OLMoE), 4k tokens, 40 GB", "A100-40GB", 16, 2 * 4096 * 2048, {
        "AdamW": (lambda layers: olmoe(layers, 1, 4096), adamw),
        "SGD": (lambda layers: olmoe(layers, 1, 4096), sgd),
    }),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--way", help="explains one way of --only in this process and prints the row as JSON")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        print(json.dumps(row_of(arguments.only[0], arguments.way, arguments.layers)))
        return
    file = arguments.output / "advice.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    for name in arguments.only:
        rows = [row for row in rows if row["job"] != name]
        for way in JOBS[name].ways:
            rows.append(in_a_process(name, way, arguments.layers))
            write(rows, arguments.output)


def in_a_process(name: str, way: str, layers: int | None) -> dict[str, Any]:
    """Returns the row of one way to train, from a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--only", name, "--way", way]
    command += [] if layers is None else ["--layers", str(layers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def row_of(name: str, way: str, layers: int | None) -> dict[str, Any]:
    """Returns what ``explain`` says about one way to train, with the trials of its advice."""
    job, begin = JOBS[name], time.perf_counter()
    build, make_optimizer = job.ways[way]
    planned = job.layers if layers is None else min(layers, job.layers)
    with torch.device("meta"):
        whole, step = build(job.layers), build(planned)
    trained = trained_of(whole)
    row: dict[str, Any] = {
        "job": name, "title": job.title, "card": job.card, "way": way, "layers": job.layers, "planned": planned,
        "parameters": sum(one.numel() for one in (*whole.model.parameters(), *whole.model.buffers())),
        "trained": sum(parameter.numel() for parameter in trained), "torch": torch.__version__,
    }  # fmt: skip
    try:
        budget = autoremat.device_budget(job.card, whole.model, make_optimizer(trained))
        budget.check()
        if planned < job.layers:
            own = autoremat.device_budget(job.card, step.model, make_optimizer(trained_of(step)))
            left_out = given_bytes(budget) - given_bytes(own) + (job.layers - planned) * job.saved_bytes
            budget = own.with_rows(LedgerRow(f"{job.layers - planned} other layers", left_out))
        report = autoremat.explain(step.loss, *step.inputs, options={"memory_budget": budget}, device=job.card)
        row |= {
            "outcome": "fits", "peak": report.predicted_device_bytes, "limit": budget.total_bytes - budget.reserve_bytes,
            "seconds": report.predicted_seconds, "fastest": report.step_seconds,
            "recomputed": report.overhead, "chunks": report.loss_chunks, "least": report.minimum_peak_bytes,
            "bound": report.lower_bound_bytes, "parts": [(part.name, part.bytes) for part in report.parts_after[:3]],
        }  # fmt: skip
    except BudgetInfeasible as error:
        row |= {
            "outcome": "does not fit", "by the ledger": isinstance(error, DeviceTooSmall),
            "peak": error.minimum_bytes, "limit": error.budget_bytes,
            "parts": [*error.parts[:3]] or [(one.name, one.bytes) for one in error.occupants[:3]],
            "remedies": list(error.remedies), "sentence": error.advice.sentence if error.advice else "",
            "trials": [{"settings": one.settings, "figures": one.figures, "fits": one.fits, "peak": one.peak_bytes,
                        "limit": one.limit_bytes, "seconds": one.seconds}
                       for one in (error.advice.trials if error.advice else ())],
        }  # fmt: skip
    return row | {"seconds to explain": round(time.perf_counter() - begin, 1)}


def trained_of(step: Step) -> list[torch.Tensor]:
    return [parameter for parameter in step.model.parameters() if parameter.requires_grad]


def given_bytes(budget: DeviceBudget) -> int:
    """Returns the bytes of parameters, gradients and optimizer state."""
    return sum(row.bytes for row in budget.rows if not row.name.startswith("temporaries"))


def lines_of(row: dict[str, Any]) -> list[str]:
    """Returns the lines of one way to train."""
    binding = ", ".join(f"{format_bytes(size)} of {name}" for name, size in row["parts"])
    head = f"  {row['way']}, {row['trained']:,} of {row['parameters']:,} parameters trained"
    if row["planned"] < row["layers"] and not row.get("by the ledger"):
        head += f"; {row['planned']} of {row['layers']} layers planned"
    if row["outcome"] == "fits":
        text = (
            f"fits: {format_bytes(row['peak'])} of {format_bytes(row['limit'])}, predicted {format_seconds(row['seconds'])} "
            f"per step, {row['recomputed']:.0%} of the forward recomputed, {row['chunks']} chunks of the loss"
        )
        return [head, f"    {text}", f"    binds the peak: {binding}"]
    lines = [head, f"    does not fit: {format_bytes(row['peak'])} of {format_bytes(row['limit'])}; {binding}"]
    lines += [f"    remedy: {remedy}" for remedy in row["remedies"]]
    lines += [
        f"    tried {one['settings']}: {one['figures']}{'' if one['fits'] else ', does not fit'}" for one in row["trials"]
    ]
    return [*lines, *([f"    {row['sentence']}"] if row["sentence"] else [])]


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """Writes all rows, as a text and as JSON, and prints those of the last job."""
    texts = []
    for name in [name for name in JOBS if any(row["job"] == name for row in rows)]:
        of_job = [row for row in rows if row["job"] == name]
        lines = [line for row in of_job for line in lines_of(row)]
        texts.append("\n".join([f"{of_job[0]['title']} ({of_job[0]['card']})", *lines]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "advice.txt").write_text("\n\n".join(texts) + "\n")
    (folder / "advice.json").write_text(json.dumps(rows, indent=2) + "\n")
    print("\n".join(lines_of(rows[-1])), flush=True)


if __name__ == "__main__":
    main()
