"""Torch's private names for a rehearsal: a joint graph is compiled in torch's own way before it is compiled for good.

Both compilations begin with AOTAutograd's one trace, and with what Inductor's passes make of it.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from autoremat.torch_private.fake_tensors import copied_module
from autoremat.torch_private.hooks import Method, held, hooked, present_hooks, substituted

Rehearse = Callable[[Callable[[], None]], fx.GraphModule | None]


@contextlib.contextmanager
def rehearsed(rehearse: Rehearse) -> Iterator[None]:
    """Calls ``rehearse(compile_copy)`` before the first joint graph of this thread is partitioned, while active.

    ``compile_copy()`` partitions a copy of it, and compiles both halves. Hooks that begin between this one and ``rehearse`` do
    not act there. ``rehearse`` returns the joint graph as Inductor's passes left it; None to run these passes again.
    """
    from torch._functorch._aot_autograd import graph_compile
    from torch._inductor import compile_fx

    outside = present_hooks()
    settings: list[Any] = []
    pending = [rehearse]

    def note(create: Method, *arguments: Any) -> Any:
        settings.append(create(*arguments))
        return settings[-1]

    def begin(compile_halves: Method, state: Any, capture: Any, *compilers: Any) -> Any:
        def compile_copy() -> None:
            compile_halves(*_copied(state, capture), *compilers)

        if not pending:
            return compile_halves(state, capture, *compilers)
        boxes = [box for one in settings for box in vars(one).values() if hasattr(box, "value")]
        values = [box.value for box in boxes]
        with held(*outside):
            passed = pending.pop()(compile_copy)
        for box, value in zip(boxes, values, strict=True):  # halves write what they need of CUDA graphs there
            box.value = value
        known: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if passed is not None:
            known = substituted(compile_fx, "_recursive_joint_graph_passes", lambda *_, **__: passed)
        with known:
            return compile_halves(state, capture, *compilers)

    with (
        hooked(compile_fx, "create_compiler_config_extra", note),
        hooked(graph_compile, "aot_stage2_autograd", begin),
    ):
        yield


def _copied(state: Any, capture: Any) -> tuple[Any, Any]:
    """Returns copies of AOTAutograd's state and capture, of which one compilation changes nothing that the other one reads."""
    subclasses = copy.copy(capture.maybe_subclass_meta)
    if subclasses is not None:
        subclasses.fw_metadata = _copied_lists(subclasses.fw_metadata)
    inputs = capture.updated_flat_args
    return (
        replace(
            state,
            flat_args=list(state.flat_args),
            fw_metadata=_copied_lists(state.fw_metadata),
            aot_config=replace(state.aot_config, cache_info=None, enable_log=False),
        ),
        replace(
            capture,
            graph_module=_with_regions(capture.graph_module),
            updated_flat_args=tuple(map(list, inputs)) if isinstance(inputs, tuple) else list(inputs),
            maybe_subclass_meta=subclasses,
        ),
    )


def _with_regions(module: fx.GraphModule) -> fx.GraphModule:
    copied = copied_module(module)
    for name, nested in copied.named_children():
        if isinstance(nested, fx.GraphModule):
            setattr(copied, name, _with_regions(nested))
    return copied


def _copied_lists(metadata: Any) -> Any:
    copied = copy.copy(metadata)
    for name, value in vars(metadata).items():
        if isinstance(value, list | dict):
            setattr(copied, name, value.copy())
    return copied
