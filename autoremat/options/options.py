"""Defines ``Options``: the user's options, checked and normalised once, where they enter.

For each option, the first source that sets it counts: the ``options`` of ``torch.compile``, then ``configure``, then the
environment. The environment can set the budget, the cost model, the policy and progress (``environment.py``).
"""

import difflib
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from autoremat.basics import environment
from autoremat.basics.budget import refuse_likely_percent
from autoremat.basics.checks import flag, one_of, options_of, positive_seconds, refused, underscored
from autoremat.basics.environment import BUDGET as ENVIRONMENT_VARIABLE
from autoremat.basics.environment import COST_MODEL as COST_MODEL_VARIABLE
from autoremat.basics.environment import POLICY as POLICY_VARIABLE
from autoremat.basics.environment import PROGRESS as PROGRESS_VARIABLE
from autoremat.basics.errors import OptionsError, OptionWarning
from autoremat.basics.progress import progress_in_environment, set_default
from autoremat.basics.warn import warn_user
from autoremat.options import values
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.constraints import SavePattern
from autoremat.planner.constraints.policies import Policy
from autoremat.planner.graph.op import DEVICE, HOST
from autoremat.planner.multigraph.open_calls import OpenCalls
from autoremat.planner.multigraph.step_profile import Budget, StepProfile
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_file import PlanFile

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_AUTO_HEADROOM = 512 * 2**20  # the CUDA context, cuBLAS workspaces and fragmentation are not part of the budget
COMPILERS = ("inductor", "aot_eager")
INFEASIBLE_ACTIONS = ("raise", "best_effort")
COST_MODELS = ("roofline", "calibrated")
PLANNING_ERROR_ACTIONS = ("fallback", "raise")


class OptionValues(TypedDict, total=False):
    """The options that :func:`configure` takes, in the forms that users write."""

    memory_budget: Budget
    max_slowdown: float | str | None
    host_memory: int | str | None
    store: Collection[str] | None
    auto_headroom: int | str
    time_limit: float
    compiler: str
    on_infeasible: str | None
    on_planning_error: str | None
    cost_model: str
    plan: str | os.PathLike[str] | Plan | Sequence[str | os.PathLike[str] | Plan] | None
    policy: Policy | str | None
    save: Collection[SavePattern] | Mapping[str, str]
    recompute: Collection[str]
    chunk_loss: bool | int | str
    tiles: bool | int | str
    early_gradients: bool | int | str
    hooks_free_gradients: bool
    in_flight: int | None
    accumulate: bool | None
    interconnect_bandwidth: float | str | None
    interconnect_latency: float | None
    agreement: str | Sequence[int]
    progress: bool


OWN_KEYS = tuple(OptionValues.__annotations__)

_configured: dict[str, object] = {}
_taken: dict[str, object] = {}
"""For each option, the default that the latest compiled graph used."""
_is_left: Callable[[], bool] = bool
"""Returns False once the compiled graphs are gone, because torch was reset."""


@dataclass(frozen=True, slots=True)
class Options:
    """All options of a compilation, frozen, as normalised values: bytes are ints, even if given as "6GiB".

    The [table of options](options.md#table-of-options) says what each means. ``inductor`` holds pairs for Inductor's config,
    sorted by key, and ``mode`` is that of ``torch.compile``. Raises OptionsError for a value that is not accepted.
    """

    memory_budget: Budget = None
    auto_headroom: int = DEFAULT_AUTO_HEADROOM
    time_limit: float = 10.0
    compiler: str = "inductor"
    on_infeasible: str | None = None
    on_planning_error: str | None = None
    inductor: tuple[tuple[str, object], ...] = ()
    mode: str | None = None
    cost_model: str = "roofline"
    plan: tuple[PlanFile, ...] | None = None
    policy: Policy | str | None = None
    save: tuple[SavePattern, ...] = ()
    recompute: tuple[str, ...] = ()
    chunk_loss: bool | int | str = "auto"
    tiles: bool | int | str = False
    early_gradients: bool | int | str = "auto"
    hooks_free_gradients: bool = False
    interconnect_bandwidth: float | None = None
    interconnect_latency: float | None = None
    agreement: str | tuple[int, ...] = field(default="auto", compare=False)
    in_flight: int | None = None
    accumulate: bool | None = None
    progress: bool = field(default=True, compare=False)
    max_slowdown: float | str | None = None
    host_memory: int | str | None = None
    store: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        normalised: dict[str, Any] = {
            "memory_budget": values.budget(self.memory_budget, "memory_budget"),
            "max_slowdown": values.slowdown(self.max_slowdown),
            "host_memory": values.host_memory(self.host_memory),
            "store": values.forms(self.store),
            "auto_headroom": values.headroom(self.auto_headroom),
            "time_limit": positive_seconds(self.time_limit, "time_limit"),
            "compiler": one_of(COMPILERS, self.compiler, "compiler"),
            "on_infeasible": None
            if self.on_infeasible is None
            else one_of(INFEASIBLE_ACTIONS, self.on_infeasible, "on_infeasible"),
            "cost_model": one_of(COST_MODELS, self.cost_model, "cost_model"),
            "on_planning_error": None
            if self.on_planning_error is None
            else one_of(PLANNING_ERROR_ACTIONS, self.on_planning_error, "on_planning_error"),
            "plan": values.plans(self.plan),
            "policy": policies.parse(self.policy),
            "save": values.saves(self.save),
            "recompute": values.patterns(self.recompute, "recompute"),
            "chunk_loss": values.parts(self.chunk_loss, "chunk_loss"),
            "tiles": values.tiles(self.tiles),
            "early_gradients": values.parts(self.early_gradients, "early_gradients"),
            "hooks_free_gradients": flag(self.hooks_free_gradients, "hooks_free_gradients"),
            "interconnect_bandwidth": values.bandwidth(self.interconnect_bandwidth),
            "interconnect_latency": None
            if self.interconnect_latency is None
            else positive_seconds(self.interconnect_latency, "interconnect_latency"),
            "agreement": values.agreement(self.agreement),
            "in_flight": values.calls(self.in_flight),
            "accumulate": None if self.accumulate is None else flag(self.accumulate, "accumulate"),
            "progress": flag(self.progress, "progress"),
            "inductor": tuple(sorted(self.inductor, key=operator.itemgetter(0))),
        }
        _refuse_contradictions(normalised)
        if not isinstance(self.mode, str | None):
            raise refused("mode", self.mode, "a mode of torch.compile, a string, or None")
        for name, value in normalised.items():
            object.__setattr__(self, name, value)  # the only change of a frozen instance, still during its construction

    @classmethod
    def parse(
        cls,
        options: Mapping[str, object] | None = None,
        mode: str | None = None,
        inductor_keys: Callable[[], Collection[str]] = tuple,
    ) -> "Options":
        """Returns the options of one ``torch.compile`` call, merged with those of ``configure`` and the environment.

        Keys that are not autoremat's go to ``inductor``. ``inductor_keys`` returns the names in Inductor's config; it is called
        only if there are such keys. Dashes in keys stand for underscores, as in torch.

        Raises OptionsError for a value that is not accepted, and for a key that neither autoremat nor Inductor knows.
        """
        given = underscored(options_of(options))
        own = {key: value for key, value in given.items() if key in OWN_KEYS}
        refuse_likely_percent(own.get("memory_budget"), "memory_budget", values.BUDGET_FORMS)
        foreign = {key: value for key, value in given.items() if key not in OWN_KEYS}
        if foreign:
            known = inductor_keys()
            for key in foreign:
                if key not in known:
                    raise _unknown_key(key, known)
        merged: dict[str, Any] = _environment(own.keys() | _configured.keys()) | _configured | own
        return cls(**merged, inductor=tuple(foreign.items()), mode=mode)

    @property
    def allowed_slowdown(self) -> float | None:
        """The share by which a plan may take longer than the fastest one; None for no bound."""
        assert not isinstance(self.max_slowdown, str), "__post_init__ has parsed it"
        return self.max_slowdown

    @property
    def open_calls(self) -> OpenCalls:
        """The calls that are open at once, as far as the options tell."""
        in_pipeline = self.in_flight is not None
        accumulates = in_pipeline if self.accumulate is None else self.accumulate
        return OpenCalls(self.in_flight or 1, accumulates, sends_gradients=in_pipeline)


def configure(**options: "Unpack[OptionValues]") -> None:
    """Sets defaults for this process, for callers that can pass only the backend's name.

    Later calls add to earlier ones; ``configure()`` without arguments removes all defaults. Graphs that are already compiled
    keep their options. An ``OptionWarning`` names the defaults that come too late for them. Raises OptionsError for an option
    or a value that is not accepted, and then changes nothing.
    """
    global _configured
    given: dict[str, Any] = dict(options)
    if unknown := [key for key in given if key not in OWN_KEYS]:
        raise _unknown_key(unknown[0], ())
    refuse_likely_percent(options.get("memory_budget"), "memory_budget", values.BUDGET_FORMS)
    checked = Options(**given)
    _configured = _configured | {key: getattr(checked, key) for key in given} if given else {}
    shown = _configured.get("progress")
    set_default(None if shown is None else bool(shown))
    _warn_if_late({key: _configured[key] for key in given})


def note_compiled(options: Options, given: Mapping[str, object] | None, is_left: Callable[[], bool]) -> None:
    """Records the defaults that a graph used, for the warning of ``configure``; valid as long as ``is_left()`` is True."""
    global _is_left
    if not _is_left():
        _taken.clear()
    own, _is_left = underscored(options_of(given)), is_left
    _taken.update({key: getattr(options, key) for key in OWN_KEYS if key not in (*own, "agreement", "progress")})


def _warn_if_late(configured: Mapping[str, object]) -> None:
    if not _is_left():
        _taken.clear()
    late = [key for key, value in configured.items() if key in _taken and _taken[key] != value]
    if late:
        warn_user(
            f"configure({', '.join(f'{key}=...' for key in late)}) comes too late for what is compiled already, which stays "
            "as it is. Call configure before the first step, or torch.compiler.reset() now, so that all is compiled again",
            OptionWarning,
        )


def _environment(given: Collection[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    environment.warn_of_unknown()
    variables = (ENVIRONMENT_VARIABLE, COST_MODEL_VARIABLE, POLICY_VARIABLE, PROGRESS_VARIABLE)
    budget, model, policy, progress = map(environment.said, variables)
    if budget and "memory_budget" not in given:
        found["memory_budget"] = values.budget(budget, ENVIRONMENT_VARIABLE)
    if model and "cost_model" not in given:
        found["cost_model"] = one_of(COST_MODELS, model, COST_MODEL_VARIABLE)
    if policy and "policy" not in given:
        found["policy"] = policies.parse(policy, POLICY_VARIABLE)
    if progress and "progress" not in given:
        found["progress"] = progress_in_environment()
    return found


def _unknown_key(key: str, inductor_keys: Iterable[str]) -> OptionsError:
    nearest = difflib.get_close_matches(key, [*OWN_KEYS, *inductor_keys], n=3)
    hint = f"nearest: {', '.join(nearest)}" if nearest else "no known name is close"
    return OptionsError(
        f"the option {key!r} is known neither to autoremat nor to Inductor's config; {hint}. "
        f"Autoremat's own: {', '.join(OWN_KEYS)}"
    )


def _refuse_contradictions(normalised: Mapping[str, Any]) -> None:
    if normalised["plan"] and (normalised["policy"] or normalised["save"] or normalised["recompute"]):
        raise OptionsError("`plan` applies a stored plan as it is: policy, save and recompute cannot be given beside it")
    if normalised["max_slowdown"] is not None and normalised["plan"]:
        raise OptionsError("`plan` applies a stored plan as it is: max_slowdown cannot be given beside it")
    if normalised["max_slowdown"] is not None and isinstance(normalised["memory_budget"], StepProfile):
        raise OptionsError(
            "max_slowdown bounds the time of one graph, and a step profile divides one budget among several: leave one of "
            "them out. `StepProfile.within(bytes).added_seconds` shows the time of the whole step under another budget"
        )
    store, host = normalised["store"], normalised["host_memory"]
    if store is not None and (HOST in store) is (host is None):
        raise OptionsError(
            f"store={store!r} and host_memory={host!r} contradict each other: name {HOST!r} in `store` and give a bound in "
            '`host_memory`, such as "64GiB" or "auto", or neither'
        )
    allowed = store or ((DEVICE,) if host is None else values.STORES)
    for pattern, form in (one for one in normalised["save"] if not isinstance(one, str)):
        if form not in allowed:
            raise OptionsError(
                f"save={{{pattern!r}: {form!r}}} names a form that is not allowed: allowed are {list(allowed)}. Name it in "
                f"`store`{' and give a bound in `host_memory`' if form == HOST else ''}"
            )
