"""Hashes that identify compilations and graphs on disk and between processes.

A fingerprint covers everything that determines a plan. A graph key covers only the computation of one graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autoremat.capture import pricing, source_info
from autoremat.capture.capture import device_of_inputs
from autoremat.measure.calibration import device_name
from autoremat.ops import declarations
from autoremat.options.options import Options
from autoremat.torch_private import compilers, kernel_settings, process_groups, symbolic_sizes, tensor_identity
from autoremat.torch_private.allocator import settings_of_process
from autoremat.torch_private.dynamo import sharded_inputs


@cache
def source_hash() -> str:
    """Returns a hash of this package's sources. Two versions of the package therefore never share a cache entry."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent  # the package's folder
    for path in sorted({p.resolve() for folder in (root, root / "passes") for p in folder.rglob("*.py")}):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(gm: fx.GraphModule, inputs: Sequence[Any], options: Options, may_repeat_collectives: bool = False) -> str:
    """Returns a hash of everything that determines the plan: graph, inputs, options, settings of torch and versions."""
    parts = [
        source_hash(),
        torch.__version__,
        options.cache_key(),
        pricing.identity(options.cost_model, device_of_inputs(gm, inputs)),
        declarations.identity(),
        gm.print_readable(print_output=False),
        source_info.identity(gm) if options.policy or options.save or options.recompute else "",
        *map(_describe, inputs),
        f"{sorted(sharded_inputs(gm))}",
        symbolic_sizes.planned_identity(),
        f"{torch.is_autocast_enabled('cpu')} {torch.is_autocast_enabled('cuda')} {torch.get_num_threads()}",
        f"{torch.get_autocast_dtype('cpu')} {torch.get_autocast_dtype('cuda')} {torch.get_default_dtype()}",
        f"{torch.are_deterministic_algorithms_enabled()} {kernel_settings.float32_precision()}",
        device_name(device_of_inputs(gm, inputs)),
        f"{settings_of_process()}" if device_of_inputs(gm, inputs).type == "cuda" else "",
        kernel_settings.machine_fingerprint(),
        compilers.configuration_fingerprint(),
        f"{process_groups.identity()} {may_repeat_collectives}",
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
    parts = tensor_identity.subclass_identity(value)  # the placements of a distributed tensor
    return f"{type(value).__name__} {shape} {layout} {value.dtype} {value.device} {value.requires_grad} {parts}"


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Returns a hash of the graph's ops and of the sizes, types and devices of its inputs.

    Names and source lines are left out, because they depend on the function around the graph.
    """
    numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        target = "" if node.op in ("placeholder", "output", "get_attr") else _name(node.target)
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        lines.append(f"{node.op} {target} {arguments if node.op != 'placeholder' else ''}")
    lines += map(_sizes_and_type, inputs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _name(target: Any) -> str:
    return target if isinstance(target, str) else f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _sizes_and_type(value: Any) -> str:
    """Returns the properties of an input that the plans of its graph depend on, as text."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    hints = [symbolic_sizes.size_hint(size) for size in value.shape]
    return f"{hints} {value.dtype} {value.device} {value.requires_grad}"
