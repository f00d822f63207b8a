"""The one file that touches torch's private names. Each function says what it stands for; nothing else here decides anything.

Supported: torch 2.11 to 2.15. Where a private signature differs between versions, arguments are matched by name.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import unittest.mock
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from autoremat.errors import UnsupportedTorchError
from autoremat.torch_sizes import expression_hint
from autoremat.torch_sizes import size_hint as size_hint
from autoremat.wrapper_code import Circumstances, replay_peak

SUPPORTED_MINORS = range(11, 16)


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise ``UnsupportedTorchError`` unless torch is a 2.11 to 2.15."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or int(match[1]) != 2 or int(match[2]) not in SUPPORTED_MINORS:
        raise UnsupportedTorchError(version)


check_torch_version()

import torch._functorch.config as functorch_config  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402
from torch._functorch import compile_utils, partitioners  # noqa: E402
from torch._functorch._aot_autograd import utils as aot_utils  # noqa: E402
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn  # noqa: E402
from torch.fx.experimental.proxy_tensor import is_sym_node as is_sym_node  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy  # noqa: E402

PartitionedModules = tuple[fx.GraphModule, fx.GraphModule]


# -- joint graphs ------------------------------------------------------------------------------------------------------


def is_tangent(node: fx.Node) -> bool:
    """Whether the placeholder holds a gradient that flows into the backward."""
    return bool(aot_utils._is_tangent(node))


def is_forward_input(node: fx.Node) -> bool:
    """Whether the placeholder belongs to the forward (a primal or the forward's random seed and offset)."""
    return bool(aot_utils._is_primal(node) or aot_utils._is_fwd_seed_offset(node))


def must_be_in_forward(node: fx.Node) -> bool:
    """Whether the node mutates something in the forward."""
    return node.op == "call_function" and bool(partitioners._must_be_in_forward(node))


def must_be_in_backward(node: fx.Node) -> bool:
    """Whether the node is tagged to run in the backward (mutations there)."""
    return node.op == "call_function" and bool(partitioners._must_be_in_backward(node))


def is_traced_in_backward(node: fx.Node) -> bool:
    """Whether autograd made the node."""
    return bool(partitioners._has_tag_is_backward(node))


def is_opaque(node: fx.Node) -> bool:
    """Whether the node holds something that is neither a tensor nor a symbolic number."""
    check: Callable[[fx.Node], bool] | None = getattr(partitioners, "is_opaque_node", None)
    return bool(check(node)) if check is not None else False


def is_with_effects(node: fx.Node) -> bool:
    """Whether the node is an effectful op with its token."""
    return bool(aot_utils.is_with_effects(node))


def prepare_joint(joint: fx.GraphModule) -> fx.GraphModule:
    """What torch's partitioner does before it decides: dead code, common subexpressions, and the tags that protect
    checkpoint-region borders, collectives, effects and mutations."""
    joint.graph.eliminate_dead_code()
    if functorch_config.cse:
        joint.graph = compile_utils.fx_graph_cse(joint.graph)
    if partitioners.has_recomputable_ops(joint):
        joint = partitioners.cleanup_recompute_tags(joint, is_default_partition=False)
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        partitioners.force_save_collectives(joint)
    partitioners.force_save_effectful_ops(joint)
    partitioners.force_save_bw_mutation_src(joint)
    joint.recompile()
    return joint


def partition_as_torch_does(joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> PartitionedModules:
    """Torch's own partition, for graphs in which there is nothing to plan."""
    accepted = inspect.signature(partitioners.min_cut_rematerialization_partition).parameters
    kwargs = {name: value for name, value in kwargs.items() if name in accepted}
    forward, backward = partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
    return forward, backward


def device_of(joint: fx.GraphModule) -> torch.device:
    """The device of the step: the first accelerator that a node's value lies on, else the CPU."""
    for node in joint.graph.nodes:
        tensor = node.meta.get("val")
        if isinstance(tensor, torch.Tensor) and tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cpu")


def joint_outputs(joint: fx.GraphModule, num_fwd_outputs: int) -> tuple[list[Any], list[Any]]:
    """The nodes (or constants) that the forward and the backward return."""
    (output,) = joint.graph.find_nodes(op="output")
    outputs = torch.utils._pytree.arg_tree_leaves(*output.args)
    return outputs[:num_fwd_outputs], outputs[num_fwd_outputs:]


def extract_modules(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    saved_opaque: list[fx.Node],
    num_fwd_outputs: int,
    static_lifetime_inputs: Collection[fx.Node],
) -> PartitionedModules:
    """Split ``joint``: what the backward reads of ``saved`` becomes outputs of the forward, in the order AOTAutograd wants."""
    wanted: dict[str, Any] = {
        "saved_sym_nodes": saved_symbols,
        "saved_opaque_nodes": saved_opaque,
        "saved_opaque_objects": saved_opaque,
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_nodes": torch.utils._ordered_set.OrderedSet(static_lifetime_inputs),
    }
    accepted = inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    kwargs = {name: value for name, value in wanted.items() if name in accepted}
    forward, backward = partitioners._extract_fwd_bwd_modules(joint, saved, **kwargs)
    return forward, backward


def finish_module(module: fx.GraphModule, is_backward: bool) -> fx.GraphModule:
    """Unpack results of multi-output ops at once, and thread random states of nested regions through."""
    module = compile_utils.raise_getitems(module)
    thread = getattr(partitioners, "thread_graphsafe_rng_from_hops", None)
    if thread is not None:
        module = thread(module, is_backward=is_backward)
    return module


# -- sizes and costs ---------------------------------------------------------------------------------------------------


def multiplies_in_tiles(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of ``dtype`` in tiles (AMX), for which oneDNN packs its operands."""
    probe = {torch.bfloat16: "_is_amx_tile_supported", torch.float16: "_is_amx_fp16_supported"}.get(dtype, "")
    return bool(getattr(torch.cpu, probe, bool)())


def lays_channels_last(tensor: torch.Tensor) -> bool:
    """Whether Inductor convolves images like ``tensor`` channels last whatever their layout was: on a CPU with oneDNN."""
    library: Any = torch.backends.mkldnn
    return bool(tensor.device.type == "cpu" and library.enabled and inductor_config.layout_optimization)


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identifies the storage of a (fake) tensor; None if it has none (sparse tensors, some subclasses)."""
    with contextlib.suppress(NotImplementedError):
        return int(tensor.untyped_storage()._cdata)
    return None


# -- compilers ---------------------------------------------------------------------------------------------------------


def compile_lock() -> contextlib.AbstractContextManager[Any]:
    """Dynamo's own lock: whatever Dynamo compiles in this process is compiled by one thread at a time."""
    from torch._dynamo.convert_frame import compile_lock

    return cast("contextlib.AbstractContextManager[Any]", compile_lock)


def inductor_config_names() -> frozenset[str]:
    """The names of Inductor's options, in the spelling that ``torch.compile(options=...)`` takes."""
    return frozenset(vars(inductor_config)["_config"]) | frozenset(inductor_config.get_config_copy())


def mode_config(mode: str | None) -> dict[str, Any]:
    """The Inductor options that ``torch.compile(mode=...)`` stands for."""
    if mode is None:
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def compile_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], config: dict[str, Any], functorch: dict[str, Any]
) -> Callable[..., Any]:
    """Inductor, caches and all, with ``config`` patched (also for what it compiles later)."""
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(functorch):
        compiled: Any = compile_fx(module, inputs, config_patches=config)
    return cast(Callable[..., Any], compiled)


def _run_uncompiled(module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """Run the graph op by op, freeing each tensor after its last use."""
    from torch.fx.graph import _BoxedCodeGen

    # Not by fx.Interpreter, which writes to what another thread's tracing reads.
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    forward = module.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark for functions that empty their argument list
    return run


def compile_uncompiled(
    module: fx.GraphModule, inputs: Sequence[Any], partition: Callable[..., PartitionedModules]
) -> Callable[..., Any]:
    """AOTAutograd with ``partition``, then plain ATen calls."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=_run_uncompiled, partition_fn=partition, keep_inference_input_mutations=True)
    compiled: Callable[..., Any] = backend(module, inputs)
    return compiled


def configuration_fingerprint() -> str:
    """Text that changes with any setting of Inductor or AOTAutograd that could change a joint graph."""
    portable = inductor_config.save_config_portable()
    portable.pop("custom_partitioner_fn", None)
    return repr(sorted((k, repr(v)) for k, v in [*portable.items(), *functorch_config.save_config_portable().items()]))


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Compile afresh: neither AOTAutograd's nor Inductor's cache answers, nor is written."""
    with (
        functorch_config.patch({"enable_autograd_cache": False}),
        inductor_config.patch({"force_disable_caches": True}),
    ):
        yield


# -- what Inductor makes of a graph ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoweredPeak:
    """The peak of one lowered graph, in bytes: what it allocates and, for a backward, what it was handed."""

    is_backward: bool
    peak_bytes: int


def _layout_bytes(buffer: Any) -> int:
    """Bytes of a buffer of Inductor's; 0 for what holds several results or none."""
    from torch._inductor.virtualized import V

    try:
        layout = buffer.get_layout()
        return expression_hint(layout.storage_size(), V.graph.sizevars) * int(layout.dtype.itemsize)
    except (AttributeError, NotImplementedError):
        return 0


def _strides(buffer: Any) -> tuple[object, ...]:
    """Of the dimensions that are longer than 1; nothing for what is no tensor."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        return tuple(step for size, step in zip(buffer.get_size(), buffer.get_stride(), strict=True) if size != 1)
    return ()


def _scheduled_peak(lowering: Any, held: Collection[str]) -> int:
    """The peak by the scheduler's buffers, for generated code that :func:`replay_peak` cannot read. It knows nothing of
    in-place reuse, and what is held is added without ever being freed."""
    from torch._inductor import memory

    scheduler, ordered_set = lowering.scheduler, torch.utils._ordered_set.OrderedSet
    outputs = ordered_set(lowering.get_output_names())
    _, freeable = memory.prepare_planning_info(
        scheduler.nodes,
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        ordered_set(lowering.graph_inputs),
        outputs,
    )
    kept = [name for name in lowering.graph_inputs if name in held]
    freeable = {name: buffer for name, buffer in freeable.items() if name not in held}
    peak, _ = memory.estimate_peak_memory(scheduler.nodes, freeable, outputs)
    return int(peak) + sum(_layout_bytes(lowering.graph_inputs[name]) for name in kept)


def _lowered_peak(lowering: Any, source: str, known: Circumstances) -> LoweredPeak:
    from torch._inductor.virtualized import V

    with V.set_graph_handler(lowering):
        counted = {}
        if lowering.is_backward:
            counted = {
                name: _layout_bytes(buffer)
                for name, buffer in lowering.graph_inputs.items()
                if not known.is_input(name, _strides(buffer))
            }
        held = {name for name in counted if name in known.held or name.startswith("tangents")}

        def buffer_bytes(name: str) -> int:
            return _layout_bytes(lowering.get_buffer(name)) if lowering.try_get_buffer(name) is not None else 0

        peak = replay_peak(source, counted, buffer_bytes, held, known.allocation_bytes, known.workspaces)
        peak = _scheduled_peak(lowering, held) if peak is None else peak
        if lowering.is_backward:  # forward outputs that the backward does not read are alive all the same
            peak += sum(size for name, size in known.held.items() if name not in lowering.graph_inputs)
        return LoweredPeak(bool(lowering.is_backward), peak + known.slack_bytes)


def _pin_order(scheduler: Any) -> None:
    """Keep the graph's order between extern kernels: fusion may merge what stands between two of them, but move nothing
    past one. Otherwise the scheduler computes what the plan recomputes late together with what it computes early, because
    both read the same buffer."""
    from torch._inductor import ir
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
    from torch._inductor.virtualized import V

    def after(node: Any, earlier: Any) -> None:
        # Read by `compute_dependencies` as control dependencies, which order nodes but keep no buffer alive.
        V.graph.additional_buffer_deps[node.get_name()].update(earlier.get_buffer_names())

    barrier: Any = None
    window: list[Any] = []
    for node in scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
            continue
        if barrier is not None:
            after(node, barrier)
        if isinstance(node, ExternKernelSchedulerNode):
            for earlier in window:
                after(node, earlier)
            barrier, window = node, []
        else:
            window.append(node)


@contextlib.contextmanager
def memory_first(wanted: Callable[[], bool]) -> Iterator[None]:
    """While active and if ``wanted()``, Inductor keeps the order of backward graphs (see ``_pin_order``), and frees buffers
    after their last use rather than keep them for a later one of the same size."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    compute, generate = Scheduler.compute_dependencies, GraphLowering.codegen

    def pin_and_compute(scheduler: Any) -> None:
        if wanted() and V.graph.is_backward:
            _pin_order(scheduler)
        compute(scheduler)

    def generate_compactly(lowering: Any) -> Any:
        with inductor_config.patch({"allow_buffer_reuse": False} if wanted() else {}):
            return generate(lowering)

    with (
        unittest.mock.patch.object(Scheduler, "compute_dependencies", pin_and_compute),
        unittest.mock.patch.object(GraphLowering, "codegen", generate_compactly),
    ):
        yield


@contextlib.contextmanager
def observe_lowering(known: Callable[[], Circumstances], observer: Callable[[LoweredPeak], None]) -> Iterator[None]:
    """Call ``observer`` with every whole training graph that Inductor has generated code for, before any of its kernels is
    compiled. What ``observer`` raises ends the compilation."""
    from torch._inductor.graph import GraphLowering, SubgraphLowering

    generate = GraphLowering.codegen

    def generate_and_observe(lowering: Any) -> Any:
        generated = generate(lowering)
        if not isinstance(lowering, SubgraphLowering) and not lowering.is_inference:
            source = str(getattr(generated[0], "value", ""))
            observer(_lowered_peak(lowering, source, known()))
        return generated

    with unittest.mock.patch.object(GraphLowering, "codegen", generate_and_observe):
        yield
