"""Plans as files: JSON that holds the graph too, so that a plan can be read by itself and checked against another graph.

Nothing in a file is executed, and nothing is believed: types and numbers are checked, the peak is simulated afresh and the
schedule replayed, on reading and again on the graph that the plan is applied to.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import os
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from autoremat.errors import PlanFileError, PlanInvalid
from autoremat.graph import Graph, Op, Value
from autoremat.plans import Plan
from autoremat.schedule import Schedule
from autoremat.units import format_bytes

FORMAT, VERSION = "autoremat plan", 2

LONGEST = 10_000
"""Executions that a schedule may have, however few ops there are; else their number squared, about what a chain takes that
holds one value at a time."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan that was read. ``digest`` is the hash of the text: two files of the same text lead to the same compilation."""

    name: str
    digest: str
    plan: Plan = field(repr=False, compare=False)

    def uuid(self) -> str:
        """What a compiled artifact depends on."""
        return self.digest

    @classmethod
    def of(cls, source: str | os.PathLike[str] | Plan) -> PlanFile:
        """Read a path, or take a plan that is at hand. Raises ``PlanFileError``."""
        name = "the given Plan" if isinstance(source, Plan) else os.fspath(source)
        text = dump(source) if isinstance(source, Plan) else _text(Path(name))
        return cls(name, hashlib.sha256(text.encode()).hexdigest(), parse(text, name))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no such text, or no such name
        raise PlanFileError(f"the plan {str(path)!r} cannot be read: {error}") from error


# -- a plan as text ----------------------------------------------------------------------------------------------------


def dump(plan: Plan) -> str:
    """``plan`` as strict JSON; :func:`parse` reads it back. Tables have a list of columns, then rows."""
    graph = plan.graph
    scalars = (f.name for f in dataclasses.fields(Graph) if f.name not in ("ops", "values"))
    record = {
        "format": FORMAT,
        "version": VERSION,
        "forward": plan.schedule.forward,
        "backward": plan.schedule.backward,
        "label": plan.label,
        "budget_bytes": plan.budget_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "lower_bound_seconds": plan.lower_bound_seconds if math.isfinite(plan.lower_bound_seconds) else None,
        "interrupted": plan.interrupted,
        "graph": {name: getattr(graph, name) for name in scalars}
        | {"ops": _table(Op, graph.ops), "values": _table(Value, graph.values)},
    }
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def _table(kind: type, items: Sequence[Any]) -> dict[str, Any]:
    columns = [f.name for f in dataclasses.fields(kind)]
    return {"columns": columns, "rows": [[_plain(getattr(item, name)) for name in columns] for item in items]}


def _plain(value: Any) -> Any:
    """``value`` of a field of Graph, Op or Value as JSON data; :func:`_reader` gives the way back."""
    if isinstance(value, enum.Flag):
        return [flag.name for flag in type(value) if flag in value and flag.value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, one.name)) for one in dataclasses.fields(value)]
    return value


def parse(text: str, name: str = "the plan") -> Plan:
    """The plan that :func:`dump` wrote, simulated and checked afresh. Raises ``PlanFileError`` on anything else."""
    try:
        record = json.loads(text)
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise PlanFileError(f"{name} is no plan of autoremat's. Plans are written by Plan.save(path)")
        if record.get("version") != VERSION:
            raise PlanFileError(f"{name} has version {record.get('version')!r} of the format; this autoremat reads {VERSION}")
        graph = _graph(record["graph"])
        schedule = _schedule(record, graph)
        bound = record["lower_bound_seconds"]
        plan = dataclasses.replace(
            Plan.of(graph, schedule, _reader(str)(record["label"])),
            budget_bytes=_reader(int | None)(record["budget_bytes"]),
            lower_bound_bytes=_reader(int)(record["lower_bound_bytes"]),
            lower_bound_seconds=math.inf if bound is None else _reader(float)(bound),
            interrupted=_reader(bool)(record["interrupted"]),
        )
        plan.check()
        return plan
    except (ValueError, KeyError, IndexError, TypeError, RecursionError, PlanInvalid) as error:
        if isinstance(error, PlanFileError):
            raise
        raise PlanFileError(f"{name} holds no valid plan: {type(error).__name__}: {error}") from error


def _printable(text: str) -> str:
    """``text``, which a terminal is to show: without what would move its cursor or set its title."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def _graph(record: dict[str, Any]) -> Graph:
    ops, values = _items(Op, record["ops"]), _items(Value, record["values"])
    scalars = (name for name in get_type_hints(Graph) if name not in ("ops", "values"))
    given = {name: _reader(get_type_hints(Graph)[name])(record[name]) for name in scalars}
    for op in ops:
        _within((*op.inputs, *op.outputs), len(values), "value")
    _within([v.producer for v in values if v.producer is not None], len(ops), "op")
    _within((*given["forward_outputs"], *given["backward_outputs"]), len(values), "value")
    _within(given["pinned"], len(ops), "op")
    return Graph(ops=ops, values=values, **given)


def _schedule(record: dict[str, Any], graph: Graph) -> Schedule:
    halves = [_reader(tuple[int, ...])(record[half]) for half in ("forward", "backward")]
    executions, longest = sum(map(len, halves)), max(LONGEST, len(graph.ops) ** 2)
    if executions > longest:
        raise ValueError(f"{executions} executions of {len(graph.ops)} ops are more than {longest}, which no plan needs")
    _within((*halves[0], *halves[1]), len(graph.ops), "op")
    return Schedule(*halves)


def _items(kind: type, table: dict[str, Any]) -> tuple[Any, ...]:
    hints = get_type_hints(kind)
    columns = table["columns"]
    if sorted(columns) != sorted(hints):
        raise ValueError(f"the columns are {columns}, expected {list(hints)}")
    readers = [_reader(hints[name]) for name in columns]
    rows = ([read(cell) for read, cell in zip(readers, row, strict=True)] for row in table["rows"])
    return tuple(kind(**dict(zip(columns, row, strict=True))) for row in rows)


def _within(numbers: Sequence[int], count: int, what: str) -> None:
    if beyond := [n for n in numbers if n >= count]:
        raise ValueError(f"there is no {what} {beyond[0]}: there are {count}")


def _of_type(kind: type | types.UnionType, what: str) -> Callable[[Any], Any]:
    """Lets through what is a ``kind``; a number has to be finite and >= 0, and a bool is none."""

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
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What turns JSON data into a value of a field that is declared as ``kind``, or raises ``ValueError``."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    if get_origin(kind) is tuple:
        item, is_list = _reader(get_args(kind)[0]), _of_type(list, "list")
        return lambda value: tuple(item(one) for one in is_list(value))
    if get_origin(kind) is types.UnionType:
        inner = _reader(next(one for one in get_args(kind) if one is not types.NoneType))
        return lambda value: None if value is None else inner(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        readers = [_reader(hint) for hint in get_type_hints(kind).values()]
        return lambda value: kind(*(read(one) for read, one in zip(readers, value, strict=True)))
    if issubclass(kind, enum.Flag):
        return lambda value: _flags(kind, value)
    return lambda value: kind(value)


def _flags(kind: type[enum.Flag], names: list[str]) -> enum.Flag:
    found = kind(0)
    for name in names:
        found |= kind[name]
    return found


# -- a plan and another graph ------------------------------------------------------------------------------------------


def graph_hash(graph: Graph) -> str:
    """A hash of the ops, their edges, the sizes and the outputs.

    Names, lines, seconds and workspaces are left out: they differ between processes and machines. So are orders and what may
    not run twice: a plan is checked against those of the graph at hand.
    """
    ops = [_op_structure(graph, index) for index in range(len(graph.ops))]
    values = [(value.bytes, value.producer, value.role.value) for value in graph.values]
    ends = (graph.forward_outputs, graph.backward_outputs)
    return hashlib.sha256(json.dumps([ops, values, ends]).encode()).hexdigest()


def _op_structure(graph: Graph, index: int) -> tuple[Any, ...]:
    op = graph.ops[index]
    target = re.sub(r" at 0x[0-9a-fA-F]+", "", op.target)
    made = [graph.values[v].bytes for v in op.outputs]
    return target, op.forward, op.inputs, op.outputs, made


def fitted(files: Sequence[PlanFile], graph: Graph) -> tuple[PlanFile, Plan]:
    """The one of ``files`` that is for ``graph``, and its plan for exactly that graph, simulated and checked.

    Raises ``PlanFileError``, which says what differs, if none is.
    """
    wanted = graph_hash(graph)
    for file in files:
        if graph_hash(file.plan.graph) == wanted:
            plan = Plan.of(graph, file.plan.schedule, f"stored plan ({file.plan.label})" if file.plan.label else "stored plan")
            try:
                plan.check()
            except PlanInvalid as error:
                raise PlanFileError(f"the plan in {file.name} breaks a rule of this graph: {error}") from error
            return file, plan
    nearest = min(files, key=lambda file: abs(len(file.plan.graph.ops) - len(graph.ops)))
    which = f"the plan in {nearest.name} is" if len(files) == 1 else f"none of {len(files)} plans ({nearest.name} is nearest)"
    raise PlanFileError(f"{which} for another graph than this one:\n{difference(nearest.plan.graph, graph)}\n{_ADVICE}")


_ADVICE = (
    "A plan holds for the same model, shapes, device type and inner compiler, and for a torch that traces the same ops. "
    "Save a plan of this graph, or leave out the option `plan`."
)


def difference(stored: Graph, found: Graph) -> str:
    """What tells two graphs apart, as lines of text: their sizes and the first op that differs."""
    lines = [f"  {name:<8}{_sizes(graph)}" for name, graph in (("stored:", stored), ("here:", found))]
    shared = range(min(len(stored.ops), len(found.ops)))
    first = next((i for i in shared if _op_structure(stored, i) != _op_structure(found, i)), len(shared))
    if first == len(stored.ops) == len(found.ops):
        return "\n".join([*lines, "  the ops are the same; the sizes of inputs or the outputs differ"])
    lines.append(f"  the first op that differs is number {first}:")
    lines += [f"    {name:<8}{_op_text(graph, first)}" for name, graph in (("stored:", stored), ("here:", found))]
    return "\n".join(lines)


def _sizes(graph: Graph) -> str:
    total = format_bytes(sum(value.bytes for value in graph.values))
    return f"{len(graph.ops)} ops ({graph.num_forward} in the forward), {len(graph.values)} values of {total}"


def _op_text(graph: Graph, index: int) -> str:
    if index >= len(graph.ops):
        return "(no such op)"
    op = graph.ops[index]
    read = ", ".join(f"{v} ({graph.values[v].name})" for v in op.inputs)
    made = ", ".join(f"{v} ({graph.values[v].name}, {format_bytes(graph.values[v].bytes)})" for v in op.outputs)
    half = "forward" if op.forward else "backward"
    place = f" in {op.module or 'the model'} at {op.source}" if op.source else ""
    return f"{op.target} reads values [{read}], makes values [{made}] in the {half}{place}"
