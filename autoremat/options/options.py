"""What the user asks for: one frozen `Options`, checked and normalised where it enters and never again.

Values come from three places; for each key the first that has it wins: the `options` of `torch.compile`, `configure`,
and, for the budget, the cost model, the policy and progress, variables of the environment (`environment.py`).
"""

import difflib
import json
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from autoremat.basics import environment
from autoremat.basics.budget import FORMS_ANYWHERE, budget_bytes, parse_budget
from autoremat.basics.checks import (
    MOST_BYTES,
    as_int,
    flag,
    one_of,
    options_of,
    positive_seconds,
    refused,
    text_to_bytes,
    underscored,
)
from autoremat.basics.environment import BUDGET as ENVIRONMENT_VARIABLE
from autoremat.basics.environment import COST_MODEL as COST_MODEL_VARIABLE
from autoremat.basics.environment import POLICY as POLICY_VARIABLE
from autoremat.basics.environment import PROGRESS as PROGRESS_VARIABLE
from autoremat.basics.errors import OptionsError
from autoremat.basics.progress import progress_in_environment, set_default
from autoremat.basics.stable import stable
from autoremat.basics.units import BYTE_FORMS, format_bytes
from autoremat.options import defaults
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.policies import Policy, Selective
from autoremat.planner.multigraph.ledger import Share
from autoremat.planner.multigraph.step_profile import Budget, Survey
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_file import PlanFile

DEFAULT_RESERVE = 512 * 2**20  # the CUDA context, cuBLAS workspaces and fragmentation live outside the budget
INNER_COMPILERS = ("inductor", "aot_eager")
INFEASIBLE_ACTIONS = ("raise", "best_effort")
COST_MODELS = ("roofline", "calibrated", "profile")
UNPLANNABLE_ACTIONS = ("warn", "raise")
OWN_KEYS = (
    "memory_budget", "reserve", "time_limit", "inner", "on_infeasible", "on_unplannable", "cost_model", "plan", "policy",
    "recompute_modules", "save", "recompute", "chunk_loss", "progress",
)  # fmt: skip
PLANNING_KEYS = tuple(key for key in OWN_KEYS if key != "progress")

_BUDGET_FORMS = f'{FORMS_ANYWHERE}; "auto" (what is free on the CUDA device, less `reserve`); an `autoremat.survey`'
_PATTERN_FORMS = 'a list of globs of module paths ("layers.*.mlp"), ops ("aten.mm") and names of tensors'
_CHUNK_FORMS = '"auto", True, False or a number of parts, an int >= 2'
_RESERVE_FORMS = f"an int >= 0 (bytes) or a string such as {BYTE_FORMS}"


class _Unset(Enum):
    UNSET = "not given"


_UNSET = _Unset.UNSET
_configured: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that influences a plan. Fields hold normalised values: bytes are ints, also if given as "6GiB".

    - memory_budget: peak bytes of forward and backward above the step's start (int), a share of the peak without
        recomputation (float in (0, 1]), "auto", None for no bound, or the `Survey` of a step of several graphs.
    - reserve: bytes that "auto" leaves free.
    - time_limit: seconds that planning may take.
    - inner: what compiles the planned graphs, "inductor" or "aot_eager" (runs them uncompiled).
    - on_infeasible: "raise", or "best_effort" to run at the smallest peak found.
    - cost_model: where the seconds of ops come from: "calibrated" (rates of the device, measured once), "profile" (each
        distinct library kernel is timed, the rest as calibrated), "roofline" (data sheets, nothing is measured).
    - on_unplannable: "raise" makes it an error if a graph cannot be planned; "warn" leaves the graph to torch's partitioner,
        without a budget. None: "raise" with a memory budget, "warn" without one.
    - plan: stored plans to apply instead of planning: paths that `Plan.save` wrote, or plans, one or a sequence. Each graph
        takes the one that was made for it.
    - policy: what runs again in the backward; see `autoremat.policies`. Without a budget it is the whole plan.
    - recompute_modules: the modules of the policy "selective"; kept in the policy, empty here.
    - save, recompute: orders to the planner: globs of module paths, ops, or names of tensors.
    - chunk_loss: whether the projection onto a vocabulary, the loss and their gradients are computed in parts: "auto" (if no
        plan fits otherwise), True (also if that is faster by prediction), in how many parts in any case, or False (never).
    - progress: whether whoever waits for a compilation is told what is going on; no plan depends on it.
    - inductor: pairs for Inductor's config, sorted by key.
    - mode: as in `torch.compile`.

    Raises OptionsError for a value that is not accepted.
    """

    memory_budget: Budget = None
    reserve: int = DEFAULT_RESERVE
    time_limit: float = 10.0
    inner: str = "inductor"
    on_infeasible: str = "raise"
    on_unplannable: str | None = None
    inductor: tuple[tuple[str, object], ...] = ()
    mode: str | None = None
    cost_model: str = "calibrated"
    plan: tuple[PlanFile, ...] = ()
    policy: Policy | str | None = None
    recompute_modules: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    chunk_loss: bool | int | str = "auto"
    progress: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        normalised = {
            "memory_budget": _normalise_budget(self.memory_budget, "memory_budget"),
            "reserve": _normalise_reserve(self.reserve),
            "time_limit": positive_seconds(self.time_limit, "time_limit"),
            "inner": one_of(INNER_COMPILERS, self.inner, "inner"),
            "on_infeasible": one_of(INFEASIBLE_ACTIONS, self.on_infeasible, "on_infeasible"),
            "cost_model": one_of(COST_MODELS, self.cost_model, "cost_model"),
            "on_unplannable": None
            if self.on_unplannable is None
            else one_of(UNPLANNABLE_ACTIONS, self.on_unplannable, "on_unplannable"),
            "plan": _normalise_plans(self.plan),
            "policy": _normalise_policy(self.policy, self.recompute_modules),
            "recompute_modules": (),
            "save": _normalise_patterns(self.save, "save"),
            "recompute": _normalise_patterns(self.recompute, "recompute"),
            "chunk_loss": _normalise_chunks(self.chunk_loss),
            "progress": flag(self.progress, "progress"),
            "inductor": tuple(sorted(self.inductor, key=operator.itemgetter(0))),
        }
        if normalised["plan"] and (normalised["policy"] or normalised["save"] or normalised["recompute"]):
            raise OptionsError("`plan` applies a stored plan as it is: policy, save and recompute cannot be given beside it")
        if not isinstance(self.mode, str | None):
            raise refused("mode", self.mode, "a mode of torch.compile, a string, or None")
        for name, value in normalised.items():
            object.__setattr__(self, name, value)  # the one place where a frozen instance is still being made

    @classmethod
    def parse(
        cls,
        options: Mapping[str, object] | None = None,
        mode: str | None = None,
        inductor_keys: Callable[[], Collection[str]] = tuple,
    ) -> "Options":
        """The options of one `torch.compile`, with what `configure` and the environment add.

        `inductor_keys` returns the names that Inductor's config knows; it is called only if `options` has a key that
        is not ours. Such keys go to `inductor`; in every key, dashes stand for underscores, as torch has it.

        Raises OptionsError for a value that is not accepted and for a key that neither side knows.
        """
        given = underscored(options_of(options))
        own = {key: value for key, value in given.items() if key in OWN_KEYS}
        foreign = {key: value for key, value in given.items() if key not in OWN_KEYS}
        if foreign:
            known = inductor_keys()
            for key in foreign:
                if key not in known:
                    raise _unknown_key(key, known)
        merged: dict[str, Any] = _environment(own.keys() | _configured.keys()) | _configured | own
        return cls(**merged, inductor=tuple(foreign.items()), mode=mode)

    @property
    def leaves_unplannable(self) -> bool:
        """Whether torch partitions a graph that cannot be planned, with a warning; else that is an error."""
        return self.memory_budget is None if self.on_unplannable is None else self.on_unplannable == "warn"

    @property
    def wants_whole_baseline(self) -> bool:
        """Whether the budget is the whole peak without recomputation, however much code without it needs."""
        return isinstance(self.memory_budget, float) and self.memory_budget == 1

    @property
    def has_orders(self) -> bool:
        """Whether a policy or orders point at parts of the model."""
        return bool(self.policy or self.save or self.recompute)

    def cache_key(self) -> str:
        """Text that is equal, in every process, for options that lead to the same plan of the same graph.

        An "auto" budget also depends on the bytes that are free now: a key for its plan needs the resolved budget too.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.compare}
        values["inductor"] = dict(self.inductor)
        values["policy"] = policies.identity(policies.parse(self.policy))
        return json.dumps(stable(values), sort_keys=True)

    def resolve_budget(self, baseline_peak_bytes: int, free_bytes: int | None) -> int | None:
        """The budget in bytes, None for no bound.

        `baseline_peak_bytes`: peak without recomputation. `free_bytes`: free on the CUDA device now, None without one.
        Raises OptionsError if "auto" has no device or finds nothing free.
        """
        match self.memory_budget:
            case str():
                return self._resolve_auto(free_bytes)
            case Share(peak_bytes=budget) | Survey(budget_bytes=budget):  # whole for a graph that the survey does not know
                return budget
            case budget:
                return budget_bytes(budget, baseline_peak_bytes)

    def _resolve_auto(self, free_bytes: int | None) -> int:
        if free_bytes is None:
            raise OptionsError(
                f'memory_budget="auto" needs a CUDA device, and the model is on none. Accepted elsewhere: {FORMS_ANYWHERE}'
            )
        if free_bytes <= self.reserve:
            raise OptionsError(
                f'memory_budget="auto" leaves nothing: {format_bytes(free_bytes)} ({free_bytes} bytes) are free on the '
                f"device, and reserve={self.reserve} ({format_bytes(self.reserve)}) is to stay free. "
                "Free device memory, lower `reserve`, or give the budget in bytes."
            )
        return free_bytes - self.reserve


def configure(
    *,
    memory_budget: Budget | _Unset = _UNSET,
    reserve: int | str | _Unset = _UNSET,
    time_limit: float | _Unset = _UNSET,
    inner: str | _Unset = _UNSET,
    on_infeasible: str | _Unset = _UNSET,
    cost_model: str | _Unset = _UNSET,
    on_unplannable: str | None | _Unset = _UNSET,
    plan: str | os.PathLike[str] | Plan | Sequence[str | os.PathLike[str] | Plan] | None | _Unset = _UNSET,
    policy: Policy | str | None | _Unset = _UNSET,
    recompute_modules: Collection[str] | _Unset = _UNSET,
    save: Collection[str] | _Unset = _UNSET,
    recompute: Collection[str] | _Unset = _UNSET,
    chunk_loss: bool | int | str | _Unset = _UNSET,
    progress: bool | _Unset = _UNSET,
) -> None:
    """Set defaults for this process, for callers that can pass only the backend's name.

    Later calls add to earlier ones; `configure()` forgets them all. What is compiled already stays as it is, with a
    `BudgetWarning` where it has taken another default. Raises OptionsError, and changes nothing, for a value that is not
    accepted.
    """
    global _configured
    arguments: dict[str, Any] = {
        "memory_budget": memory_budget,
        "reserve": reserve,
        "time_limit": time_limit,
        "inner": inner,
        "on_infeasible": on_infeasible,
        "cost_model": cost_model,
        "on_unplannable": on_unplannable,
        "plan": plan,
        "policy": policy,
        "recompute_modules": recompute_modules,
        "save": save,
        "recompute": recompute,
        "chunk_loss": chunk_loss,
        "progress": progress,
    }
    given = {key: value for key, value in arguments.items() if value is not _UNSET}
    checked = Options(**given)
    _configured = _configured | {key: getattr(checked, key) for key in given} if given else {}
    shown = _configured.get("progress")
    set_default(None if shown is None else bool(shown))
    defaults.warn_if_late({key: _configured[key] for key in given})


def _environment(given: Collection[str]) -> dict[str, object]:
    """What the environment says of the keys that are not ``given``; a variable that is unset or empty says nothing."""
    found: dict[str, object] = {}
    environment.warn_of_unknown()
    variables = (ENVIRONMENT_VARIABLE, COST_MODEL_VARIABLE, POLICY_VARIABLE, PROGRESS_VARIABLE)
    budget, model, policy, progress = map(environment.said, variables)
    if budget and "memory_budget" not in given:
        found["memory_budget"] = _budget_from_text(budget)
    if model and "cost_model" not in given:
        found["cost_model"] = one_of(COST_MODELS, model, COST_MODEL_VARIABLE)
    if policy and "policy" not in given:
        found["policy"] = policies.parse(policy, POLICY_VARIABLE)
    if progress and "progress" not in given:
        found["progress"] = progress_in_environment()
    return found


def _budget_from_text(text: str) -> Budget:
    """The budget that the environment variable spells as a Python value."""
    if text.lower() == "none":
        return None
    value: object = text
    for number in (int, float):
        try:
            value = number(text)
            break
        except ValueError:
            continue
    return _normalise_budget(value, ENVIRONMENT_VARIABLE)


def _normalise_budget(value: object, name: str) -> Budget:
    """Returns ``value`` as an int (bytes), a float in (0, 1], "auto", a survey, a share or None; ``name`` is for errors."""
    if isinstance(value, Survey | Share):
        return value
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    return parse_budget(value, name, _BUDGET_FORMS)


def _normalise_reserve(value: object) -> int:
    count = text_to_bytes(value, "reserve", _RESERVE_FORMS) if isinstance(value, str) else as_int(value)
    if count is None or not 0 <= count <= MOST_BYTES:
        raise refused("reserve", value, _RESERVE_FORMS)
    return count


def _normalise_plans(value: object) -> tuple[PlanFile, ...]:
    """The plans that ``value`` names. Raises PlanFileError for one that cannot be read."""
    if value is None:
        return ()
    found = []
    for one in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(one, str | os.PathLike | Plan | PlanFile):
            raise refused("plan", one, "the path of a plan that Plan.save wrote, a Plan, or a sequence of these")
        found.append(one if isinstance(one, PlanFile) else PlanFile.of(one))
    return tuple(found)


def _normalise_policy(value: object, modules: object) -> Policy | None:
    policy = policies.parse(value)
    if not modules:
        return policy
    if not isinstance(policy, Selective):
        raise OptionsError(f'recompute_modules={modules!r} belongs to policy="selective", and the policy is {value!r}')
    return Selective(_normalise_patterns(modules, "recompute_modules"))


def _normalise_patterns(value: object, name: str) -> tuple[str, ...]:
    """A list of patterns without repetition."""
    if isinstance(value, str) or not isinstance(value, Collection):
        raise refused(name, value, _PATTERN_FORMS)
    if wrong := [pattern for pattern in value if not isinstance(pattern, str) or not pattern.strip()]:
        raise refused(name, wrong[0], _PATTERN_FORMS)
    return tuple(dict.fromkeys(value))


def _normalise_chunks(value: object) -> bool | int | str:
    if isinstance(value, bool) or value == "auto":
        return value
    count = as_int(value)
    if count is None or count < 2:
        raise refused("chunk_loss", value, _CHUNK_FORMS)
    return count


def _unknown_key(key: str, inductor_keys: Iterable[str]) -> OptionsError:
    nearest = difflib.get_close_matches(key, [*OWN_KEYS, *inductor_keys], n=3)
    hint = f"nearest: {', '.join(nearest)}" if nearest else "no known name is close"
    return OptionsError(
        f"the option {key!r} is known neither to autoremat nor to Inductor's config; {hint}. "
        f"Autoremat's own: {', '.join(OWN_KEYS)}"
    )
