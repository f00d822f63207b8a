"""Converts graphs and schedules to strict JSON and back.

Nothing in a file is executed or trusted: types and numbers are checked. A table is a list of columns and a list of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_type_hints

from autoremat.basics.codec import Codec, plain
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Op, Value
from autoremat.planner.graph.schedule import Schedule

LONGEST = 10_000
"""Executions that a schedule may have in any case. Above that, the limit is the square of the number of ops. A chain that holds
one value at a time needs about that number."""

CODEC = Codec()


def encode(graph: Graph, schedule: Schedule) -> dict[str, Any]:
    """Returns ``graph`` and ``schedule`` as JSON data; :func:`decode` reads them back."""
    scalars = (f.name for f in dataclasses.fields(Graph) if f.name not in ("ops", "values") and not _is_later(f.name, graph))
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


LATER = {f.name: f.default for f in dataclasses.fields(Graph) if f.name in ("in_flight", "resident_bytes")}
"""Fields of a graph that plans of one call at a time do not have, with the values that they stand for."""


def _is_later(name: str, graph: Graph) -> bool:
    return name in LATER and getattr(graph, name) == LATER[name]


def _table(kind: type, items: Sequence[Any]) -> dict[str, Any]:
    """Returns dataclass instances as a list of columns and a list of rows."""
    columns = [f.name for f in dataclasses.fields(kind)]
    return {"columns": columns, "rows": [[plain(getattr(item, name), as_rows=True) for name in columns] for item in items]}


def _graph(record: dict[str, Any]) -> Graph:
    """Returns the graph of a record. Raises ``ValueError`` for a number of an op or value that does not exist."""
    ops, values = _items(Op, record["ops"]), _items(Value, record["values"])
    record = LATER | record
    scalars = (name for name in get_type_hints(Graph) if name not in ("ops", "values"))
    given = {name: CODEC.reader(get_type_hints(Graph)[name])(record[name]) for name in scalars}
    for op in ops:
        _within((*op.inputs, *op.outputs), len(values), "value")
    _within([v.producer for v in values if v.producer is not None], len(ops), "op")
    _within((*given["forward_outputs"], *given["backward_outputs"]), len(values), "value")
    _within(given["must_run"], len(ops), "op")
    return Graph(ops=ops, values=values, **given)


def _schedule(record: dict[str, Any], graph: Graph) -> Schedule:
    """Returns the schedule of a record. Raises ``ValueError`` for an op that does not exist and for too many executions."""
    halves = [CODEC.reader(tuple[int, ...])(record[half]) for half in ("forward", "backward")]
    executions, longest = sum(map(len, halves)), max(LONGEST, len(graph.ops) ** 2)
    if executions > longest:
        raise ValueError(f"{executions} executions of {len(graph.ops)} ops are more than {longest}, which no plan needs")
    _within((*halves[0], *halves[1]), len(graph.ops), "op")
    return Schedule(*halves)


def _items(kind: type, table: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the instances of ``kind`` in a table. Raises ``ValueError`` if the columns are not the fields of ``kind``."""
    hints = get_type_hints(kind)
    columns = table["columns"]
    if sorted(columns) != sorted(hints):
        raise ValueError(f"the columns are {columns}, expected {list(hints)}")
    readers = [CODEC.reader(hints[name]) for name in columns]
    rows = ([read(cell) for read, cell in zip(readers, row, strict=True)] for row in table["rows"])
    return tuple(kind(**dict(zip(columns, row, strict=True))) for row in rows)


def _within(numbers: Sequence[int], count: int, what: str) -> None:
    """Raises ``ValueError`` unless all ``numbers`` are below ``count``."""
    if beyond := [n for n in numbers if n >= count]:
        raise ValueError(f"there is no {what} {beyond[0]}: there are {count}")
