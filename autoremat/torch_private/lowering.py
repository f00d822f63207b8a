"""Torch's private names for what Inductor makes of a graph: the peak of its generated code, and the order of its kernels.

As in ``torch_compat``, each function says what it stands for and nothing here decides anything about plans.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx

from autoremat.basics.errors import BudgetWarning
from autoremat.planner.memory.wrapper_replay import ReplayContext, replay_peak
from autoremat.torch_private.hooks import Method, hooked
from autoremat.torch_private.symbolic_sizes import most_of_expression


@dataclass(frozen=True)
class LoweredPeak:
    """The peak of one lowered graph, in bytes: what it allocates and, for a backward, what it was handed."""

    is_backward: bool
    peak_bytes: int
    is_estimate: bool = False
    """Whether the code could not be replayed."""


def _layout_bytes(buffer: Any) -> int:
    """Bytes of a buffer of Inductor's; 0 for what holds several results or none."""
    from torch._inductor.virtualized import V

    try:
        layout = buffer.get_layout()
        return most_of_expression(layout.storage_size(), V.graph.sizevars) * int(layout.dtype.itemsize)
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


def _lowered_peak(lowering: Any, source: str, known: ReplayContext) -> LoweredPeak:
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

        replayed = replay_peak(source, counted, buffer_bytes, held, known.allocation_bytes, known.workspaces)
        peak = _scheduled_peak(lowering, held) if replayed is None else replayed
        if lowering.is_backward:  # forward outputs that the backward does not read are alive all the same
            peak += sum(size for name, size in known.held.items() if name not in lowering.graph_inputs)
        return LoweredPeak(bool(lowering.is_backward), peak + known.code_headroom_bytes, replayed is None)


def _pin_order(scheduler: Any) -> None:
    """Keep the graph's order between extern kernels, and templates of such: fusion may merge what stands between two of them,
    but move nothing past one. Otherwise the scheduler computes what the plan recomputes late together with what it computes
    early, because both read the same buffer."""
    from torch._inductor import ir
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    def after(node: Any, earlier: Any) -> None:
        # Orders the two and keeps no buffer alive. The graph's own `additional_buffer_deps` would also make the node a
        # user of the buffer. A buffer that has such a user, or that is read in two ways, is not written in place.
        read = {dependency.name for dependency in node.read_writes.reads}
        for name in earlier.get_buffer_names() - read:
            node.add_fake_dep(WeakDep(name, node.get_name(), is_fake=True))

    barrier: Any = None
    window: list[Any] = []
    for node in scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
            continue
        if barrier is not None:
            after(node, barrier)
        # Autotuning makes templates of matrix products and attention: kernels that Inductor writes itself.
        if isinstance(node, ExternKernelSchedulerNode) or node.is_template():
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

    def compute_and_pin(compute: Method, scheduler: Any) -> None:
        compute(scheduler)
        if wanted() and V.graph.is_backward:
            _pin_order(scheduler)

    def generate_compactly(generate: Method, lowering: Any) -> Any:
        with inductor_config.patch({"allow_buffer_reuse": False} if wanted() else {}):
            return generate(lowering)

    with (
        hooked(Scheduler, "compute_dependencies", compute_and_pin),
        hooked(GraphLowering, "codegen", generate_compactly),
    ):
        yield


def chooses_layouts_of_gradients() -> bool:
    """Whether this version of Inductor lays out what the gradient of a convolution reads; earlier ones leave it as it is."""
    from torch._inductor.kernel import conv

    return hasattr(conv, "convolution_backward_lowering")


@contextlib.contextmanager
def rewriting_before_lowering(rewrite: Callable[[fx.Graph], None]) -> Iterator[None]:
    """While active, ``rewrite`` changes each FX graph in place just before Inductor lowers it."""
    from torch._inductor.graph import GraphLowering

    def rewrite_and_run(run: Method, lowering: Any, *arguments: Any) -> Any:
        rewrite(lowering.module.graph)
        return run(lowering, *arguments)

    with hooked(GraphLowering, "run", rewrite_and_run):
        yield


@contextlib.contextmanager
def draws_by_place(patches: Mapping[str, Any]) -> Iterator[None]:
    """While active, a random number in this thread's kernels depends on its seed and its place alone.

    Torch 2.13 and later can draw four numbers at once in CUDA kernels over one dimension. Kernels over two dimensions draw
    others for the same seed, so a mask that the backward draws again would not be the forward's. ``patches`` are the settings
    of Inductor that the compilation has beside the global ones.
    """
    from torch._inductor.codegen.triton import TritonOverrides

    method = "_can_use_4x_random"
    if not hasattr(TritonOverrides, method):
        yield
        return
    if patches.get("use_rand4x", getattr(inductor_config, "use_rand4x", False)):
        warnings.warn(
            "use_rand4x has no effect on what this backend compiles: kernels of different shapes would draw different numbers "
            "for the same seed, and a recomputed dropout another mask. Leave the setting off here",
            BudgetWarning,
            stacklevel=2,
        )

    with hooked(TritonOverrides, method, lambda _: False):
        yield


@contextlib.contextmanager
def observe_lowering(known: Callable[[], ReplayContext], observer: Callable[[LoweredPeak], None]) -> Iterator[None]:
    """Call ``observer`` with every whole training graph that Inductor generates code for in this thread, before any of its
    kernels is compiled. What ``observer`` raises ends the compilation."""
    from torch._inductor.graph import GraphLowering, SubgraphLowering

    def generate_and_observe(generate: Method, lowering: Any) -> Any:
        generated = generate(lowering)
        if not isinstance(lowering, SubgraphLowering) and not lowering.is_inference:
            source = str(getattr(generated[0], "value", ""))
            observer(_lowered_peak(lowering, source, known()))
        return generated

    with hooked(GraphLowering, "codegen", generate_and_observe):
        yield


def _not_compiled(*_: Any, **__: Any) -> Any:
    raise RuntimeError("code was generated and its kernels were not compiled")


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Inductor generates all code and compiles no kernel: what it returns cannot be called, and no cache keeps it."""
    from torch._inductor.graph import GraphLowering

    def only_generated(_: Method, lowering: Any) -> Any:
        lowering.codegen()
        # Where CUDA graphs are asked for, Inductor wraps each partition of the code that it has loaded.
        runner = types.SimpleNamespace(recursively_apply_fns=lambda _: None, partitions=[])
        return types.SimpleNamespace(call=_not_compiled, runner=runner, __file__="")

    with (
        functorch_config.patch({"enable_autograd_cache": False}),
        inductor_config.patch({"fx_graph_cache": False, "fx_graph_remote_cache": False}),
        hooked(GraphLowering, "compile_to_module", only_generated),
    ):
        yield
