"""Applies constraints: the values to save or to recompute, from patterns, from a policy and from the model itself.

A *saved* op never runs twice. The results of a *recomputed* op never cross from the forward into the backward. ``save`` takes
precedence over ``recompute``. Patterns and checkpoint regions of the model take precedence over the policy.

Without a budget the policy is the whole plan: everything that it does not recompute is saved if the backward reads it. With a
budget the policy only determines recomputed ops. The planner decides the rest, and the policy's own plan is one of its
candidates.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoremat.basics.units import format_bytes
from autoremat.basics.warn import collected_constraints
from autoremat.basics.warn import warn_of_constraint as warn
from autoremat.planner.constraints.model_structure import Forward
from autoremat.planner.constraints.policies import Policy, Region, matches_op, nearest
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import DEVICE, NOT_REMATERIALIZABLE, Constraint, Op, Trait, Value
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.settings import settings

SavePattern = str | tuple[str, str]
"""A pattern of what is saved, alone or with the name of the form in which it is kept."""

SHOWN = 3
"""Number of ops, or of values, that a warning names."""


@dataclass(frozen=True)
class ConstrainedGraph:
    """A graph whose ops carry all constraints, and the plan of the policy, if there is a policy."""

    graph: Graph
    candidate: Plan | None = None
    bound_values: frozenset[int] = frozenset()
    """The values that are kept in the one form that they have, if they cross into the backward."""
    warnings: tuple[str, ...] = ()
    """Messages of the warnings that the constraints caused."""


@dataclass(frozen=True)
class Constraints:
    """The constraints of the options, for any graph. If ``exact``, the policy is the whole plan."""

    save: tuple[SavePattern, ...] = ()
    recompute: tuple[str, ...] = ()
    policy: Policy | None = None
    exact: bool = False

    def apply(self, graph: Graph) -> ConstrainedGraph:
        """Returns ``graph`` with these constraints added to its own.

        Emits a ``ConstraintWarning`` for patterns that match nothing and constraints that cannot be met.
        """
        with collected_constraints() as messages:
            _warn_of_the_model(graph)
            plain = self.policy is None and not self.save and not self.recompute
            found = ConstrainedGraph(graph) if plain else _Application(self, graph).result
        return replace(found, warnings=tuple(messages))


@dataclass(frozen=True)
class _Application:
    constraints: Constraints
    graph: Graph

    @cached_property
    def forward(self) -> Forward:
        return Forward(self.graph)

    @cached_property
    def regions(self) -> Sequence[Region]:
        return self.constraints.policy(self.forward) if self.constraints.policy is not None else ()

    @cached_property
    def to_save(self) -> frozenset[int]:
        by_model = {i for i, op in enumerate(self.forward.ops) if op.constraint is Constraint.SAVE}
        patterns = [one if isinstance(one, str) else one[0] for one in self.constraints.save]
        return self._matches(patterns, "save") | by_model

    @cached_property
    def to_recompute(self) -> frozenset[int]:
        ops = self._matches(self.constraints.recompute, "recompute")
        by_model = {i for i, op in enumerate(self.forward.ops) if op.constraint is Constraint.RECOMPUTE and op.rematerializable}
        return self._possible(ops, f"recompute={list(self.constraints.recompute)}") | by_model - self.to_save

    @cached_property
    def by_policy(self) -> frozenset[int]:
        inside = {index for region in self.regions for index in _inside(self.graph, region)}
        if self.regions and not inside:
            warn(
                f"policy={self.constraints.policy} recomputes nothing: each of its {len(self.regions)} regions has only ops "
                "whose results others read, such as a single linear layer or fused attention, and needs no checkpoint"
            )
        return self._possible(frozenset(inside) - self.to_recompute - self.to_save, f"policy={self.constraints.policy}")

    @cached_property
    def forms(self) -> Mapping[int, str]:
        """The forms that patterns, and then the policy, name for values. The first that names a value counts."""
        pairs = [(one[1], self._of(one[0])) for one in self.constraints.save if not isinstance(one, str)]
        pairs += [(region.form, region.ops) for region in self.regions if region.form]
        named: dict[int, str] = {}
        for form, ops in pairs:
            for value in (value for index in ops for value in self.forward.ops[index].outputs):
                named.setdefault(value, form)
        return named

    def _of(self, pattern: str) -> tuple[int, ...]:
        return tuple(index for index, op in enumerate(self.forward.ops) if matches_op(op, pattern))

    def _matches(self, patterns: Iterable[str], option: str) -> frozenset[int]:
        found: set[int] = set()
        for pattern in patterns:
            ops = set(self._of(pattern))
            if not ops:
                warn(f"{option}: {pattern!r} matches nothing in a graph of {len(self.forward.ops)} forward ops; "
                      f"{nearest(pattern, self.forward.ops)}")  # fmt: skip
            found |= ops
        return frozenset(found)

    def _possible(self, ops: frozenset[int], what: str) -> frozenset[int]:
        held = set(self.graph.forward_outputs)
        refused: dict[int, str] = {}
        for index in sorted(ops):
            op = self.forward.ops[index]
            if not op.rematerializable:
                refused[index] = _why_once(op)
            elif index in self.to_save:
                refused[index] = "to be saved by another order"
            elif op.outputs and held.issuperset(op.outputs):
                refused[index] = "its result is an output, which the caller holds"
        _warn_of_refused(what, {self.forward.ops[index]: reason for index, reason in refused.items()}, len(ops))
        return ops - refused.keys()

    @property
    def result(self) -> ConstrainedGraph:
        recomputed = self.to_recompute | self.by_policy
        rest = Constraint.SAVE if self.constraints.exact and self.constraints.policy is not None else Constraint.NONE
        ops = tuple(
            op if index >= self.graph.num_forward
            else replace(op, constraint=Constraint.SAVE if index in self.to_save
                         else Constraint.RECOMPUTE if index in recomputed else rest)
            for index, op in enumerate(self.graph.ops)
        )  # fmt: skip
        graph, bound = _with_forms(replace(self.graph, ops=ops), self.forms)
        candidate = None if self.constraints.policy is None else self._candidate(graph, recomputed)
        return ConstrainedGraph(graph, candidate, bound)

    def _candidate(self, graph: Graph, recomputed: frozenset[int]) -> Plan:
        saved = frozenset(v for i, op in enumerate(self.forward.ops) if i not in recomputed for v in op.outputs)
        label = f"policy {self.constraints.policy}, {len(self.regions)} regions"
        plan = Plan.of(graph, build_schedule(graph, saved), label)
        if self.by_policy and self.by_policy.isdisjoint(plan.recomputed):
            warn(
                f"policy={self.constraints.policy} recomputes nothing: the backward reads no result of its regions, only "
                "results that other ops compute from them"
            )
        return plan


def _inside(graph: Graph, region: Region) -> set[int]:
    """Returns the ops of ``region`` that are recomputed: those whose results no op outside reads."""
    ops = set(region.ops)
    if region.results_too:
        return ops
    held = set(graph.forward_outputs)
    crossing = {
        index for index in ops for v in graph.ops[index].outputs
        if v in held or any(reader < graph.num_forward and reader not in ops for reader in graph.readers[v])
    }  # fmt: skip
    return ops - crossing


def _warn_of_the_model(graph: Graph) -> None:
    """Warns of ops that a checkpoint policy demands to recompute, and of custom ops: others would cause many warnings."""
    ordered = [op for op in graph.ops[: graph.num_forward] if op.constraint is Constraint.RECOMPUTE]
    held = set(graph.forward_outputs)
    refused = {
        op: _why_once(op) for op in ordered
        if not op.rematerializable and (op.demanded or Trait.OPAQUE in op.traits)
        and any(graph.readers[v] for v in op.outputs) and not held.issuperset(op.outputs)
    }  # fmt: skip
    _warn_of_refused("checkpoint regions of the model", refused, len(ordered))


def _warn_of_refused(what: str, refused: Mapping[Op, str], count: int) -> None:
    """Warns of those among ``count`` ops that cannot be recomputed, with the reasons."""
    if refused:
        places = ((op.target, f" in {op.module}" * bool(op.module), f" at {op.source}" * bool(op.source)) for op in refused)
        texts = [f"{''.join(place)}: {reason}" for place, reason in zip(places, refused.values(), strict=True)]
        more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        warn(f"{what}: {len(texts)} of {count} ops cannot be recomputed and are saved where needed: "
             f"{'; '.join(texts[:SHOWN])}{more}")  # fmt: skip


def _with_forms(graph: Graph, named: Mapping[int, str]) -> tuple[Graph, frozenset[int]]:
    """Returns ``graph``, whose values have only the forms ``named`` for them, and the values that have these.

    A value that cannot have its form stays on the device. A ``ConstraintWarning`` names those that the backward reads.
    """
    if not named:
        return graph, frozenset()
    values, bound, refused = list(graph.values), set[int](), dict[str, list[str]]()
    again = {v for op in graph.ops if op.constraint is Constraint.RECOMPUTE for v in op.outputs}
    for number, name in named.items():
        value = values[number]
        forms = tuple(form for form in value.forms if form.name == name)
        values[number] = replace(value, forms=forms)
        if forms:
            bound.add(number)
        elif name != DEVICE and number in graph.backward_needs - again:
            refused.setdefault(name, []).append(f"{value.name} ({_why_not(graph, number, value)})")
    for name, texts in refused.items():
        more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        warn(f"save: {len(texts)} of the named tensors cannot be kept in the form {name!r} and stay on the device: "
             f"{'; '.join(texts[:SHOWN])}{more}")  # fmt: skip
    return replace(graph, values=tuple(values)), frozenset(bound)


def _why_not(graph: Graph, number: int, value: Value) -> str:
    if number in graph.forward_outputs:
        return "the caller holds it"
    if value.forms:
        return f"it can only have the forms {[form.name for form in value.forms]}"
    if value.bytes < settings.least_form_bytes:
        return f"it has {format_bytes(value.bytes)}, and the least is {format_bytes(settings.least_form_bytes)}"
    return "it has no other form on this device, something writes to it, or it is no dense tensor of its own"


def _why_once(op: Op) -> str:
    declare = "; autoremat.declare_pure says that it may" if op.traits & NOT_REMATERIALIZABLE is Trait.OPAQUE else ""
    return f"may not run twice ({(op.traits.name or '').lower()}{declare})"


def without_saved_copies(graph: Graph, returning: Collection[int]) -> Graph:
    """Returns ``graph`` with the constraint to recompute whatever follows from the inputs ``returning`` alone.

    Sharded data parallelism (``fully_shard``) gathers parameters again for the backward, so a saved parameter takes no memory
    then; a saved copy of it does. Constraints of the model stay. Arithmetic that counts FLOPs, such as a product of two
    weights, is left to the search. So are results that the forward returns, which the caller holds anyway.
    """
    if not returning:
        return graph
    derived, held = set(returning), set(graph.forward_outputs)
    ops = list(graph.ops)
    for number, op in enumerate(graph.ops[: graph.num_forward]):
        if not op.inputs or op.flops or not op.rematerializable or not derived.issuperset(op.inputs):
            continue
        derived.update(op.outputs)
        if op.constraint is Constraint.NONE and held.isdisjoint(op.outputs):
            ops[number] = replace(op, constraint=Constraint.RECOMPUTE)
    return replace(graph, ops=tuple(ops))
