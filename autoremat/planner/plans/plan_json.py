"""Converts graphs and schedules to strict JSON and back.

Nothing in a file is executed or trusted: types and numbers are checked. A table is a list of columns and a list of rows.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from autoremat.planner.graph.graph import Graph, Op, Value
from autoremat.planner.graph.schedule import Schedule

LONGEST = 10_000
"""Executions that a schedule may have in any case. Above that, the limit is the square of the number of ops. A chain that holds
one value at a time needs about that number."""


OLD_NAMES = {
    "order": "constraint",
    "insists": "demanded",
    "traffic_seconds": "memory_bound_seconds",
    "pinned": "must_run",
    "whole_runs": "fusion_groups_hold_buffers",
    "CHOOSES": "DISCONTINUOUS",
    "UNDECLARED": "OPAQUE",
}
"""Present names of fields and traits by their names in files of version 2."""


def encode(graph: Graph, schedule: Schedule) -> dict[str, Any]:
    """Returns ``graph`` and ``schedule`` as JSON data; :func:`decode` reads them back."""
    scalars = (f.name for f in dataclasses.fields(Graph) if f.name not in ("ops", "values"))
    return {
        "forward": schedule.forward,
        "backward": schedule.backward,
        "graph": {name: getattr(graph, name) for name in scalars}
        | {"ops": _table(Op, graph.ops), "values": _table(Value, graph.values)},
    }


def decode(record: dict[str, Any]) -> tuple[Graph, Schedule]:
    """Returns the graph and the schedule that :func:`encode` wrote.

    Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``IndexError`` on anything else.
    """
    graph = _graph(record["graph"])
    return graph, _schedule(record, graph)


def _table(kind: type, items: Sequence[Any]) -> dict[str, Any]:
    """Returns dataclass instances as a list of columns and a list of rows."""
    columns = [f.name for f in dataclasses.fields(kind)]
    return {"columns": columns, "rows": [[_plain(getattr(item, name)) for name in columns] for item in items]}


def _plain(value: Any) -> Any:
    """Returns the value of a field of Graph, Op or Value as JSON data; :func:`reader_of` returns the inverse."""
    if isinstance(value, enum.Flag):
        return [flag.name for flag in type(value) if flag in value and flag.value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, one.name)) for one in dataclasses.fields(value)]
    return value


def _printable(text: str) -> str:
    """Returns ``text`` without characters that would steer a terminal."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def _graph(record: dict[str, Any]) -> Graph:
    """Returns the graph of a record. Raises ``ValueError`` for a number of an op or value that does not exist."""
    ops, values = _items(Op, record["ops"]), _items(Value, record["values"])
    record = {OLD_NAMES.get(name, name): value for name, value in record.items()}
    scalars = (name for name in get_type_hints(Graph) if name not in ("ops", "values"))
    given = {name: reader_of(get_type_hints(Graph)[name])(record[name]) for name in scalars}
    for op in ops:
        _within((*op.inputs, *op.outputs), len(values), "value")
    _within([v.producer for v in values if v.producer is not None], len(ops), "op")
    _within((*given["forward_outputs"], *given["backward_outputs"]), len(values), "value")
    _within(given["must_run"], len(ops), "op")
    return Graph(ops=ops, values=values, **given)


def _schedule(record: dict[str, Any], graph: Graph) -> Schedule:
    """Returns the schedule of a record. Raises ``ValueError`` for an op that does not exist and for too many executions."""
    halves = [reader_of(tuple[int, ...])(record[half]) for half in ("forward", "backward")]
    executions, longest = sum(map(len, halves)), max(LONGEST, len(graph.ops) ** 2)
    if executions > longest:
        raise ValueError(f"{executions} executions of {len(graph.ops)} ops are more than {longest}, which no plan needs")
    _within((*halves[0], *halves[1]), len(graph.ops), "op")
    return Schedule(*halves)


def _items(kind: type, table: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the instances of ``kind`` in a table. Raises ``ValueError`` if the columns are not the fields of ``kind``."""
    hints = get_type_hints(kind)
    columns = [OLD_NAMES.get(name, name) for name in table["columns"]]
    if sorted(columns) != sorted(hints):
        raise ValueError(f"the columns are {columns}, expected {list(hints)}")
    readers = [reader_of(hints[name]) for name in columns]
    rows = ([read(cell) for read, cell in zip(readers, row, strict=True)] for row in table["rows"])
    return tuple(kind(**dict(zip(columns, row, strict=True))) for row in rows)


def _within(numbers: Sequence[int], count: int, what: str) -> None:
    """Raises ``ValueError`` unless all ``numbers`` are below ``count``."""
    if beyond := [n for n in numbers if n >= count]:
        raise ValueError(f"there is no {what} {beyond[0]}: there are {count}")


def _of_type(kind: type | types.UnionType, what: str) -> Callable[[Any], Any]:
    """Returns a function that returns its argument if that is a ``kind``, and else raises ``ValueError``.

    Numbers must be finite and >= 0; a bool is no number.
    """

    def read(value: Any) -> Any:
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not fits or (isinstance(value, int | float) and not 0 <= value < math.inf):
            raise ValueError(f"{value!r} is no {what}")
        return value

    return read


_SCALARS: dict[type, Callable[[Any], Any]] = {
    str: lambda value: _printable(_of_type(str, "text")(value)),
    bool: _of_type(bool, "truth value"),
    int: _of_type(int, "whole number >= 0"),
    float: _of_type(int | float, "finite number >= 0"),
}


@cache
def reader_of(kind: Any) -> Callable[[Any], Any]:
    """Returns a function from JSON data to the value of a field declared as ``kind``.

    It raises ``ValueError`` for other data.
    """
    if kind in _SCALARS:
        return _SCALARS[kind]
    if get_origin(kind) is tuple:
        item, is_list = reader_of(get_args(kind)[0]), _of_type(list, "list")
        return lambda value: tuple(item(one) for one in is_list(value))
    if get_origin(kind) is types.UnionType:
        inner = reader_of(next(one for one in get_args(kind) if one is not types.NoneType))
        return lambda value: None if value is None else inner(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        readers = [reader_of(hint) for hint in get_type_hints(kind).values()]
        return lambda value: kind(*(read(one) for read, one in zip(readers, value, strict=True)))
    if issubclass(kind, enum.Flag):
        return lambda value: _flags(kind, value)
    return lambda value: kind(value)


def _flags(kind: type[enum.Flag], names: list[str]) -> enum.Flag:
    """Returns the combination of the flags called ``names``, of which old names are translated."""
    found = kind(0)
    for name in names:
        found |= kind[OLD_NAMES.get(name, name)]
    return found
