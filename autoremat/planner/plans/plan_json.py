"""Converts plans, with their graphs, to strict JSON and back.

Nothing in a file is executed or trusted: types and numbers are checked. A table is a list of columns and a list of rows. A
field with its default is not written, and a missing field has its default. So files outlive fields that are added later. A
field that this version does not know is an error.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autoremat.basics.codec import Codec, plain
from autoremat.basics.disk_cache import read_regular_text
from autoremat.basics.errors import PlanFileError, PlanInvalid
from autoremat.planner.graph.graph import Calls, Graph, Machine
from autoremat.planner.graph.op import Op, Value
from autoremat.planner.graph.schedule import Schedule

FORMAT, VERSION = "autoremat plan", 4
READABLE = (3, VERSION)
"""Versions of plan files that are read. Files of version 3 have every field. Early ones state four figures of a transfer."""

FACTS: dict[str, Any] = {
    "label": str, "budget_bytes": int | None, "host_budget_bytes": int | None, "lower_bound_bytes": int,
    "lower_bound_seconds": float, "interrupted": bool,
}  # fmt: skip
"""Fields of a plan that a file has beside its graph and its schedule. All other figures follow from these."""

LONGEST = 10_000
"""Executions that a schedule may have in any case. Above that, the limit is the square of the number of ops. A chain that holds
one value at a time needs about that number."""

CODEC = Codec()

SCHEDULE = tuple(f.name for f in dataclasses.fields(Schedule))
"""The fields of a schedule, which stand beside the graph."""

MACHINE, CALLS = (tuple(f.name for f in dataclasses.fields(kind)) for kind in (Machine, Calls))
"""The fields of a graph's machine and of its calls, which stand among its own."""


def encode(graph: Graph, schedule: Schedule, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts of a plan as JSON data without infinite numbers; :func:`decode` reads it back."""
    record = {"format": FORMAT, "version": VERSION, **changed(schedule, SCHEDULE)}
    scalars = changed(graph, ("forward_outputs", "backward_outputs", "must_run"))
    scalars |= changed(graph.machine, MACHINE) | changed(graph.calls, CALLS)
    record["graph"] = scalars | {"ops": _table(Op, graph.ops), "values": _table(Value, graph.values)}
    return record | {name: None if fact == math.inf else fact for name, fact in facts.items()}


def changed(item: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns those fields ``names`` of a dataclass instance that differ from their defaults, as JSON data."""
    defaults = {f.name: f.default for f in dataclasses.fields(item)}
    return {name: plain(value, as_rows=True) for name in names if (value := getattr(item, name)) != defaults[name]}


def decode(record: Any, name: str) -> tuple[Graph, Schedule, dict[str, Any]]:
    """Returns the graph, the schedule and the other fields of the plan that :func:`encode` wrote.

    Raises ``PlanFileError``, ``ValueError``, ``KeyError``, ``TypeError`` or ``IndexError`` on anything else.
    """
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise PlanFileError(f"{name} is no plan of autoremat's. Plans are written by Plan.save(path)")
    if (version := record.get("version")) not in READABLE:
        raise PlanFileError(f"{name} has version {version!r} of the format; this autoremat reads {READABLE[0]} to {VERSION}")
    if unknown := sorted(record.keys() - {"format", "version", "graph", *SCHEDULE, *FACTS}):
        raise ValueError(f"a plan file has no field {unknown[0]!r}")
    facts = {
        fact: math.inf if fact == "lower_bound_seconds" and record[fact] is None else CODEC.read(kind, record[fact])
        for fact, kind in FACTS.items()
        if fact in record
    }
    graph = _graph(record["graph"])
    return graph, _schedule({name: record[name] for name in SCHEDULE if name in record}, graph), facts


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Turns the errors of data that holds no valid plan into ``PlanFileError`` with the ``name`` of the data."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, RecursionError, OverflowError, PlanInvalid) as error:
        if isinstance(error, PlanFileError):
            raise
        raise PlanFileError(f"{name} holds no valid plan: {type(error).__name__}: {error}") from error


def parse(text: str, name: str) -> Any:
    """Returns the JSON data in ``text``. Raises ``PlanFileError`` for other text, and for a key that stands twice."""

    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
        return dict(pairs)

    with errors_of(name):
        return json.loads(text, object_pairs_hook=without_repetition)


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a plan file. Raises ``PlanFileError`` if it cannot be read."""
    try:
        return read_regular_text(path)
    except (OSError, ValueError) as error:  # OSError: no such file; ValueError: no UTF-8 text, or an impossible file name
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlanFileError(f"the plan {os.fspath(path)!r} cannot be read: {reason}") from error


def _table(kind: type, items: Sequence[Any]) -> dict[str, Any]:
    """Returns dataclass instances as a list of columns and a list of rows. A column of defaults alone is left out."""
    fields = dataclasses.fields(kind)
    columns = [f.name for f in fields if any(getattr(item, f.name) != f.default for item in items)]
    return {"columns": columns, "rows": [[plain(getattr(item, name), as_rows=True) for name in columns] for item in items]}


def _graph(record: dict[str, Any]) -> Graph:
    """Returns the graph of a record. Raises ``ValueError`` for a number of an op or value that does not exist."""
    table = record["values"]
    if "forms" in table["columns"]:
        column = table["columns"].index("forms")
        for row in table["rows"]:
            row[column] = [[*form[:1], *(transfer[:3] for transfer in form[1:3]), *form[3:]] for form in row[column]]
    ops, values = _items(Op, record["ops"]), _items(Value, table)
    readers = CODEC.readers(Graph, record.keys() - {"ops", "values", *MACHINE, *CALLS})
    given = {name: read(record[name]) for name, read in readers.items()}
    for part, kind, names in (("machine", Machine, MACHINE), ("calls", Calls, CALLS)):
        given[part] = CODEC.read(kind, {name: record[name] for name in names if name in record})
    for op in ops:
        _within((*op.inputs, *op.outputs), len(values), "value")
    _within([v.producer for v in values if v.producer is not None], len(ops), "op")
    _within((*given.get("forward_outputs", ()), *given.get("backward_outputs", ())), len(values), "value")
    _within(given.get("must_run", ()), len(ops), "op")
    return Graph(ops, values, **given)


def _schedule(record: dict[str, Any], graph: Graph) -> Schedule:
    """Returns the schedule of a record.

    Raises ``ValueError`` for too many executions, and for an op, a value or an execution that does not exist.
    """
    schedule: Schedule = CODEC.read(Schedule, record)
    executions, longest = len(schedule.sequence), max(LONGEST, len(graph.ops) ** 2)
    if executions > longest:
        raise ValueError(f"{executions} executions of {len(graph.ops)} ops are more than {longest}, which no plan needs")
    _within(schedule.sequence, len(graph.ops), "op")
    _within([*schedule.materialised, *(stay.value for stay in schedule.stays)], len(graph.values), "value")
    _within([at for stay in schedule.stays for at in (stay.store, stay.free, stay.load, stay.need)], executions, "execution")
    return schedule


def _items(kind: type, table: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the instances of ``kind`` in a table. Raises ``ValueError`` for a column that is no field, or twice."""
    columns, readers = table["columns"], CODEC.readers(kind, table["columns"]).values()
    if len(readers) < len(columns):
        raise ValueError(f"a column stands there twice: {columns}")
    rows = ([read(cell) for read, cell in zip(readers, row, strict=True)] for row in table["rows"])
    return tuple(kind(**dict(zip(columns, row, strict=True))) for row in rows)


def _within(numbers: Sequence[int], count: int, what: str) -> None:
    if beyond := [n for n in numbers if n >= count]:
        raise ValueError(f"there is no {what} {beyond[0]}: there are {count}")
