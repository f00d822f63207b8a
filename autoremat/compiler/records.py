"""Records of compilations on disk, by a fingerprint of everything that determines a plan.

They supply the report and the plan of a compilation that torch's caches answer.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autoremat.basics.codec import plain
from autoremat.basics.disk_cache import UNUSABLE, checked_bytes, read_text, write_text
from autoremat.capture import pricing, source_info
from autoremat.capture.capture import device_of_inputs
from autoremat.compiler.problem import Problem, Record
from autoremat.measure.calibration import device_name
from autoremat.ops import declarations
from autoremat.planner.graph.op import SHARDS
from autoremat.report.data import CODEC
from autoremat.torch_private import compilers, kernel_settings, process_groups, symbolic_sizes
from autoremat.torch_private.allocator import settings_of_process
from autoremat.torch_private.dynamo import sharded_inputs
from autoremat.torch_private.tensors import subclass_identity


def load(key: str) -> Record | None:
    """Returns the record of ``key``, or None if it is missing or unusable."""
    try:
        record: Record = CODEC.read(Record, json.loads(read_text("reports", key) or ""))
        checked_bytes(abs(record.extra_headroom_bytes))  # negative for a plan that is looser than the budget
        return record
    except UNUSABLE:
        return None


def save(key: str, record: Record) -> None:
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
        f"{torch.are_deterministic_algorithms_enabled()} {kernel_settings.float32_precision()}",
        device_name(device_of_inputs(gm, inputs)),
        settings_of_process() if device_of_inputs(gm, inputs).type == "cuda" else "",
        kernel_settings.machine_fingerprint(),
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
