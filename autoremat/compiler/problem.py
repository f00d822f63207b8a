"""The problem of a graph: all that decides its plan, and that no attempt changes; and its record on disk.

Records have a fingerprint of everything that determines a plan. They supply the report and the plan of a compilation that
torch's caches answer.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autoremat.basics.codec import plain
from autoremat.basics.disk_cache import UNUSABLE, read_text, write_text
from autoremat.capture import pricing, source_info
from autoremat.capture.capture import device_of_inputs
from autoremat.measure.calibration import device_name
from autoremat.ops import declarations
from autoremat.planner.cost.device import Rates
from autoremat.planner.cost.links import HostLink
from autoremat.planner.graph.op import SHARDS
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner
from autoremat.report.data import CODEC
from autoremat.report.report import Report
from autoremat.request.request import Request
from autoremat.torch_private import compilers, process_groups, symbolic_sizes
from autoremat.torch_private.allocator import settings_of_process
from autoremat.torch_private.dynamo import sharded_inputs
from autoremat.torch_private.tensors import subclass_identity


@dataclass(frozen=True)
class Reference:
    """The peak that a graph needs without this package."""

    bytes: int
    source: str
    saved_bytes: int = 0
    """Bytes that the step with this peak saves for the backward."""


@dataclass(frozen=True)
class Record:
    """The record of a compilation.

    ``report`` is None if the graph has no backward. ``extra_headroom_bytes`` is the headroom below the user's budget at which
    the generated code fitted.
    """

    report: Report | None
    extra_headroom_bytes: int = 0
    agreement: str = ""
    """Name of the agreement of several ranks under which the code was made; empty for a process by itself."""


@dataclass
class Searches:
    """The searches of all attempts, and the reference. An attempt on an equal graph continues with them."""

    planners: list[tuple[object, Planner]] = field(default_factory=list)
    """Each search after what it was begun for: graph, given schedules and soft budget."""
    reference: Reference | None = None
    """The reference peak by the code that Inductor generates alone; None if it is not known, or no budget is a share of it."""
    torchs_plans: list[Plan] = field(default_factory=list)
    """Torch's own partitions, which are the references of shares."""

    @property
    def ended_by_clock(self) -> bool:
        """True if the clock has ended a search of any attempt, so that another compilation may choose another plan."""
        return any(planner.limit.ended_by_clock for _, planner in self.planners)


@dataclass(frozen=True)
class Problem:
    """What is asked of a graph, and what is known of the graph, its ranks and its device before the first attempt."""

    request: Request = field(default_factory=Request)
    module: fx.GraphModule | None = None
    """The graph that Dynamo captured; None if a joint graph is given."""
    inputs: Sequence[Any] = ()
    patches: Mapping[str, Any] = field(default_factory=dict)
    """The Inductor options that the user set."""
    cuda_name: str | None = None
    """Name of the CUDA device that is planned for by its data sheet; None to plan for the device of the graph."""
    lowers: bool = True
    """True if Inductor's code decides in the end. False if the simulation alone decides."""
    may_repeat_collectives: bool = False
    """True if ranks that share the graph follow one plan, so that they can repeat an all-gather together."""
    sharded_inputs: frozenset[int] = frozenset()
    """Positions of the inputs that are parameters under ``fully_shard``: freed after the forward, back in the backward."""
    key: str = ""
    """Name of the record on disk; empty without generated code."""
    record: Record | None = None
    """The record of an earlier process."""
    rates: Rates | None = None
    """The rates of the rank whose rates hold for all; None for those of the device here."""
    host_link: HostLink | None = None
    """The rates between device and host that hold for all ranks; None for those of the device here."""
    ranks: tuple[int, ...] = ()
    """The ranks that share the graph; empty for a process by itself."""
    told: Report | None = None
    """The report of another rank, or of an earlier process, whose plan is applied instead of a search."""
    told_by: str = ""
    """Whose report that is, in words."""
    searches: Searches = field(default_factory=Searches, compare=False)

    @property
    def decided_by_code(self) -> bool:
        """True if the peak of generated code decides on a plan."""
        return self.request.fuses and self.lowers


# -- records of problems on disk ---------------------------------------------------------------------------------------------


def load_record(key: str) -> Record | None:
    """Returns the record of ``key``, or None if it is missing or unusable."""
    try:
        record: Record = CODEC.read(Record, json.loads(read_text("reports", key) or ""))
        return record
    except UNUSABLE:
        return None


def save_record(key: str, record: Record) -> None:
    """Writes the record of ``key``."""
    write_text("reports", key, json.dumps(plain(record)))


@cache
def source_hash() -> str:
    """Returns a hash of this package's sources. Two versions of the package therefore never share a cache entry."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent  # the package's folder
    for path in sorted({p.resolve() for folder in (root, root / "passes") for p in folder.rglob("*.py")}):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(problem: Problem) -> str:
    """Returns a hash of everything that determines the plan: graph, inputs, request, settings of torch and versions."""
    gm, inputs, request = problem.module, problem.inputs, problem.request
    assert gm is not None
    parts = [
        source_hash(),
        torch.__version__,
        request.cache_key(),
        pricing.identity(request.options.cost_model, device_of_inputs(gm, inputs)),
        declarations.identity(),
        gm.print_readable(print_output=False),
        source_info.identity(gm) if request.options.policy or request.options.save or request.options.recompute else "",
        *map(_describe, inputs),
        f"{sorted(sharded_inputs(gm))}",
        symbolic_sizes.planned_identity(),
        f"{torch.is_autocast_enabled('cpu')} {torch.is_autocast_enabled('cuda')} {torch.get_num_threads()}",
        f"{torch.get_autocast_dtype('cpu')} {torch.get_autocast_dtype('cuda')} {torch.get_default_dtype()}",
        f"{torch.are_deterministic_algorithms_enabled()} {compilers.float32_precision()}",
        device_name(device_of_inputs(gm, inputs)),
        settings_of_process() if device_of_inputs(gm, inputs).type == "cuda" else "",
        compilers.machine_fingerprint(),
        compilers.configuration_fingerprint(),
        f"{process_groups.identity()} {problem.may_repeat_collectives}",
        process_groups.members() if SHARDS in request.forms else "",  # the code has this rank's part of values
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _describe(value: Any) -> str:
    """Returns the properties of an input that a compiled graph may depend on, as text."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    try:
        layout = f"{tuple(value.stride())} {value.storage_offset()}"
    except RuntimeError:
        layout = str(value.layout)
    shape = ",".join(str(s) for s in value.shape)
    parts = subclass_identity(value)  # the placements of a distributed tensor
    return f"{type(value).__name__} {shape} {layout} {value.dtype} {value.device} {value.requires_grad} {parts}"
