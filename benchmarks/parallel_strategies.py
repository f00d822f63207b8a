"""Budgets of training steps in several processes with gloo, on the CPU, under each way to distribute a model.

    python benchmarks/parallel_strategies.py [--only ddp] [--models llama] [--layers 2] [--processes 2] [--compiler aot_eager]

A row is a strategy, a model and a budget. The strategies:

- ``DistributedDataParallel`` with and without gradients as views of its buckets;
- ``fully_shard`` with compiled blocks or a compiled model;
- tensor parallelism;
- weights gathered inside the graph;
- pipelines.

Plain Inductor trains first, under the same strategy. The budgets are shares of the largest peak that it measures on a rank, and
the least budget that is possible. All ranks measure at the same time. A row has the largest peak of all ranks. It also has the
largest difference to plain Inductor in a loss and in a gradient, relative to the largest entry. The budget is given in bytes
and nothing else. Only under ``fully_shard``, one call of ``autoremat.profile_step`` shares it out.

A peak is the least of several steps, because gloo's own thread can hold a buffer a moment longer than the step needs it. A CPU
tracker does not see that this thread frees it. With ``--compiler aot_eager``, the plans run without generated code and are
compared with torch's plans without generated code. Rows of earlier runs stay unless they are measured again. Writes
benchmarks/results/parallel_strategies[_aot_eager].txt and .json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import models  # noqa: E402
import pipelines  # noqa: E402
import torch  # noqa: E402
from processes import run_ranks, values  # noqa: E402
from sharded_models import shard_weights  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.distributed import pipelining  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import autoremat  # noqa: E402
from autoremat.basics.errors import BudgetInfeasible, find_cause  # noqa: E402

SHARES = (0.95, 0.85)
"""Budgets as shares of plain Inductor's peak. The third budget is the least that is possible."""

ABOVE_MINIMUM = {"inductor": 1.06, "aot_eager": 1.01}
"""The least budget, over the minimum peak found: 5 % stay free for generated code."""

STEPS = 3
"""Steps whose peak is measured."""


class ConvNet(nn.Module):
    """Residual blocks with batch norm and a classifier, wide enough for several buckets."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        self.stem = nn.Conv2d(3, 32, 3, 1, 1)
        self.blocks = nn.Sequential(*(models.Residual(*w) for w in widths))
        self.head = nn.Linear(128, 10)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(image)).mean((2, 3))), label)


def build(name: str, rank: int, layers: int, **sizes: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], list[nn.Module]]:
    """Returns a model with the same weights on all ranks, the rank's own batch, and the blocks to shard."""
    torch.manual_seed(0)
    if name == "convnet":
        model: nn.Module = ConvNet()
        torch.manual_seed(rank)
        batch: tuple[torch.Tensor, ...] = (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))
        return model, batch, list(model.blocks)
    model, _ = models.MODELS[name](layers=layers, **sizes)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    torch.manual_seed(rank)
    blocks = model.model.model.layers if name == "llama" else model.model.transformer.h
    return model, (torch.randint(0, models.VOCABULARY, (8, 128)),), list(blocks)


Compile = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """The training step of one rank."""

    model: nn.Module
    run: Callable[[], torch.Tensor]
    """Runs forward and backward of all micro-batches; returns the loss, which is 0 where the rank has none."""
    forward: Callable[..., torch.Tensor] | None = None
    batch: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, forward: Callable[..., torch.Tensor], batch: tuple[torch.Tensor, ...]) -> Job:
        """Returns the job whose step is a forward that returns the loss, and its backward."""

        def run() -> torch.Tensor:
            loss = forward(*batch)
            loss.backward()
            return loss

        return cls(model, run, forward, batch)


def with_ddp(name: str, rank: int, layers: int, arguments: Compile, views: bool) -> Job:
    """Returns the step under ``DistributedDataParallel``."""
    model, batch, _ = build(name, rank, layers)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=views)
    return Job.of(wrapped, torch.compile(wrapped, **arguments), batch)


def with_fsdp(name: str, rank: int, layers: int, arguments: Compile, whole: bool, reshard: bool, mixed: bool) -> Job:
    """Returns the step under ``fully_shard``."""
    model, batch, blocks = build(name, rank, layers)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for block in blocks:
        if not whole:
            block.compile(**arguments)
        fully_shard(block, mesh=mesh(), reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh(), reshard_after_forward=reshard, mp_policy=policy)
    if whole:
        model.compile(**arguments)
    return Job.of(model, model, batch)


def with_tensor_parallel(name: str, rank: int, layers: int, arguments: Compile) -> Job:
    """Returns the step with the projections of every Llama layer split over the ranks, which work on the same tokens."""
    model, batch, blocks = build(name, 0, layers, key_value_heads=distributed.get_world_size())
    split: dict[str, ParallelStyle] = {f"self_attn.{one}_proj": ColwiseParallel() for one in "qkv"}
    split |= {"self_attn.o_proj": RowwiseParallel(), "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    for block in blocks:
        parallelize_module(block, mesh(), split | {"mlp.down_proj": RowwiseParallel()})
    return Job.of(model, torch.compile(model, **arguments), batch)


def with_gathers(name: str, rank: int, layers: int, arguments: Compile) -> Job:
    """Returns the step with weights that the compiled graph gathers, as SimpleFSDP does it."""
    model, batch, _ = build(name, rank, layers)
    shard_weights(model)
    return Job.of(model, torch.compile(model, **arguments), batch)


def with_pipeline(name: str, rank: int, layers: int, arguments: Compile, schedule: str) -> Job:
    """Returns the step of a pipeline with a stage of residual blocks per rank, and twice as many micro-batches as stages."""
    torch.manual_seed(rank)
    stages = distributed.get_world_size()
    model = pipelines.stage_module()
    stage = pipelining.PipelineStage(torch.compile(model, **arguments), rank, stages, torch.device("cpu"))
    running = getattr(pipelining, schedule)(stage, 2 * stages, pipelines.loss_of)
    torch.manual_seed(0)
    whole, target = torch.randn(2, 2 * stages * pipelines.ROWS, pipelines.WIDTH)
    given = [whole] if rank == 0 else []

    def run() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        running.step(*given, **({"target": target, "losses": losses} if rank == stages - 1 else {}))
        return torch.stack(losses).sum() if losses else torch.zeros(())

    return Job(model, run)


def mesh() -> Any:
    """Returns the mesh of all ranks."""
    return distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))


STRATEGIES: dict[str, Callable[..., Job]] = {
    "ddp": functools.partial(with_ddp, views=False),
    "ddp, views": functools.partial(with_ddp, views=True),
    "fsdp block": functools.partial(with_fsdp, whole=False, reshard=True, mixed=False),
    "fsdp block, kept": functools.partial(with_fsdp, whole=False, reshard=False, mixed=False),
    "fsdp block, bf16": functools.partial(with_fsdp, whole=False, reshard=True, mixed=True),
    "fsdp whole": functools.partial(with_fsdp, whole=True, reshard=True, mixed=False),
    "fsdp whole, bf16": functools.partial(with_fsdp, whole=True, reshard=True, mixed=True),
    "tensor parallel": with_tensor_parallel,
    "gathers in the graph": with_gathers,
    "pipeline 1F1B": functools.partial(with_pipeline, schedule="Schedule1F1B"),
    "pipeline GPipe": functools.partial(with_pipeline, schedule="ScheduleGPipe"),
}
"""Ways to distribute a model. "kept" is ``reshard_after_forward=False``; "bf16" gathers in bfloat16 and reduces in float32."""


def measured(make: Callable[[Compile], Job], arguments: Compile) -> tuple[int, float, list[torch.Tensor]]:
    """Returns the peak of a step that is compiled, its loss and its gradients."""
    torch.compiler.reset()
    job = make({"dynamic": False, **arguments})  # blocks of several sizes share their code
    peaks = []
    for number in range(3 + STEPS):
        job.model.zero_grad(set_to_none=True)
        distributed.barrier()
        if number < 3:  # compiles; DistributedDataParallel allocates its buckets anew after the first backward
            job.run()
            continue
        with autoremat.track_peak("cpu") as peak:
            loss = job.run()
        peaks.append(peak.bytes)
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in job.model.parameters()]
    return min(peaks), float(loss), [gradient.clone() for gradient in gradients if gradient is not None]


def largest(number: int) -> int:
    """Returns the largest of the ranks' numbers."""
    tensor = torch.tensor([number])
    distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
    return int(tensor)


def minimum_of(make: Callable[[Compile], Job], options: Compile) -> int:
    """Returns the minimum peak found, which an error names."""
    torch.compiler.reset()
    job = make({"backend": "autoremat", "options": {**options, "memory_budget": 1}})
    try:
        job.run()
    except Exception as error:
        infeasible = find_cause(error, BudgetInfeasible)
        if infeasible is None:
            raise
        return infeasible.minimum_bytes
    raise AssertionError("a budget of one byte was accepted")


def budgets(make: Callable[[Compile], Job], plain: int, strategy: str, compiler: str) -> Iterator[tuple[int, Any]]:
    """Yields each budget in bytes with the value of ``memory_budget`` for it."""
    if strategy.startswith("pipeline"):
        yield from ((budget, budget) for budget in (int(share * plain) for share in pipelines.SHARES))
        return
    profile, options = None, {"compiler": compiler}
    if strategy.startswith("fsdp"):
        job = make({"dynamic": False, "backend": "autoremat", "options": options})
        assert job.forward is not None
        profile = autoremat.profile_step(job.forward, *job.batch, regional=True, options=options)
        minimum = profile.minimum_peak_bytes
    else:
        minimum = minimum_of(make, options)
    least = int(largest(minimum) * ABOVE_MINIMUM[compiler])
    for asked in (*(int(share * plain) for share in SHARES), least):
        budget = max(asked, least)
        yield budget, budget if profile is None else profile.within(budget)


def measure(rank: int, strategy: str, name: str, layers: int, compiler: str) -> list[dict[str, Any]]:
    """Returns the rows of one strategy and one model on this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make = functools.partial(STRATEGIES[strategy], name, rank, layers)
    plain_peak, plain_loss, expected = measured(make, {"backend": compiler})
    rows = []
    for budget, given in budgets(make, largest(plain_peak), strategy, compiler):
        before = len(autoremat.reports())
        options = {"memory_budget": given, "compiler": compiler}
        try:
            peak, loss, gradients = measured(make, {"backend": "autoremat", "options": options})
        except Exception as error:
            if find_cause(error, BudgetInfeasible) is None:
                raise
            rows.append({"error": f"infeasible at {budget / 2**20:.2f} MiB"})  # on all ranks
            continue
        pairs = zip(gradients, expected, strict=True)
        worst = max(float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)) for ours, theirs in pairs)
        reports = autoremat.reports()[before:]
        rows.append({
            "plain": plain_peak, "budget": budget, "peak": peak, "graphs": len(reports),
            "recomputed": sum(report.recomputed_ops for report in reports),
            "loss": abs(loss - plain_loss) / abs(plain_loss) if plain_loss else 0.0, "gradient": worst,
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as text."""
    header = (
        f"{'strategy':20} {'model':8} {'processes':>9} {'layers':>6} {'graphs':>6} {'plain MiB':>10} {'budget':>8} {'peak':>8} "
        f"{'used':>6} {'recomputed':>10} {'loss':>8} {'gradient':>9}"
    )
    lines = [header]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['strategy']:20} {row['model']:8} {row['processes']:9} {row['error']}")
            continue
        lines.append(
            f"{row['strategy']:20} {row['model']:8} {row['processes']:9} {row['layers']:6} {row['graphs']:6} "
            f"{row['plain'] / 2**20:10.2f} {row['budget'] / 2**20:8.2f} {row['peak'] / 2**20:8.2f} "
            f"{row['peak'] / row['budget']:6.1%} {row['recomputed']:10} {row['loss']:8.0e} {row['gradient']:9.0e}"
        )
    return "\n".join(lines)


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the largest figures over the ranks; their error, if they have one."""
    return {key: max(row[key] for row in ranks) for key in ranks[0]}


def key(row: dict[str, Any]) -> tuple[int, str, int]:
    """Returns the place of a row in the table."""
    return list(STRATEGIES).index(row["strategy"]), row["model"], row["processes"]


def entry(strategy: str, name: str, arguments: argparse.Namespace, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the rows of one strategy and one model."""
    import parallel_strategies  # the ranks import the function by its module's name

    call = (strategy, name, arguments.layers, arguments.compiler)
    results = run_ranks(parallel_strategies.measure, arguments.processes, arguments.timeout, call, environment)
    try:
        found = [merged([dict(row) for row in ranks]) for ranks in zip(*values(results), strict=True)]
    except AssertionError as error:
        print(error, flush=True)
        found = [{"error": str(error).strip().splitlines()[-1][:120]}]
    where = {"strategy": strategy, "model": name, "processes": arguments.processes, "layers": arguments.layers}
    return [where | row for row in found]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="strategies whose names begin with this, such as ddp|fsdp whole")
    parser.add_argument("--models", nargs="+", default=[], help="without it: all three for ddp, else one")
    parser.add_argument("--layers", type=int, default=2, help="layers of the language models")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--compiler", default="inductor", choices=list(ABOVE_MINIMUM))
    parser.add_argument("--timeout", type=float, default=900)
    return parser.parse_args()


def models_of(strategy: str) -> list[str]:
    """Returns the models that a strategy is measured on."""
    if strategy.startswith("pipeline"):
        return ["residual"]
    return ["llama", "gpt2", "convnet"] if strategy == "ddp" else ["llama"]


def main() -> int:
    arguments = parsed()
    suffix = "" if arguments.compiler == "inductor" else f"_{arguments.compiler}"
    file = ROOT / "benchmarks" / "results" / f"parallel_strategies{suffix}"
    json_file = file.with_suffix(".json")
    rows: list[dict[str, Any]] = json.loads(json_file.read_text()) if json_file.exists() else []
    with tempfile.TemporaryDirectory() as caches:
        environment = {"AUTOREMAT_COST_MODEL": "roofline", "AUTOREMAT_CACHE_DIR": f"{caches}/ours",
                       "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "AUTOREMAT_PROGRESS": "0"}  # fmt: skip
        for strategy in (name for name in STRATEGIES if name.startswith(tuple(arguments.only.split("|")))):
            for name in arguments.models or models_of(strategy):
                begun = time.time()
                found = entry(strategy, name, arguments, environment)
                rows = sorted([row for row in rows if key(row) != key(found[0])] + found, key=key)
                print(table(found), f"{time.time() - begun:.0f} s", flush=True)
                title = f"torch {torch.__version__}, Python {platform.python_version()}, {arguments.compiler}"
                file.with_suffix(".txt").write_text(f"{title}\n{table(rows)}\n")
                json_file.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any("error" in row or row["peak"] > row["budget"] or row["gradient"] > 1e-3 for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
