"""Defines ``Options``: the user's options, checked and normalised once, where they enter.

For each option, the first source that sets it counts: the ``options`` of ``torch.compile``, then ``configure``, then the
environment. The environment can set the budget, the cost model, the policy and progress (``environment.py``).
"""

import difflib
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from autoremat.basics import environment
from autoremat.basics.checks import (
    FORMS_ANYWHERE,
    MOST_BYTES,
    MOST_PARTS,
    as_int,
    as_number,
    bytes_given,
    count_given,
    flag,
    likely_share,
    one_of,
    options_of,
    parse_budget,
    positive_seconds,
    refuse_likely_percent,
    refused,
    text_to_bytes,
    underscored,
)
from autoremat.basics.errors import OptionsError, OptionWarning
from autoremat.basics.progress import progress_wanted, set_default
from autoremat.basics.units import BYTE_FORMS, parse_percent
from autoremat.basics.warn import warn_user
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.constraints import SavePattern
from autoremat.planner.constraints.policies import Policy
from autoremat.planner.graph.op import BITS, DEVICE, HOST, SHARDS
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.ledger import OpenCalls
from autoremat.planner.multigraph.step_profile import Budget, StepProfile
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_file import PlanFile

COST_MODELS = ("roofline", "calibrated")
STORES = (DEVICE, HOST, BITS, SHARDS)

BUDGET_FORMS = (
    f'{FORMS_ANYWHERE}; "auto" (what is free on the CUDA device, less `auto_headroom`); an `autoremat.profile_step`; '
    "an `autoremat.device_budget`"
)
HEADROOM_FORMS = f"an int >= 0 (bytes) or a string such as {BYTE_FORMS}"
HOST_FORMS = f'an int > 0 (bytes), a string such as {BYTE_FORMS}, "auto" or None'
STORE_FORMS = f"a list of names among {', '.join(map(repr, STORES))} that has {DEVICE!r}, or None"
SLOWDOWN_FORMS = 'a share in [0, 1], such as 0.03 or "3%"; "free" (costs nothing measurable); None (no bound)'
FREE = 0.005
"""Share of the step that ``max_slowdown="free"`` allows. Repeated measurements of one step differ by more."""
PLAN_FORMS = "the path of a plan that Plan.save wrote, a Plan, a list of these, or None (search for a plan)"
PATTERN_FORMS = 'a list of globs of module paths ("layers.*.mlp"), ops ("aten.mm") and names of tensors'
SAVE_FORMS = f"{PATTERN_FORMS}, or a mapping from such patterns to forms among 'device', 'host' and 'bits'"
PARTS_FORMS = f'"auto", True, False or a number of parts, an int from 2 to {MOST_PARTS}'
TILE_FORMS = f'"auto", False or a number of tiles, an int from 2 to {MOST_PARTS}'
IN_FLIGHT_FORMS = f"an int from 1 to {MOST_PARTS}, or None to read it from the running pipeline schedule"
BANDWIDTH_FORMS = 'text such as "50GB/s", a number of bytes per second >= 1, or None'
AGREEMENT_FORMS = '"auto", "off" or a list of ranks, such as torch.distributed.get_process_group_ranks(group)'

VARIABLES = {
    "memory_budget": environment.BUDGET,
    "cost_model": environment.COST_MODEL,
    "policy": environment.POLICY,
    "progress": environment.PROGRESS,
}
"""The variables of the environment that set options, by the option."""


# -- checks: each returns the value of the option ``name`` in the form in which ``Options`` holds it --------------------------


def _or_word(words: tuple[bool | str, ...], check: Callable[[object, str], Any], value: object, name: str) -> Any:
    """Returns ``value`` if it is one of ``words``, which are booleans or lower-case texts, else what ``check`` makes of it."""
    given = value.strip().lower() if isinstance(value, str) else value
    return given if isinstance(given, bool | str) and given in words else check(value, name)


def _budget(value: object, name: str) -> Budget:
    return value if isinstance(value, StepProfile | DeviceBudget) else parse_budget(value, name, BUDGET_FORMS)


def _forms(value: object, name: str) -> tuple[str, ...]:
    given = list(value) if isinstance(value, list | tuple | Set) else []
    if DEVICE not in given or any(one not in STORES for one in given):
        raise refused(name, value, STORE_FORMS)
    return tuple(one for one in STORES if one in given)


def _bandwidth(value: object, name: str) -> float:
    if isinstance(value, str):
        return float(text_to_bytes(value.strip().removesuffix("/s"), name, BANDWIDTH_FORMS))
    if not 1 <= (number := as_number(value)) <= MOST_BYTES:
        raise refused(name, value, BANDWIDTH_FORMS)
    return number


def _slowdown(value: object, name: str) -> float:
    if isinstance(value, str) and value == "free":
        return FREE
    share = as_number(parse_percent(value) if isinstance(value, str) else value)
    if 1 < share <= 100:
        raise OptionsError(f"max_slowdown={value!r} is above 1. {likely_share(share)}Accepted: {SLOWDOWN_FORMS}")
    if not 0 <= share <= 1:
        raise refused(name, value, SLOWDOWN_FORMS)
    return share


def _plans(value: object, name: str) -> tuple[PlanFile, ...]:
    given: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    for one in given or [value]:
        if not isinstance(one, str | os.PathLike | Plan | PlanFile) or (isinstance(one, str) and not one.strip()):
            raise refused(name, one, PLAN_FORMS)
    return tuple(one if isinstance(one, PlanFile) else PlanFile.of(one) for one in given)


def _saves(value: object, name: str, forms: str = SAVE_FORMS, stores: tuple[str, ...] = STORES) -> tuple[SavePattern, ...]:
    given = [*value.items()] if isinstance(value, Mapping) and stores else value
    if isinstance(given, str) or not isinstance(given, Sequence | Set):
        raise refused(name, value, forms)
    for one in given:
        pattern, form = one if stores and isinstance(one, tuple) and len(one) == 2 else (one, DEVICE)
        if not isinstance(pattern, str) or not pattern.strip() or form not in (*stores, DEVICE):
            raise refused(name, one, forms)
    return tuple(dict.fromkeys(given))


def _ranks(value: object, name: str) -> tuple[int, ...]:
    ranks = [as_int(one) for one in value] if isinstance(value, list | tuple | range) else []
    if not ranks or any(rank is None or rank < 0 for rank in ranks):
        raise refused(name, value, AGREEMENT_FORMS)
    return tuple(sorted({rank for rank in ranks if rank is not None}))


_parts = partial(_or_word, ("auto", True, False), partial(count_given, forms=PARTS_FORMS, least=2))
_tiles = partial(_or_word, ("auto", False), partial(count_given, forms=TILE_FORMS, least=2))


_configured: dict[str, object] = {}
_taken: dict[str, object] = {}
"""For each option, the default that the latest compiled graph used."""
_is_left: Callable[[], bool] = bool
"""Returns False once the compiled graphs are gone, because torch was reset."""


def _option(default: Any, check: Callable[[Any, str], Any], compare: bool = True) -> Any:
    """Returns the field of an option. ``check`` returns a value, of the option of that name, in its normal form."""
    return field(default=default, compare=compare, metadata={"check": check})


@dataclass(frozen=True, slots=True)
class Options:
    """All options of a compilation, frozen, as normalised values: bytes are ints, even if given as "6GiB".

    The text below a field has its values, a bar, and its effect: the [table of options](options.md#table-of-options) is made
    of these. ``inductor`` holds pairs for Inductor's config, sorted by key, and ``mode`` is that of ``torch.compile``. Raises
    OptionsError for a value that is not accepted.
    """

    memory_budget: Budget = _option(None, partial(_or_word, ("auto",), _budget))
    """bytes, text, share, `"auto"`, profile, `None` | Bounds the peak of forward and backward. [Forms](budgets.md#forms)"""
    max_slowdown: float | None = _option(None, _slowdown)
    """share such as `0.03` or `"3%"`, `"free"`, `None` |
    Bounds the time that the step may take beyond that without a budget. [Time](budgets.md#a-budget-of-time)"""
    host_memory: int | str | None = _option(None, partial(_or_word, ("auto",), partial(bytes_given, forms=HOST_FORMS, least=1)))
    """bytes or text such as `"64GiB"`, `"auto"`, `None` |
    Lets saved tensors wait in the memory of the host. [Offload](offload.md)"""
    store: tuple[str, ...] | None = _option(None, _forms)
    """list of `"device"`, `"host"`, `"bits"` and `"shards"`, `None` |
    Allows these forms of saved tensors. [Offload](offload.md#options), [shards](several-processes.md#shards)"""
    auto_headroom: int = _option(512 * 2**20, partial(bytes_given, forms=HEADROOM_FORMS))  # CUDA context, cuBLAS, fragments
    """bytes or text | Stays free on the device under `memory_budget="auto"`."""
    time_limit: float = _option(10.0, positive_seconds)
    """seconds above 0, at most 10⁷ |
    Limits one search, by [counted work](planner.md#equal-plans): equal requests get equal plans."""
    compiler: str = _option("inductor", partial(one_of, ("inductor", "aot_eager")))
    """`"inductor"`, `"aot_eager"` | Compiles the planned graphs, or runs them uncompiled."""
    on_infeasible: str | None = _option(None, partial(one_of, ("raise", "best_effort")))
    """`"raise"`, `"best_effort"`, `None` |
    If no plan fits, raises `BudgetInfeasible`, or runs the plan of the least memory and warns. `None` raises with bytes
    alone."""
    on_planning_error: str | None = _option(None, partial(one_of, ("fallback", "raise")))
    """`"raise"`, `"fallback"`, `None` |
    If a graph cannot be planned, raises `PlanningError`, or leaves it to torch. `None` raises with a budget."""
    cost_model: str = _option("roofline", partial(one_of, COST_MODELS))
    """`"roofline"`, `"calibrated"` | Selects the source of estimated seconds. [Cost models](#cost-models)"""
    plan: tuple[PlanFile, ...] | None = _option(None, _plans)
    """path, `Plan`, or a list of these | Applies stored plans, and plans nothing else. [Plans](report.md#store-a-plan)"""
    policy: Policy | None = _option(None, policies.parse)
    """text, policy object, `None` |
    Recomputes parts of the model as checkpointing by hand does. [Policies](policies.md#policies)"""
    save: tuple[SavePattern, ...] = _option((), _saves)
    """list of patterns, or mapping from patterns to forms |
    Saves the matching tensors. [Constraints](policies.md#constraints), [by name](offload.md#by-name)"""
    recompute: tuple[str, ...] = _option((), partial(_saves, forms=PATTERN_FORMS, stores=()))
    """list of patterns | Recomputes the matching tensors. [Constraints](policies.md#constraints)"""
    chunk_loss: bool | int | str = _option("auto", _parts)
    """`"auto"`, `True`, `False`, an int from 2 to 65,536 |
    Chunks the output projection and the loss over tokens. [Chunked loss](chunked-loss.md)"""
    tiles: bool | int | str = _option(False, _tiles)
    """`"auto"`, `False`, an int from 2 to 65,536 | Runs MLPs tile by tile. [Tiles](chunked-loss.md#tiles)"""
    early_gradients: bool | int | str = _option("auto", _parts)
    """`"auto"`, `True`, `False`, an int from 2 to 65,536 |
    Compiles a graph in so many parts, so that hooks on gradients run between them.
    [Optimizer in the backward](steps.md#optimizer-in-the-backward)"""
    hooks_free_gradients: bool = _option(False, flag)
    """`True`, `False` | Says that each such hook sets the gradient to `None`."""
    in_flight: int | None = _option(None, partial(count_given, forms=IN_FLIGHT_FORMS))
    """an int from 1 to 65,536, `None` |
    Counts the saved tensors of so many open calls. [Pipelines](several-processes.md#pipelines)"""
    accumulate: bool | None = _option(None, flag)
    """`True`, `False`, `None` |
    Counts the gradients of earlier micro-batches. `None` means `True` with `in_flight`, else `False`."""
    interconnect_bandwidth: float | None = _option(None, _bandwidth)
    """text such as `"50GB/s"`, bytes per second, `None` |
    Prices collectives by this rate of one rank. `None` means that of data sheets."""
    interconnect_latency: float | None = _option(None, positive_seconds)
    """seconds above 0, `None` | Adds these seconds to the price of each collective."""
    agreement: str | tuple[int, ...] = _option("auto", partial(_or_word, ("auto", "off"), _ranks), compare=False)
    """`"auto"`, `"off"`, a list of ranks |
    Lets ranks that share a graph take one plan. [Agreement](several-processes.md#agreement)"""
    progress: bool = _option(True, flag, compare=False)
    """`True`, `False` | Shows a status line during compilation."""
    inductor: tuple[tuple[str, object], ...] = ()
    mode: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str | None):
            raise refused("mode", self.mode, "a mode of torch.compile, a string, or None")
        normalised = {"inductor": tuple(sorted(self.inductor, key=operator.itemgetter(0)))}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in OWN_KEYS and not (value is None and one.default is None):
                normalised[one.name] = one.metadata["check"](value, one.name)
        for name, value in normalised.items():
            object.__setattr__(self, name, value)  # the only change of a frozen instance, still during its construction
        _refuse_contradictions(self)

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
        refuse_likely_percent(own.get("memory_budget"), "memory_budget", BUDGET_FORMS)
        foreign = {key: value for key, value in given.items() if key not in OWN_KEYS}
        if foreign:
            known = inductor_keys()
            for key in foreign:
                if key not in known:
                    raise _unknown_key(key, known)
        merged: dict[str, Any] = _environment(own.keys() | _configured.keys()) | _configured | own
        return cls(**merged, inductor=tuple(foreign.items()), mode=mode)

    @property
    def open_calls(self) -> OpenCalls:
        """The calls that are open at once, as far as the options tell."""
        in_pipeline = self.in_flight is not None
        accumulates = in_pipeline if self.accumulate is None else self.accumulate
        return OpenCalls(self.in_flight or 1, accumulates, sends_gradients=in_pipeline)


OWN_KEYS = tuple(one.name for one in fields(Options) if one.metadata)
"""The names of the options."""


def configure(**options: Any) -> None:
    """Sets defaults for this process, for callers that can pass only the backend's name.

    Later calls add to earlier ones; ``configure()`` without arguments removes all defaults. Graphs that are already compiled
    keep their options. An ``OptionWarning`` names the defaults that come too late for them. Raises OptionsError for an option
    or a value that is not accepted, and then changes nothing.
    """
    global _configured
    if unknown := [key for key in options if key not in OWN_KEYS]:
        raise _unknown_key(unknown[0], ())
    refuse_likely_percent(options.get("memory_budget"), "memory_budget", BUDGET_FORMS)
    checked = Options(**options)
    _configured = _configured | {key: getattr(checked, key) for key in options} if options else {}
    shown = _configured.get("progress")
    set_default(None if shown is None else bool(shown))
    if not _is_left():
        _taken.clear()
    late = [key for key in options if key in _taken and _taken[key] != _configured[key]]
    if late:
        warn_user(
            f"configure({', '.join(f'{key}=...' for key in late)}) comes too late for what is compiled already, which stays "
            "as it is. Call configure before the first step, or torch.compiler.reset() now, so that all is compiled again",
            OptionWarning,
        )


def note_compiled(options: Options, given: Mapping[str, object] | None, is_left: Callable[[], bool]) -> None:
    """Records the defaults that a graph used, for the warning of ``configure``; valid as long as ``is_left()`` is True."""
    global _is_left
    if not _is_left():
        _taken.clear()
    own, _is_left = underscored(options_of(given)), is_left
    _taken.update({key: getattr(options, key) for key in OWN_KEYS if key not in (*own, "agreement", "progress")})


def _environment(given: Collection[str]) -> dict[str, object]:
    environment.warn_of_unknown()
    checks = {one.name: one.metadata["check"] for one in fields(Options) if one.name in VARIABLES}
    said = {name: environment.said(variable) for name, variable in VARIABLES.items() if name not in given}
    found = {name: checks[name](text, VARIABLES[name]) for name, text in said.items() if text and name != "progress"}
    return found | ({"progress": progress_wanted()} if said.get("progress") else {})


def _unknown_key(key: str, inductor_keys: Iterable[str]) -> OptionsError:
    nearest = difflib.get_close_matches(key, [*OWN_KEYS, *inductor_keys], n=3)
    hint = f"nearest: {', '.join(nearest)}" if nearest else "no known name is close"
    return OptionsError(
        f"the option {key!r} is known neither to autoremat nor to Inductor's config; {hint}. "
        f"Autoremat's own: {', '.join(OWN_KEYS)}"
    )


def _refuse_contradictions(options: Options) -> None:
    if options.plan and (options.policy or options.save or options.recompute or options.max_slowdown is not None):
        others = "policy, save, recompute and max_slowdown"
        raise OptionsError(f"`plan` applies a stored plan as it is: {others} cannot be given beside it")
    if options.max_slowdown is not None and isinstance(options.memory_budget, StepProfile):
        raise OptionsError(
            "max_slowdown bounds the time of one graph, and a step profile divides one budget among several: leave one of "
            "them out. `StepProfile.within(bytes).added_seconds` shows the time of the whole step under another budget"
        )
    store, host = options.store, options.host_memory
    if store is not None and (HOST in store) is (host is None):
        raise OptionsError(
            f"store={store!r} and host_memory={host!r} contradict each other: name {HOST!r} in `store` and give a bound in "
            '`host_memory`, such as "64GiB" or "auto", or neither'
        )
    allowed = store or ((DEVICE,) if host is None else STORES)
    for pattern, form in (one for one in options.save if not isinstance(one, str)):
        if form not in allowed:
            raise OptionsError(
                f"save={{{pattern!r}: {form!r}}} names a form that is not allowed: allowed are {list(allowed)}. Name it in "
                f"`store`{' and give a bound in `host_memory`' if form == HOST else ''}"
            )
