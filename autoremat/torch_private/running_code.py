"""Torch's private names for the code of halves: tells which statement runs, while asked to.

The functions of generated code, and of FX graphs that run uncompiled, get a call before each of their statements. Their code is
exchanged in place: they run in threads of torch's own, which Python's tracers do not see.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import fx

from autoremat.planner.memory.allocations import Kernel
from autoremat.planner.memory.code_places import START, places_in
from autoremat.torch_private.origins import OP

NOTE = "autoremat_note_place"
"""The global name by which exchanged code calls ``note``."""

uncompiled: weakref.WeakSet[fx.GraphModule] = weakref.WeakSet()
"""The graphs that run uncompiled."""


@contextlib.contextmanager
def noting_places(note: Callable[[str], None]) -> Iterator[None]:
    """Calls ``note`` with the place of each statement before it runs, and with line 0 where a function begins, while active."""
    exchanged: list[tuple[FunctionType, CodeType]] = []
    try:
        for function, source in [*_generated(), *_uncompiled()]:
            before = function.__code__
            function.__globals__[NOTE] = note
            function.__code__ = _with_notes(before, source)
            exchanged.append((function, before))
        yield
    finally:
        for function, before in exchanged:
            function.__code__ = before
            function.__globals__.pop(NOTE, None)


def _generated() -> Iterator[tuple[FunctionType, str]]:
    """Yields the functions that Inductor generated and this process has loaded, with the source of their file."""
    if "torch._inductor.codecache" not in sys.modules:
        return
    from torch._inductor.codecache import PyCodeCache

    for module in {id(one): one for one in PyCodeCache.modules}.values():
        scopes = [vars(module), *(vars(one) for one in vars(module).values() if isinstance(one, type))]
        functions = {id(one): one for scope in scopes for one in scope.values() if isinstance(one, FunctionType)}
        own = [one for one in functions.values() if one.__code__.co_filename == module.__file__ and _runs(one.__name__)]
        source = Path(module.__file__ or "").read_text() if own else ""
        yield from ((one, source) for one in own)


def _runs(name: str) -> bool:
    return name == "call" or name.startswith("partition_")


def _uncompiled() -> Iterator[tuple[FunctionType, str]]:
    """Yields the functions of the graphs that run uncompiled, with their source."""
    for graph in uncompiled:
        forward: Any = type(graph).forward
        yield forward, graph.code


def kernels_of(graph: fx.GraphModule) -> tuple[Kernel, ...]:
    """Returns the calls of a graph that runs uncompiled which compute the planner's ops, in sequence."""
    tree, place = ast.parse(graph.code), places_in(graph.code)
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    lines = {ast.unparse(node.targets[0]): node.lineno for node in reversed(assigned)}  # later ones free: `x = None`
    made = ((node.meta.get(OP), lines.get(node.name)) for node in graph.graph.nodes)
    return tuple(Kernel(op.name, None, place(line)) for op, line in made if op is not None and line is not None)


def _with_notes(code: CodeType, source: str) -> CodeType:
    """Returns ``code`` with a call before each statement; ``code`` itself unless ``source`` is the text that it is made of."""
    tree, place = ast.parse(source), places_in(source)
    plain = compile(tree, code.co_filename, "exec", dont_inherit=True)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.With, ast.If, ast.For)):
            node.body = [one for statement in node.body for one in (_note(place(statement.lineno), statement), statement)]
        if isinstance(node, ast.FunctionDef):
            node.body.insert(0, _note(place(START), node.body[0]))
    noted = compile(tree, code.co_filename, "exec", dont_inherit=True)
    pairs = zip(_with_nested(plain), _with_nested(noted), strict=True)
    return next((changed for same, changed in pairs if same == code), code)


def _note(place: str, at: ast.stmt) -> ast.stmt:
    """Returns the statement that notes ``place``, at the line of another statement."""
    call = ast.Expr(ast.Call(ast.Name(NOTE, ast.Load()), [ast.Constant(place)], []))
    return ast.fix_missing_locations(ast.copy_location(call, at))


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    """Yields ``code`` and the code of the functions and classes inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
