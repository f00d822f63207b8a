"""Torch's private names for Inductor's lowering: buffers and their origins, the peak of code, the sequence of kernels."""

import contextlib
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx

from autoremat.basics.errors import OptionWarning
from autoremat.basics.warn import warn_user
from autoremat.planner.memory.allocations import HalfAllocations
from autoremat.planner.memory.wrapper_replay import ReplayContext, replay
from autoremat.torch_private import resolve
from autoremat.torch_private.hooks import Method, hooked
from autoremat.torch_private.symbolic_sizes import most_of_expression


def layout_bytes(buffer: Any, device_type: str = "cpu") -> int:
    """Returns the bytes of an Inductor buffer; 0 for a buffer that stands for several results or for none.

    A buffer on the host has none if the memory of another device counts.
    """
    from torch._inductor.virtualized import V

    layout = _layout(buffer)
    if layout is None or layout.device.type == "cpu" != device_type:
        return 0
    return most_of_expression(layout.storage_size(), V.graph.sizevars) * int(layout.dtype.itemsize)


def _layout(buffer: Any) -> Any | None:
    """Returns the layout of an Inductor buffer; None for a buffer that stands for several results, and for other objects."""
    from torch._inductor import ir

    try:
        layout = buffer.get_layout() if isinstance(buffer, ir.IRNode) else None
    except NotImplementedError:
        return None
    return layout if isinstance(layout, ir.Layout) else None


def results(buffer: Any) -> list[str]:
    """Returns the names of the buffers that hold the results of the call that ``buffer`` stands for.

    Results that are views of the call's operands have no memory of their own, and are left out.
    """
    from torch._inductor import ir

    if not isinstance(buffer, ir.ExternKernel) or buffer.get_inputs_that_alias_output():
        return []
    found = torch.utils._pytree.tree_leaves(getattr(buffer, "outputs", ()))
    return [result.get_name() for result in found if type(result) is ir.MultiOutput]


def received(lowering: Any, known: ReplayContext, source: str = "") -> tuple[dict[str, int], set[str]]:
    """Returns the bytes of the tensors that a backward receives, by name, and the names of those that it cannot free.

    A forward receives none that count. Of tensors that share memory, the one that the code in ``source`` frees
    last has it.
    """
    if not lowering.is_backward:
        return {}, set()
    counted = {}
    for name, buffer in lowering.graph_inputs.items():
        layout = _layout(buffer)  # an input that is no tensor has none
        pairs = () if layout is None else zip(layout.size, layout.stride, strict=True)
        if not known.is_input(name, tuple(step for size, step in pairs if size != 1)):
            counted[name] = layout_bytes(buffer, known.device_type)
    together: dict[str, list[str]] = {}
    for name in counted:
        together.setdefault(known.aliases.get(name, name), []).append(name)
    for names_of_one in together.values():
        *earlier, last = sorted(names_of_one, key=lambda name: source.rfind(f"del {name}\n") % (len(source) + 1))
        counted |= {last: max(counted[name] for name in names_of_one), **dict.fromkeys(earlier, 0)}
    return counted, {name for name in counted if name in known.held or name.startswith("tangents")}


OP = "autoremat_op"
"""Key of ``node.meta`` for the planner's op that a node is. Clones of the node and Inductor's graph keep it."""

BUFFER = "autoremat_buffer"
"""Key of ``node.meta``: true for a result of the backward that the plan counts as a buffer from there on."""


class Origins:
    """The nodes of the graph that became the kernels of its code.

    Nodes that Inductor's own passes have created belong to no op.
    """

    def __init__(self, lowering: Any) -> None:
        self.lowering, self.place = lowering, {node: place for place, node in enumerate(lowering.module.graph.nodes)}

    def of(self, name: str) -> list[fx.Node]:
        """Returns the nodes whose kernel writes the buffer ``name``, in sequence, with operands that are computed there."""
        from torch._inductor import ir

        buffer = self.lowering.try_get_buffer(name)
        origins = buffer.origins if isinstance(buffer, ir.IRNode) else ()
        return sorted((node for node in origins if node in self.place), key=self.place.__getitem__)

    def workspace(self, name: str) -> int | None:
        """Returns the workspace of the node that became the extern kernel of a buffer; None if no op is known."""
        from torch._inductor import ir

        if not isinstance(self.lowering.try_get_buffer(name), ir.ExternKernel) or not (nodes := self.of(name)):
            return None
        op = nodes[-1].meta.get(OP)  # operands come before the node that reads them
        return None if op is None else op.workspace_bytes


@dataclass(frozen=True)
class LoweredPeak:
    """The peak of one lowered graph, in bytes.

    It counts the graph's allocations. For a backward, it also counts the tensors that the backward receives.
    """

    is_backward: bool
    peak_bytes: int
    is_estimate: bool = False
    """True if the generated code could not be replayed, so that the peak is estimated from the scheduler's buffers."""
    pool_bytes: int | None = None
    """Part of the peak that lies in the pool of CUDA graphs. None without CUDA graphs."""
    allocations: HalfAllocations | None = None
    """The allocations in sequence; None if the generated code could not be replayed."""


def _scheduled_peak(lowering: Any, held: Collection[str]) -> int:
    """Returns a peak without in-place reuse, for code that :func:`replay` cannot read. ``held`` live until the end."""
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
    return int(peak) + sum(layout_bytes(lowering.graph_inputs[name]) for name in kept)


def _lowered_peak(lowering: Any, source: str, known: ReplayContext) -> LoweredPeak:
    from torch._inductor.virtualized import V

    with V.set_graph_handler(lowering):
        counted, held = received(lowering, known, source)

        def buffer_bytes(name: str) -> int:
            buffer = lowering.try_get_buffer(name)
            return 0 if buffer is None else layout_bytes(buffer, known.device_type)

        def results_of(name: str) -> list[str]:
            return results(lowering.try_get_buffer(name))

        copied = known.copied_inputs
        if lowering.is_backward and copied is not None:  # what the forward saves is in the memory of CUDA graphs already
            copied = {name: size for name, size in counted.items() if name.startswith("tangents")}
        facts = known.allocation_bytes, known.workspaces, copied, known.device_type
        replayed = replay(source, counted, buffer_bytes, held, *facts, results_of, Origins(lowering).workspace)
        if replayed is None:
            needed = (size for sizes in known.workspaces.values() for size in sizes.values())
            pool, other = _scheduled_peak(lowering, held) + max(needed, default=0), 0
        else:
            pool, other = replayed.pool_bytes, replayed.other_bytes
        if lowering.is_backward:  # outputs of the forward stay live although the backward does not read them
            pool += sum(size for name, size in known.held.items() if name not in lowering.graph_inputs)
        peak = pool + other + known.code_headroom_bytes
        nodes = zip(lowering.get_output_names(), lowering.module.graph.output_node().args[0], strict=False)
        names_of_results = {code: node.name for code, node in nodes if isinstance(node, fx.Node)}
        allocations = None if replayed is None else replayed.allocations.with_names(names_of_results)
        return LoweredPeak(
            bool(lowering.is_backward), peak, replayed is None, pool if copied is not None else None, allocations
        )


def _run_after(node: Any, earlier: Any) -> None:
    """Fixes the sequence of two nodes by a weak dependency, which keeps no buffer live.

    The graph's own ``additional_buffer_deps`` would make the node a user of the buffer. Inductor writes no buffer in place that
    has such a user, or that is read in two ways.
    """
    from torch._inductor.dependencies import WeakDep

    read = {dependency.name for dependency in node.read_writes.reads}
    for name in earlier.get_buffer_names() - read:
        node.add_fake_dep(WeakDep(name, node.get_name(), is_fake=True))


def _pin_order(scheduler: Any) -> None:
    """Keeps the graph's sequence of extern kernels and templates, and all other nodes between the same two of them.

    Without this, the scheduler moves a late recomputation to an early op that reads the same buffer.
    """
    from torch._inductor import ir
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    barrier: Any = None
    window: list[Any] = []
    for node in scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
            continue
        if barrier is not None:
            _run_after(node, barrier)
        # Autotuning chooses templates for matrix products and attention: kernels that Inductor writes itself.
        if isinstance(node, ExternKernelSchedulerNode) or node.is_template():
            for earlier in window:
                _run_after(node, earlier)
            barrier, window = node, []
        else:
            window.append(node)


def _keep_ancestors_that_run_before(scheduler: Any) -> None:
    """Removes from each node's ancestors those that a pass of communication moved behind it, which may still have to read.

    Inductor writes a buffer in place if all its other readers are ancestors.
    """
    started: set[str] = set()
    for node in scheduler.nodes:
        started.update(node.get_operation_names())
        for part in node.get_nodes():
            part.ancestors &= started


def _chain_draws(scheduler: Any) -> None:
    """Keeps the graph's sequence of ATen's kernels that draw random numbers.

    They share a generator. Inductor's own dependencies between them go by their results, and are lost with a result that nobody
    reads. Its reordering for memory, which depends on the saved tensors, could then give one tensor the numbers of another.
    """
    from torch._inductor.ir import ExternKernel

    last = None
    for node in scheduler.nodes:
        op = node.node.op_overload if isinstance(node.node, ExternKernel) else None
        if isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags:
            if last is not None:
                _run_after(node, last)
            last = node


@contextlib.contextmanager
def sequenced(memory_first: Callable[[], bool], pins_forward: Callable[[], bool]) -> Iterator[None]:
    """Makes Inductor keep the sequence of random draws while active, and prefer memory over speed if ``memory_first()``.

    Backward graphs then keep their sequence (see ``_pin_order``), and forward graphs too if ``pins_forward()``. What the plan
    materialises is a buffer where the plan computes it, not where a later reader needs it. Buffers are
    freed after their last use, and none is kept for a later one. Nodes that no CUDA graph can record stay at their places.
    Inductor would move those that compute results, such as gradients of parameters, to the end of the graph, and keep what they
    read.
    """
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    def is_pinned() -> bool:
        return memory_first() and (V.graph.is_backward or pins_forward())

    def run_and_realize(run: Method, lowering: Any, node: fx.Node) -> Any:
        result = run(lowering, node)
        if memory_first() and BUFFER in node.meta:
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, ir.TensorBox):
                    tensor.realize()
        return result

    def compute_and_pin(compute: Method, scheduler: Any) -> None:
        compute(scheduler)
        _chain_draws(scheduler)
        if is_pinned():
            _pin_order(scheduler)

    def keep_and_compute(compute: Method, scheduler: Any) -> None:
        if is_pinned():
            _keep_ancestors_that_run_before(scheduler)  # the sequence of the nodes is final here
        compute(scheduler)

    def generate_compactly(generate: Method, lowering: Any) -> Any:
        if not memory_first():
            return generate(lowering)
        compact = {"allow_buffer_reuse": False, "triton.reorder_for_reducing_graph_partitions": False}
        with inductor_config.patch(compact):
            return generate(lowering)

    with (
        hooked(GraphLowering, "run_node", run_and_realize),
        hooked(Scheduler, "compute_dependencies", compute_and_pin),
        hooked(Scheduler, "compute_last_usage", keep_and_compute),
        hooked(GraphLowering, "codegen", generate_compactly),
    ):
        yield


@contextlib.contextmanager
def kernels_corrected(patches: Mapping[str, Any]) -> Iterator[None]:
    """Makes random numbers in this thread's kernels depend only on seed and position, and sums add to the right elements.

    Torch 2.13 and later can draw four numbers at once in one-dimensional CUDA kernels. Two-dimensional kernels then draw other
    numbers for the same seed, so the backward would recompute a dropout mask that differs from the forward's. ``patches`` are
    the compilation's own Inductor settings, on top of the global ones.

    Before torch 2.14, Inductor adds the offset in the tile twice to the index of a sum, in tiled loops of a CPU with several
    threads. The kernel then writes behind the buffer (https://github.com/pytorch/pytorch/issues/191837). Loops are tiled if
    they read tensors of different layouts.
    """
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel
    from torch._inductor.codegen.triton import TritonOverrides

    def store(method: Method, kernel: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        with_threads = inductor_config.cpp.dynamic_threads or kernel.num_threads > 1
        if mode == "atomic_add" and with_threads and not kernel.need_vec_transpose(kernel.rename_indexing(index)):
            CppVecKernel.store(kernel, name, index, value, mode)  # type: ignore[no-untyped-call]
        else:
            method(kernel, name, index, value, mode)

    with contextlib.ExitStack() as hooks:
        if resolve("torch._inductor.codegen.triton:TritonOverrides._can_use_4x_random") is not None:
            if patches.get("use_rand4x", resolve("torch._inductor.config:use_rand4x")):
                warn_user(
                    "use_rand4x has no effect on what this backend compiles: kernels of different shapes would draw different "
                    "numbers for the same seed, and a recomputed dropout another mask. Leave the setting off here",
                    OptionWarning,
                )
            hooks.enter_context(hooked(TritonOverrides, "_can_use_4x_random", lambda _: False))
        if resolve("torch._inductor.codegen.cpp:CppVecKernel._use_parallel_atomic_add") is None:  # torch's own correction
            hooks.enter_context(hooked(CppTile2DKernel, "store", store))
        yield


@contextlib.contextmanager
def observe_lowering(known: Callable[[], ReplayContext], observer: Callable[[LoweredPeak], None]) -> Iterator[None]:
    """Calls ``observer`` with the peak of every whole training graph that Inductor generates code for in this thread.

    The call comes before any kernel of the graph is compiled. An exception from ``observer`` ends the compilation. Inductor
    lists the types of its ops' results once meanwhile, and not for each op that it writes (torch 2.15 does so too).
    """
    from torch._inductor import utils
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.graph import GraphLowering, SubgraphLowering

    listed: dict[str, Any] = {}

    def list_types(method: Method, handler: Any) -> None:
        if listed != utils.op_dtype_propagation_rules:
            method(handler)
            listed.update(utils.op_dtype_propagation_rules)

    def generate_and_observe(generate: Method, lowering: Any) -> Any:
        generated = generate(lowering)
        if not isinstance(lowering, SubgraphLowering) and not lowering.is_inference:
            observer(_lowered_peak(lowering, generated[0].value, known()))
        return generated

    with (
        hooked(GraphLowering, "codegen", generate_and_observe),
        hooked(DtypePropagationOpsHandler, "__init__", list_types),
    ):
        yield


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Makes Inductor generate all code and compile no kernel, while active.

    The results cannot be called, and no cache stores them. A CPU's kernels lack their vector loops, which decide no buffer.
    """
    from torch._inductor.graph import GraphLowering

    def not_compiled(*_: Any, **__: Any) -> Any:
        raise RuntimeError("code was generated and its kernels were not compiled")

    def only_generated(_: Method, lowering: Any) -> Any:
        lowering.codegen()
        # With CUDA graphs, Inductor wraps each partition of the loaded code.
        runner = types.SimpleNamespace(recursively_apply_fns=lambda _: None, partitions=[])
        return types.SimpleNamespace(call=not_compiled, runner=runner, __file__="")

    with (
        functorch_config.patch({"enable_autograd_cache": False}),
        inductor_config.patch({"fx_graph_cache": False, "fx_graph_remote_cache": False, "cpp.simdlen": 1}),
        hooked(GraphLowering, "compile_to_module", only_generated),
    ):
        yield
