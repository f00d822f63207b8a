"""Computes the peak of the code that Inductor generated, by a replay of its allocations.

Inductor's output for a graph is a Python function ``call(args)``. It allocates buffers by name, runs kernels on them, rebinds
names where it reuses memory, and deletes names after their last use. The replay follows only those statements, over an abstract
heap. This gives the live bytes at each statement, with in-place reuse, buffer pools and extern kernels. No generated code is
executed. Code that is split for CUDA graphs is joined first (:mod:`autoremat.planner.memory.wrapper_forms`).

CUDA graphs keep their memory in a pool, which never gives memory back. So the pool and the memory outside of it have peaks of
their own, and code needs the sum of both.
"""

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoremat.planner.memory.allocations import HalfAllocations
from autoremat.planner.memory.wrapper_forms import COPIED, PARTITION, copies_of_inputs, is_in_partition, joined, name_in_code
from autoremat.planner.memory.wrapper_heap import (
    COPY_FROM_HOST,
    COPY_TO_HOST,
    WAIT_FOR_COPY_TO_HOST,
    WORKSPACE,
    Heap,
    aliased,
    called_function,
    calls_op,
    is_planar,
    strided_bytes,
)

INPUT_PREFIXES = ("primals_", "fwd_rng_state", "bwd_rng_state")


@dataclass(frozen=True)
class ReplayedPeak:
    """The most bytes that are live while code runs: in the pool of CUDA graphs, and outside of it."""

    pool_bytes: int
    other_bytes: int
    allocations: HalfAllocations = field(default=HalfAllocations(()), compare=False, repr=False)
    """The allocations in sequence. Names of results are those of the code."""


@dataclass(frozen=True)
class ReplayContext:
    """The facts about a graph that the replay of its code needs.

    - ``held``: bytes of forward outputs by name. The caller holds them, so the code cannot free them.
    - ``allocation_bytes``: granularity of the allocator.
    - ``workspaces``: workspace bytes by ATen op name and bytes of the results, for nodes that Inductor creates itself.
    - ``code_headroom_bytes``: further bytes that the code may allocate at any time.
    - ``input_strides``: strides of the step's inputs, where known.
    - ``device_type``: type of the device whose memory counts.
    - ``copied_inputs``: bytes by name of the step's inputs that CUDA graphs copy into their memory, because the addresses can
      change. None without CUDA graphs.
    - ``aliases``: for each tensor that the backward receives as a view, the one whose memory it shares: an input of the step,
      or another tensor that the backward receives. Torch's own partition saves views.
    """

    held: Mapping[str, int] = field(default_factory=dict)
    allocation_bytes: int = 1
    workspaces: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    code_headroom_bytes: int = 0
    input_strides: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    copied_inputs: Mapping[str, int] | None = None
    device_type: str = "cpu"
    aliases: Mapping[str, str] = field(default_factory=dict)

    def is_input(self, name: str, strides: tuple[object, ...]) -> bool:
        """Returns True if the backward's input ``name`` is an input of the step.

        It is not one if the forward saved a copy of the input: one in another layout, or the copy that a CUDA graph reads.
        """
        if self.aliases.get(name, "").startswith(INPUT_PREFIXES):
            return True
        is_copied = name in (self.copied_inputs or {})
        return name.startswith(INPUT_PREFIXES) and not is_copied and self.input_strides.get(name, strides) == strides


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields all statements in sequence, with the bodies of ``with``, ``if`` and ``for`` in place."""
    for statement in body:
        yield statement
        for block in ("body", "orelse"):
            yield from _statements(getattr(statement, block, []))


def _code(source: str, has_cuda_graphs: bool) -> tuple[list[ast.stmt] | None, Callable[[str], bool]]:
    """Returns the statements of the generated ``call`` and of the partitions that it calls; None for unknown code.

    The second result is a function that returns True for a variable whose allocation a CUDA graph records.
    """
    nothing, everything = (lambda _: False), (lambda _: True)
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    call = next((list(_statements(f.body)) for f in functions if f.name == "call"), None)
    numbered = [(match, f) for f in functions if (match := PARTITION.fullmatch(f.name))]
    partitions = {int(match[1]): list(_statements(f.body)) for match, f in numbered}
    if call is None:
        return None, nothing
    if partitions:
        return joined(call, partitions), is_in_partition if has_cuda_graphs else nothing
    return (copies_of_inputs(call), everything) if has_cuda_graphs else (call, nothing)


HOST_BUFFER = "empty_strided_cpu"
NO_MEMORY = ast.Constant(None)


def _unpackings(statements: list[ast.stmt]) -> dict[str, list[str]]:
    """Returns, for each name bound to the results of a call, the names that take one of them each.

    Such statements are ``buf7 = buf6[1]``, ``buf7 = buf6[0][1]`` and ``buf7 = buf6``.
    """
    found: dict[str, list[str]] = {}
    made = set()
    for statement in statements:
        if not isinstance(statement, ast.Assign):
            continue
        target, value = statement.targets[0], statement.value
        if isinstance(value, ast.Call) and isinstance(target, ast.Name) and aliased(value) is None:
            made.add(target.id)
        source = value
        while isinstance(source, ast.Subscript):
            source = source.value
        if isinstance(target, ast.Name) and isinstance(source, ast.Name) and (source is not value or source.id in made):
            found.setdefault(source.id, []).append(target.id)
    return found


def replay(
    source: str,
    input_bytes: Mapping[str, int],
    buffer_bytes: Callable[[str], int],
    held: Collection[str] = (),
    round_to: int = 1,
    workspaces: Mapping[str, Mapping[int, int]] | None = None,
    copied: Mapping[str, int] | None = None,
    device_type: str = "cpu",
    results: Callable[[str], Sequence[str]] = lambda _: (),
    workspace_of: Callable[[str], int | None] = lambda _: None,
) -> ReplayedPeak | None:
    """Returns the most bytes live while ``source`` runs, or None if the code has an unknown form.

    - ``input_bytes``: bytes by name of the inputs that count (saved activations), of which those ``held`` are never freed.
    - ``buffer_bytes(name)``: returns the size of a buffer that an extern kernel allocates.
    - ``results(name)``: returns the buffers of all results of the call that ``name`` is bound to. The code names only the ones
      that it reads; the others live until it deletes ``name``.
    - ``workspace_of(name)``: returns the workspace of the graph's node whose kernel writes a buffer, or None if it is unknown.

    The other arguments are fields of :class:`ReplayContext`.
    """
    statements, is_recorded = _code(source, copied is not None)
    if statements is None:
        return None
    parts, on_host = _unpackings(statements), _on_host(statements)
    heap = Heap(round_to, is_recorded)
    for name, size in input_bytes.items():
        is_result = copied is not None and name not in copied  # of a recorded forward
        heap.allocate(0 if name in on_host else size, name, *(["(caller)"] if name in held else []), in_pool=is_result)
    for statement in statements:
        before = heap.live_bytes
        if isinstance(statement, ast.Delete):
            for name in [target.id for target in statement.targets if isinstance(target, ast.Name)]:
                heap.release(name)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value = statement.targets[0].id, statement.value
            if called_function(value) == COPIED:
                _copy(heap, name, value, copied)
            else:
                is_on_host = device_type != "cpu" and called_function(value).startswith(HOST_BUFFER)
                value = NO_MEMORY if is_on_host or calls_op(value, COPY_TO_HOST) else value
                _assign(heap, name, value, _shares(name, parts, results), lambda name: buffer_bytes(name_in_code(name)))
        if isinstance(statement, (ast.Assign, ast.Expr)):
            made = heap.live_bytes - before or _written(statement.value, heap)
            own = workspace_of(name_in_code(_written_buffer(statement)))
            needed = _workspace_by_name(statement.value, made, workspaces or {}) if own is None else own
            _use_workspace(heap, statement, needed + _reordered(statement.value, heap))
    return ReplayedPeak(heap.peak[True], heap.peak[False], _allocations(heap, input_bytes, statements))


def _use_workspace(heap: Heap, statement: ast.stmt, size: int) -> None:
    if size:
        names = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
        heap.allocate(size, WORKSPACE, in_pool=any(map(heap.is_recorded, names)), round_to=1)
        heap.release(WORKSPACE)


def _on_host(statements: Sequence[ast.stmt]) -> set[str]:
    """Returns the names of the tensors on the host that the statements copy to the device, or whose copy they wait for."""
    values = (statement.value for statement in statements if isinstance(statement, ast.Assign))
    calls = [value for value in values if isinstance(value, ast.Call)]
    return {
        aliased(call.args[0]) or "" for call in calls if calls_op(call, COPY_FROM_HOST) or calls_op(call, WAIT_FOR_COPY_TO_HOST)
    }


def _shares(name: str, parts: Mapping[str, list[str]], results: Callable[[str], Sequence[str]]) -> list[tuple[str, str | None]]:
    """Returns the buffer of each result of the call that ``name`` is bound to, and the variable that takes it, if any."""
    taken = {name_in_code(part): part for part in parts.get(name, ())}
    return [(buffer, taken.get(buffer)) for buffer in dict.fromkeys([*results(name_in_code(name)), *taken])]


def _allocations(heap: Heap, arguments: Iterable[str], statements: Sequence[ast.stmt]) -> HalfAllocations:
    """Returns the allocations of a half, with its arguments and the results that its last statement returns."""
    value = next((one.value for one in reversed(statements) if isinstance(one, ast.Return)), None)
    names = [aliased(one) or "" for one in value.elts] if isinstance(value, ast.Tuple) else []
    results = [(name, number) for name in names for number in sorted(heap.names.get(name, ())) if heap.sizes[number]]
    received = [(name, number) for number, name in enumerate(arguments) if heap.sizes[number]]
    return HalfAllocations(tuple(heap.events), frozenset(heap.pooled), tuple(received), tuple(results))


def _copy(heap: Heap, name: str, value: ast.expr, copied: Mapping[str, int] | None) -> None:
    """Applies ``name = copied(original)``. Without CUDA graphs nothing is copied."""
    assert isinstance(value, ast.Call)
    original = ast.unparse(value.args[0])
    if copied is None:
        heap.alias(name, original)
    else:
        heap.copy(name, original, copied.get(name_in_code(original), 0))


def _reordered(value: ast.expr, heap: Heap) -> int:
    """Returns the bytes that oneDNN copies for the backward of a convolution of planar images: the images and the gradient."""
    if not (isinstance(value, ast.Call) and "convolution_backward" in ast.unparse(value.func)):
        return 0
    images = [argument.id for argument in value.args[:2] if isinstance(argument, ast.Name)]
    return sum(map(heap.bytes_of, images)) if heap.planar.intersection(images) else 0


def _written(value: ast.expr, heap: Heap) -> int:
    """Returns the bytes of the buffer to which a call writes its result (``out=buf3``)."""
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return sum(heap.bytes_of(k.value.id) for k in keywords if k.arg == "out" and isinstance(k.value, ast.Name))


def _written_buffer(statement: ast.Assign | ast.Expr) -> str:
    """Returns the name of the buffer that an extern kernel returns or writes (``out=buf3``); an empty text without one."""
    value = statement.value
    if not isinstance(value, ast.Call) or aliased(value) is not None or strided_bytes(value) is not None:
        return ""
    if isinstance(statement, ast.Assign):
        return ast.unparse(statement.targets[0])
    return next((aliased(k.value) or "" for k in value.keywords if k.arg == "out"), "")


def _workspace_by_name(value: ast.expr, made: int, workspaces: Mapping[str, Mapping[int, int]]) -> int:
    """Returns the workspace of the called function, for results of ``made`` bytes. The text alone does not name the node."""
    if not isinstance(value, ast.Call):
        return 0
    attributes = {n.attr for n in ast.walk(value.func) if isinstance(n, ast.Attribute)}
    sizes = next((sizes for name, sizes in workspaces.items() if name in attributes), {})
    # ``made`` may lack results whose buffers are unknown. So take the next larger call, or the largest of all. If ``made`` is
    # 0, the call writes to existing buffers and may be any of them.
    larger = [results for results in sizes if results >= made > 0]
    return sizes[min(larger)] if larger else max(sizes.values(), default=0)


def _assign(
    heap: Heap, name: str, value: ast.expr, shares: Sequence[tuple[str, str | None]], buffer_bytes: Callable[[str], int]
) -> None:
    """Applies the assignment of ``value`` to ``name``: an alias, an unpacking or an allocation.

    ``shares`` are the results of a call, each with the variable that takes it.
    """
    other = aliased(value)
    if other is not None:
        planar = is_planar(value) or (isinstance(value, ast.Name) and other in heap.planar)
        (heap.planar.add if planar else heap.planar.discard)(name)
        heap.alias(name, other)
    elif isinstance(value, ast.Subscript):
        return  # an unpacking: its storage was allocated with the call
    elif (size := strided_bytes(value)) is not None:
        heap.release(name)
        heap.allocate(size, name)
        (heap.planar.add if is_planar(value) else heap.planar.discard)(name)
    elif value is NO_MEMORY:
        heap.release(name)
    elif isinstance(value, ast.Call):
        heap.release(name)
        own = buffer_bytes(name)
        if own:
            heap.allocate(own, name)
            return
        for buffer, taker in shares:  # a call with several results has no storage of its own
            heap.allocate(buffer_bytes(buffer), name, *([] if taker is None else [taker]))
