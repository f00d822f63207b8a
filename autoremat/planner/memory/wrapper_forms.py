"""Joins the parts of the code that Inductor generates for CUDA graphs to one sequence of statements with the same allocations.

For CUDA graphs, Inductor writes each part that a CUDA graph can record as a function. ``Runner.call`` calls the parts, and runs
the code between them itself:

    partition0_args = [buf0, primals_1]
    del buf0
    (buf1, primals_1) = self.partitions[0](partition0_args)
    del partition0_args

A CUDA graph reads its inputs at fixed addresses. So it copies those that can move, before it runs (``copied``).
"""

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Sequence

COPIED = "copied"
"""Name of the function in the joined statements that returns a copy, or its argument if its address is fixed."""

ARGUMENTS = re.compile(r"partition(\d+)_args")
PARTITION = re.compile(r"partition_(\d+)")
MARK = " in partition "
"""Separates the name of a partition's variable from the partition's number. It cannot be in a name of Python."""


def is_in_partition(name: str) -> bool:
    """Returns True if ``name`` is a variable of a partition."""
    return MARK in name


def name_in_code(name: str) -> str:
    """Returns the variable's name in the generated code."""
    return name.partition(MARK)[0]


def joined(statements: Sequence[ast.stmt], partitions: Mapping[int, Sequence[ast.stmt]]) -> list[ast.stmt] | None:
    """Returns ``statements`` with the statements of the partitions that they call in place of the calls.

    Returns None if they do not call each partition once.
    """
    calls = [number for s in statements if isinstance(s, ast.Assign) and (number := _called(s.value)) is not None]
    if sorted(calls) != sorted(partitions):
        return None
    return [part for statement in statements for part in _joined(statement, partitions)]


def _joined(statement: ast.stmt, partitions: Mapping[int, Sequence[ast.stmt]]) -> Iterator[ast.stmt]:
    """Yields ``statement``, or the statements in its place if it passes arguments to a partition or calls one."""
    if not isinstance(statement, ast.Assign):
        yield statement
        return
    target, value = statement.targets[0], statement.value
    arguments = ARGUMENTS.fullmatch(_name(target))
    if arguments and isinstance(value, ast.List):
        number = int(arguments[1])
        # The list of arguments holds them, although the caller deletes its own names before the call.
        for parameter, argument in zip(_parameters(partitions[number]), value.elts, strict=True):
            yield _assigned(f"{parameter}{MARK}{number}", ast.Name(_name(argument), ast.Load()))
    elif (called := _called(value)) is not None:
        yield from _run(partitions[called], _names(target), called)
    else:
        yield statement


def copies_of_inputs(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Returns ``statements`` of a whole graph that one CUDA graph records, with the copies of its inputs."""
    for place, statement in enumerate(statements):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name) and statement.value.id == "args":
            names = _names(statement.targets[0])
            return [*statements[: place + 1], *_copies(names), *statements[place + 1 :]]
    return list(statements)


def _name(expression: ast.expr) -> str:
    return expression.id if isinstance(expression, ast.Name) else ""


def _names(target: ast.expr) -> list[str]:
    return [_name(x) for x in target.elts] if isinstance(target, ast.Tuple) else [_name(target)]


def _called(value: ast.expr) -> int | None:
    """Returns the number of the partition that ``self.partitions[number](...)`` calls; None for other expressions."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Subscript) and isinstance(value.func.slice, ast.Constant):
        return int(ast.unparse(value.func.slice)) if ast.unparse(value.func.value) == "self.partitions" else None
    return None


def _parameters(body: Sequence[ast.stmt]) -> list[str]:
    """Returns the names to which a partition's first statement, ``a, b = args``, binds its arguments."""
    first = body[0]
    return _names(first.targets[0]) if isinstance(first, ast.Assign) and _name(first.value) == "args" else []


def _assigned(target: str, value: ast.expr) -> ast.stmt:
    """Returns an assignment that no line of the generated code has."""
    return ast.Assign([ast.Name(target, ast.Store())], value, lineno=0)


def _deleted(names: Sequence[str]) -> ast.stmt:
    return ast.Delete([ast.Name(name, ast.Del()) for name in names])


def _copies(names: Sequence[str]) -> Iterator[ast.stmt]:
    """Yields the copies of inputs. All of them are allocated before the first original is freed."""
    for name in names:
        call = ast.Call(ast.Name(COPIED, ast.Load()), [ast.Name(name, ast.Load())], [])
        yield _assigned(f"{name}{MARK}copies", call)
    for name in names:
        yield _assigned(name, ast.Name(f"{name}{MARK}copies", ast.Load()))
        yield _deleted([f"{name}{MARK}copies"])


def _run(body: Sequence[ast.stmt], targets: Sequence[str], number: int) -> Iterator[ast.stmt]:
    """Yields the statements of a call: copies of the arguments, the body, the results, and the end of all variables."""
    variables = frozenset(
        node.id for s in body for node in ast.walk(s) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    yield from _copies([f"{parameter}{MARK}{number}" for parameter in _parameters(body)])
    results: list[ast.expr] = []
    for statement in body[1:]:
        marked = copy.deepcopy(statement)
        for node in ast.walk(marked):
            if isinstance(node, ast.Name) and node.id in variables:
                node.id = f"{node.id}{MARK}{number}"
        if isinstance(marked, ast.Return):
            results = marked.value.elts if isinstance(marked.value, ast.Tuple) else []
        else:
            yield marked
    for target, result in zip(targets, results, strict=False):
        yield ast.Assign([ast.Name(target, ast.Store())], result)
    yield _deleted([f"{variable}{MARK}{number}" for variable in sorted(variables)])
