"""The reference peak: the peak that a graph needs without this package. A float as a budget is a share of it.

Under Inductor it is the peak of the code that Inductor generates alone, replayed as ours is, without compiling kernels. Only
that code tells what Inductor needs: it moves kernels, saves copies in other layouts, and merges what the simulator keeps apart.
Where no code is generated, as for a card by name or for several graphs of a step, torch's own partition is simulated, with the
layout copies that Inductor makes. Under ``aot_eager`` torch makes that partition, which runs uncompiled. The code headroom is
room for a plan's code, and no part of what the step needs alone.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autoremat.basics.errors import BudgetWarning, PlanInvalid, find_cause, is_user_error
from autoremat.basics.progress import now
from autoremat.basics.warn import warn_user
from autoremat.capture.capture import Capture
from autoremat.compiler.joint_graph import JointGraph, Partitioner, PricedGraph, price_graph
from autoremat.compiler.planned_graph import code_headroom_bytes, code_unsplit_bytes, replay_context
from autoremat.compiler.problem import Problem, Reference, fingerprint
from autoremat.planner.graph.op import Trait
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.wrapper_replay import INPUT_PREFIXES, ReplayContext
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.starts import Starts
from autoremat.request.request import RequestedLimits
from autoremat.torch_private import compilers, dynamo, fake_tensors, inductor_lowering, joint_graphs
from autoremat.torch_private.layouts import LAYOUT_COPY
from autoremat.torch_private.rehearsal import rehearsed
from autoremat.torch_private.tensors import storage_bytes, storage_key

log = logging.getLogger("autoremat")

MOST_OPS = 2500
"""Number of ops up to which torch's partitioner is asked without a budget. It takes seconds for a thousand ops."""

CODE, TORCH = "the code that Inductor generates alone", "torch's own partition"
BASELINE = "the step without recomputation, for torch's own partition is unknown"
SMALLEST = "the smallest plan found, for the step without autoremat needs less"
"""Sources of a reference peak."""

RANDOM_STATE = re.compile(r"(?:graphsafe_)?run_(?:and_save|with)_rng_state(?:_(\d+))?")
"""Names that torch gives to recomputed random ops, attention among them. The number counts them in the joint graph's
sequence."""


MOST_KNOWN = 64
"""Number of graphs whose reference peak this process remembers, for other shares and for previews of the same graph."""

_known: dict[str, Reference | None] = {}


def reference_of(priced: PricedGraph, planner: Planner, headroom: int) -> Reference | None:
    """Returns the reference peak of a graph; None unless the budget is a share of it. A share of a nested region is none.

    A share of 1 refers at least to the smallest plan, so that it is feasible. ``headroom`` is the code's. The time limit of
    ``planner`` begins afterwards.
    """
    limits, found = priced.problem.request.limits, priced.problem.searches.reference
    if limits.reference_share is None or priced.joint.is_region:
        return None
    if found is None:
        source, plan = plan_without_us(priced, planner)
        beside = headroom - (code_headroom_bytes(priced.graph) if priced.problem.request.fuses else 0)
        found = Reference(plan.peak_bytes + beside + layout_copies_bytes(priced, plan), source, plan.saved_bytes)
    least = planner.smallest if limits.takes_whole_reference else None
    if least is None or least.peak_bytes + headroom <= found.bytes:
        return found
    return Reference(least.peak_bytes + headroom, SMALLEST, least.saved_bytes)


def plan_without_us(priced: PricedGraph, planner: Planner) -> tuple[str, Plan]:
    """Returns the plan that the graph would have without this package, after its source.

    The sequence of torch's own partition is torch's, so the plan need not keep to the rules of others. If the simulator cannot
    follow it, the baseline takes its place, with a ``BudgetWarning``. The time limit of ``planner`` begins afterwards.
    """
    torchs = torchs_plan(priced)
    priced.name_planning()
    planner.restart()
    if torchs is not None:
        return TORCH, torchs
    warn_user(
        "the share of a budget refers to the step without recomputation, which needs more than the step without autoremat: "
        "torch's own partition of this graph could not be simulated (the logger autoremat has the reason). Give the budget "
        "in bytes",
        BudgetWarning,
    )
    return BASELINE, planner.baseline


def layout_copies_bytes(priced: PricedGraph, plan: Plan) -> int:
    """Returns the bytes of the layout copies that Inductor alone saves for the backward, and ``plan`` does not."""
    calls = zip(priced.captured.op_nodes, priced.graph.ops, strict=True)
    made = {value for node, op in calls if LAYOUT_COPY in node.meta for value in op.outputs}
    unsaved = made.intersection(priced.graph.backward_needs).difference(plan.saved)
    return sum(priced.graph.values[value].bytes for value in unsaved)


def find_soft_budget(priced: PricedGraph) -> int | None:
    """Returns the peak of torch's partition in bytes; None with a budget of memory alone, a stored plan or a policy.

    Without a budget the plan should not exceed that peak, and a budget of time is a share beyond that plan's time. On graphs
    of many ops, the stand-in takes the place of torch's partition, which has no time limit.
    """
    request = priced.problem.request
    limits, options = request.limits, request.options
    told = (limits.bounds_peak and limits.max_slowdown is None) or options.plan or options.policy
    if told or priced.joint.is_region or not request.fuses:
        return None
    is_large = len(priced.graph.ops) > MOST_OPS
    plan = Starts(priced.graph).least_traffic() if is_large else torchs_plan(priced)
    return None if plan is None else plan.peak_bytes + layout_copies_bytes(priced, plan)


# -- torch's own partition as a plan ---------------------------------------------------------------------------------------


def torchs_plan(priced: PricedGraph) -> Plan | None:
    """Returns torch's partition without a budget as a plan, which need not be valid; None if it cannot be determined.

    It may recompute what reads an input that the forward overwrites, such as a batch norm in a checkpointed region. An earlier
    attempt's is known.
    """
    known_plans = priced.problem.searches.torchs_plans
    for known in known_plans:
        if known.graph == priced.graph:
            return known
    now("asking for torch's own partition")
    captured = priced.captured
    try:
        halves = fake_tensors.partition_for(1.0, captured.joint, priced.joint.inputs, priced.joint.keywords)
        plan = Plan.of(captured.graph, schedule_of_partition(captured, *halves), "torch")
    except Exception as error:  # both are open-ended, and this is only a comparison
        log.info("no partition of torch's to compare with", exc_info=error)
        return None
    known_plans.append(plan)
    return plan


def plan_of_partition(captured: Capture, forward: fx.GraphModule, backward: fx.GraphModule) -> Plan:
    """Returns a partition as a plan.

    Raises ``PlanInvalid`` if the simulator cannot follow the partition. Also raises it if the partition recomputes an op that
    reads an input that the forward overwrites. Autograd refuses such a backward.
    """
    plan = Plan.of(captured.graph, schedule_of_partition(captured, forward, backward), "torch")
    repeated = (captured.graph.ops[op] for op in plan.recomputed)
    if refused := [op.name for op in repeated if Trait.READS_MUTATED_INPUT in op.traits]:
        raise PlanInvalid(f"{refused[0]} reads an input that the forward overwrites, and runs again: its backward would fail")
    return plan


def schedule_of_partition(captured: Capture, *halves: fx.GraphModule) -> Schedule:
    """Returns the ops that forward and backward execute, in their sequence.

    Nodes keep their names from the joint graph, except for recomputed random ops, which are matched by number.
    """
    number = {node.name: index for index, node in enumerate(captured.op_nodes)}
    # Only calls count: a saved tensor is a placeholder of the backward with its op's name.
    called = [[node.name for node in half.graph.nodes if node.op == "call_function"] for half in halves]
    kept = {name for names in called for name in names}
    repeated = [node.name for node in captured.op_nodes if node.name not in kept
                and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]  # fmt: skip

    def own(name: str) -> str:
        match = RANDOM_STATE.fullmatch(name)
        place = int(match[1] or 0) if match else len(repeated)
        return repeated[place] if place < len(repeated) else name

    forward, backward = (tuple(number[name] for name in map(own, names) if name in number) for names in called)
    return Schedule(forward, backward)


# -- the code that Inductor generates alone ----------------------------------------------------------------------------------


@contextlib.contextmanager
def rehearsal(problem: Problem) -> Iterator[Rehearsal | None]:
    """Finds the reference peak by the code that Inductor generates for the problem without this package, while active.

    The first compilation in this thread does so, before its joint graph is partitioned. Yields None where no code is needed:
    the peak is known, the budget is no share of it, or Inductor compiles for no device that is here. Warns with
    ``BudgetWarning`` if Inductor fails: the simulation takes the place of the code then.
    """
    request, report = problem.request, None if problem.record is None else problem.record.report
    searches, made = problem.searches, None
    searches.reference = None
    if request.limits.reference_share is not None and request.fuses and problem.cuda_name is None:
        key = fingerprint(replace(problem, request=replace(request, limits=RequestedLimits())))
        if report is not None and report.reference_bytes is not None and report.reference_source == CODE:
            searches.reference = Reference(report.reference_bytes, CODE, report.reference_saved_bytes or 0)
        elif key in _known:
            searches.reference = _known[key]
        else:
            made = Rehearsal(problem, key)
    with contextlib.nullcontext() if made is None else rehearsed(made.rehearse):
        yield made


def find_reference(problem: Problem) -> None:
    """Finds the reference peak of a graph that is not compiled otherwise; see :func:`rehearsal`."""
    assert problem.module is not None
    with rehearsal(problem) as needed:
        if needed is None:
            return
        patches = {**problem.patches, "custom_partitioner_fn": Partitioner(fake_tensors.stop)}
        try:
            with inductor_lowering.without_kernels():
                module = dynamo.copied_with_sources(problem.module)
                compilers.compile_with_inductor(module, problem.inputs, patches, eager_backward=True)
        except Exception as error:
            if find_cause(error, fake_tensors.Stop) is None:
                needed.fail(error)


@dataclass
class Rehearsal:
    """Compiles a joint graph as torch does, and keeps the facts that the replay of the code needs."""

    problem: Problem
    key: str
    """The name of the reference among those that this process remembers."""
    passed: fx.GraphModule | None = None
    """The joint graph as Inductor's passes left it; None if it is unknown, or has nested regions."""
    has_regions: bool = False
    priced: PricedGraph | None = None
    replayed: ReplayContext = field(default_factory=ReplayContext)
    saved: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage that the forward saves for the backward."""
    returned: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage that the forward returns."""

    def rehearse(self, compile_copy: Callable[[], None]) -> fx.GraphModule | None:
        """Finds the reference peak by ``compile_copy()``. Returns :attr:`passed`."""
        now("generating code without a plan, for the reference peak")
        halves: dict[bool, inductor_lowering.LoweredPeak] = {}

        def observe(half: inductor_lowering.LoweredPeak) -> None:
            halves[half.is_backward] = half
            if len(halves) == 2:
                raise fake_tensors.Stop

        observed = inductor_lowering.observe_lowering(lambda: self.replayed, observe)
        try:
            with inductor_lowering.without_kernels(), observed, compilers.partitioned_by(Partitioner(self)):
                compile_copy()
        except Exception as error:  # models and ops are open-ended, and the simulation takes the place of this figure
            if find_cause(error, fake_tensors.Stop) is None:
                self.fail(error)
        self._remember(None if self.priced is None or len(halves) < 2 else self.reference(halves))
        return None if self.has_regions else self.passed

    def _remember(self, found: Reference | None) -> None:
        while len(_known) >= MOST_KNOWN:
            del _known[next(iter(_known))]
        _known[self.key] = self.problem.searches.reference = found

    def fail(self, error: Exception) -> None:
        """Warns that ``error`` is why the reference is simulated. Raises the user's errors and Dynamo's."""
        if is_user_error(error) or dynamo.asks_to_restart(error):
            raise error
        self._remember(None)
        log.info("no code of Inductor's own", exc_info=error)
        warn_user(
            "memory_budget is a share of a simulated peak, which can differ from what Inductor needs by a third: its code "
            f"without autoremat could not be generated ({type(error).__name__}: {error}). Give the budget in bytes",
            BudgetWarning,
        )

    def take_priced(self, joint: JointGraph) -> PricedGraph | None:
        """Returns the priced graph of ``joint``, if the rehearsal has priced it; once, because a rewrite consumes it."""
        if joint.module is not self.passed:
            return None
        taken, self.priced, self.passed = self.priced, None, None
        return taken

    def __call__(self, joint: JointGraph) -> joint_graphs.PartitionedModules:
        """Returns the halves of ``joint``. Raises ``Stop`` if there is no backward."""
        if joint.is_region:
            self.has_regions = True
            return joint_graphs.partition_as_torch_does(joint.module, joint.inputs, **joint.keywords)
        self.passed = fake_tensors.copied_module(joint.module)
        copied = replace(joint, module=fake_tensors.copied_module(joint.module))
        self.priced = price_graph(copied, self.problem)
        if self.priced is None:
            raise fake_tensors.Stop
        forward, backward = joint_graphs.partition_as_torch_does(joint.module, joint.inputs, **joint.keywords)
        aliases = self._note_outputs(forward, joint.num_forward_outputs)
        known = replay_context(self.priced)
        beside = known.code_headroom_bytes - code_headroom_bytes(self.priced.graph)
        self.replayed = replace(known, aliases=aliases, code_headroom_bytes=beside)
        return forward, backward

    def _note_outputs(self, forward: fx.GraphModule, returned: int) -> dict[str, str]:
        """Notes the storages that the forward saves and returns. Returns the aliases among what it saves, and of its inputs.

        The first ``returned`` outputs are the function's.
        """
        names = {_storage_of(node)[0]: node.name for node in forward.graph.find_nodes(op="placeholder")}
        outputs, aliases = torch.utils._pytree.arg_tree_leaves(*forward.graph.output_node().args), dict[str, str]()
        for number, node in enumerate(outputs):
            if not isinstance(node, fx.Node) or node.op == "placeholder":
                continue
            key, size = _storage_of(node)
            if not key:
                continue
            if names.setdefault(key, node.name) != node.name:
                aliases[node.name] = names[key]
            if not names[key].startswith(INPUT_PREFIXES):
                (self.returned if number < returned else self.saved)[key] = size
        return aliases

    def reference(self, halves: dict[bool, inductor_lowering.LoweredPeak]) -> Reference:
        """Returns the reference peak of a step with this code for both halves, in the bytes that the budget counts."""
        assert self.priced is not None
        graph = self.priced.graph
        held = [*({**self.saved, **self.returned}.values())]
        beside = [*(graph.calls.others * held), graph.calls.resident_bytes]
        size = max(half.peak_bytes for half in halves.values()) + sum(beside)
        allocations = {is_backward: half.allocations for is_backward, half in halves.items()}
        known = {is_backward: one for is_backward, one in allocations.items() if one is not None}
        if self.priced.captured.runs_on == "cuda" and len(known) == 2:
            size += code_unsplit_bytes(known, beside)
        return Reference(size, CODE, sum(self.saved.values()))


def _storage_of(node: fx.Node) -> tuple[int, int]:
    """Returns the identity and the bytes of the storage of a node's result; those of an empty one for other results."""
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        return 0, 0
    return storage_key(tensor), storage_bytes(tensor, tensor.device.type)
