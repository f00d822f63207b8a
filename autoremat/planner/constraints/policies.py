"""Defines policies: common choices of the ops that the backward recomputes.

A policy is a function of the forward that returns *regions*: sets of ops that run again when the backward reaches them. Results
of a region that ops outside read are saved. Values that the backward reads and no region recomputes are saved, too. A policy of
your own is a frozen dataclass with a ``__call__``:

    @dataclass(frozen=True)
    class EverySecond:
        def __call__(self, forward: Forward) -> list[Region]:
            return [Region(layer) for layer in forward.layers[::2]]

Pass an instance as the option ``policy``.

Patterns select parts of a model: globs of module paths, names of ops, names of tensors. A star stands for any characters,
including dots. A pattern may omit the beginning of a module path: "layers.*.mlp" also matches "model.layers.0.mlp".
"""

import difflib
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from autoremat.basics.checks import refused
from autoremat.basics.errors import OptionsError
from autoremat.basics.warn import warn_of_constraint as warn
from autoremat.planner.constraints.model_structure import Forward as Forward
from autoremat.planner.constraints.model_structure import Ops
from autoremat.planner.graph.op import Op, Scope

NEAREST = 3
"""Number of similar names that are listed for a pattern that matches nothing."""


def matches_path(path: str, pattern: str) -> bool:
    """Returns True if ``pattern`` matches a module's path or the end of it."""
    return any(fnmatchcase(f".{path}", one) for one in (pattern, f"*.{pattern}"))


def targets(op: Op) -> list[str]:
    """Returns the names of an op and of the model's op that it was decomposed from, each with and without overload."""
    names = [name for name in (op.target, op.decomposed_from) if name]
    return names + [name.rpartition(".")[0] for name in names if name.count(".") > 1]


def matches_op(op: Op, pattern: str) -> bool:
    """Returns True if ``pattern`` matches the op's target, a name of its result, or a module that it runs in."""
    if any(fnmatchcase(name, pattern) for name in (*targets(op), *op.tensor_names)):
        return True
    paths = (accumulate(scope.path.split("."), "{}.{}".format) for scope in op.scopes[-1:])  # "a", "a.b", "a.b.c"
    return any(matches_path(path, pattern) for each in paths for path in each)


def nearest(pattern: str, ops: Iterable[Op], others: Iterable[str] = ()) -> str:
    """Returns a phrase with the known names that are similar to ``pattern``. Numbers in paths are shown as stars."""
    known = dict.fromkeys(others)
    for op in ops:
        known.update(dict.fromkeys((*op.tensor_names, *targets(op))))
        for scope in op.scopes:
            path = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", scope.path)
            known.update(dict.fromkeys([path, path.rpartition("*.")[2]]))
    known.pop("", None)
    close = difflib.get_close_matches(pattern, known, n=NEAREST, cutoff=0.5)
    return f"nearest: {', '.join(map(repr, close))}" if close else "nothing there is similar"


@dataclass(frozen=True)
class Region:
    """Forward ops that are recomputed together, by number.

    With ``results_too``, results that ops outside read are not saved either. They are recomputed for their readers in the
    backward. ``form`` names the form in which results that ops outside read are kept, such as "host"; empty if the planner
    decides.
    """

    ops: Ops
    results_too: bool = False
    form: str = ""


Policy = Callable[[Forward], Sequence[Region]]
"""A policy must be hashable, and equal to policies that make the same choices. It warns its user by ``ConstraintWarning``."""


def grouped(layers: Sequence[Ops], size: int) -> list[Region]:
    """Returns regions of ``size`` consecutive layers each, with the ops between them. The last region may have fewer layers."""
    parts = (layers[start : start + size] for start in range(0, len(layers), size))
    return [Region(tuple(sorted({*range(part[0][-1], part[-1][0]), *(op for ops in part for op in ops)}))) for part in parts]


def _layers(forward: Forward, policy: Policy) -> tuple[Ops, ...]:
    if not forward.layers:
        warn(
            f"{policy} has no effect on a graph of {len(forward.ops)} forward ops: it has no layers, neither numbered modules "
            "nor ops that repeat"
        )
    return forward.layers


@dataclass(frozen=True)
class Full:
    """Recomputes every layer and saves only its input (``torch.utils.checkpoint`` around every layer)."""

    def __call__(self, forward: Forward) -> list[Region]:
        return grouped(_layers(forward, self), 1)


class _Counted:
    """A policy with one field, a number of layers or segments."""

    def __post_init__(self) -> None:
        (count,) = vars(self).values()
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise OptionsError(f"policy={self!r} is not accepted: expected a whole number > 0. Accepted: {FORMS}")


@dataclass(frozen=True)
class Uniform(_Counted):
    """Recomputes every ``layers`` consecutive layers as one region and saves only its input (Megatron's "uniform").

    Raises ``OptionsError`` unless ``layers`` is an int > 0.
    """

    layers: int

    def __call__(self, forward: Forward) -> list[Region]:
        return grouped(_layers(forward, self), self.layers)


@dataclass(frozen=True)
class Block(_Counted):
    """Recomputes the first ``layers`` layers, each alone, and saves the others (Megatron's "block").

    Raises ``OptionsError`` unless ``layers`` is an int > 0.
    """

    layers: int

    def __call__(self, forward: Forward) -> list[Region]:
        return grouped(_layers(forward, self)[: self.layers], 1)


@dataclass(frozen=True)
class Segments(_Counted):
    """Recomputes all but the last of ``count`` segments (``checkpoint_sequential``).

    The segments divide the whole forward at narrow places. The backward reads the last one first. Raises ``OptionsError``
    unless ``count`` is an int > 0.
    """

    count: int

    def __call__(self, forward: Forward) -> list[Region]:
        return [Region(ops) for ops in forward.segments(self.count)[:-1]]


@dataclass(frozen=True)
class Sqrt:
    """Like :class:`Segments`, with the square root of the number of layers as ``count``, at least 2.

    Without layers, the number of ops counts. The source is Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """

    def __call__(self, forward: Forward) -> list[Region]:
        return Segments(max(2, round(math.sqrt(len(forward.layers) or len(forward.ops)))))(forward)


@dataclass(frozen=True)
class Module:
    """The names of modules of one purpose in Megatron, Hugging Face and torch.

    ``classes`` are globs of class names, ``parts`` globs of the last component of module paths.
    """

    classes: tuple[str, ...]
    parts: tuple[str, ...]
    results_too: bool = False
    """True if Megatron discards the module's results as well ("output-discarding checkpointing")."""

    def __call__(self, scope: Scope) -> bool:
        """Returns True if the module of ``scope`` has this purpose."""
        last = scope.path.rpartition(".")[2]
        return any(fnmatchcase(scope.kind, c) for c in self.classes) or any(fnmatchcase(last, part) for part in self.parts)


MODULES = {
    "core_attn": Module(("*CoreAttention*", "*DotProductAttention*"), ("core_attn*", "core_attention*")),
    "mlp": Module(("*MLP", "*Mlp", "*FeedForward*"), ("mlp", "ffn", "ff", "feed_forward", "feedforward")),
    "layernorm": Module(("*LayerNorm*", "*RMSNorm*", "*RmsNorm*"), ("*norm", "*layernorm*", "ln_*"), results_too=True),
    "moe": Module(("*MoE", "*MoeBlock", "*MoELayer"), ("moe", "block_sparse_moe")),
    "moe_act": Module((), ("act", "act_fn", "activation*"), results_too=True),
    "shared_experts": Module(("*SharedExpert*",), ("shared_expert", "shared_experts")),
    "mla_up_proj": Module((), ("q_b_proj", "kv_b_proj", "linear_q_up_proj", "linear_kv_up_proj"), results_too=True),
}
"""Megatron's names of the parts that can be recomputed."""


@dataclass(frozen=True)
class Selective:
    """Recomputes only the inside of certain modules, for each call of a module alone.

    ``modules`` are names of ``MODULES`` or globs of module paths. Some names have rules of their own:

    - "core_attn": the attention core itself, if no module has such a name.
    - "moe": also any module that has ``experts``.
    - "moe_act": only inside ``experts``.
    - "mlp": without modules that have ``experts``.
    - "mla_up_proj": includes the ops up to the attention, such as the rotary embedding.

    Raises ``OptionsError`` for an unknown name and for an empty ``modules``.
    """

    modules: tuple[str, ...] = ("core_attn",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", tuple(dict.fromkeys(self.modules)))
        unknown = [name for name in self.modules if name not in MODULES and not set("*?[.") & set(name)]
        if not self.modules or unknown:
            what = f"the module {unknown[0]!r}" if unknown else "an empty list of modules"
            raise OptionsError(f'policy="selective:...": {what} is not accepted. Accepted: a list of {_MODULE_FORMS}')

    def __call__(self, forward: Forward) -> list[Region]:
        found: list[Region] = []
        for name in self.modules:
            regions = _regions_of(forward, name)
            if not regions:
                warn(
                    f'policy="selective:...": {name!r} matches no module in a graph of {len(forward.ops)} forward ops; '
                    f"{nearest(name, forward.ops, MODULES)}"
                )
            found += regions
        return found


def _regions_of(forward: Forward, name: str) -> list[Region]:
    if name not in MODULES:
        return [Region(ops) for ops in forward.calls_of(lambda scope: matches_path(scope.path, name))]
    module = MODULES[name]
    with_experts = {s.path.partition(".experts")[0] for scopes in forward.scopes for s in scopes if ".experts" in s.path}
    wanted: dict[str, Callable[[Scope], bool]] = {
        "mlp": lambda scope: module(scope) and scope.path not in with_experts and not MODULES["moe"](scope),
        "moe": lambda scope: module(scope) or scope.path in with_experts,
        "moe_act": lambda scope: module(scope) and ".experts" in scope.path,
    }
    calls = forward.calls_of(wanted.get(name, module))
    if name == "core_attn" and not calls:
        calls = forward.attention_cores
    if name == "mla_up_proj":  # with the rotary embedding, because attention reads, and so saves, its result
        cores = frozenset(op for region in _regions_of(forward, "core_attn") for op in region.ops)
        calls = tuple(forward.up_to_products(ops, cores) for ops in calls)
    return [Region(ops, module.results_too) for ops in calls]


_MODULE_FORMS = f'{", ".join(MODULES)}, or globs of module paths such as "*.mlp"'

# -- from options ------------------------------------------------------------------------------------------------------

FIXED: dict[str, Callable[[], Policy]] = {"full": Full, "sqrt": Sqrt, "selective": Selective}
"""Policies that options write as a name alone."""
COUNTED: dict[str, Callable[[int], Policy]] = {"uniform": Uniform, "block": Block, "segments": Segments}
"""Policies that options write as "name:number"."""

FORMS = (
    ", ".join([*(f'"{name}"' for name in FIXED), *(f'"{name}:4"' for name in COUNTED)])
    + ' (any number > 0), "selective:mlp,layernorm", a frozen dataclass as in autoremat.policies, or None'
)


def parse(value: Any, name: str = "policy") -> Policy | None:
    """Returns the policy for the value of an option: a policy, its name, or None. Raises ``OptionsError`` for anything else."""
    if value is None or (callable(value) and not isinstance(value, type)):
        identity(value)
        return value
    if isinstance(value, str):
        kind, _, argument = value.strip().partition(":")
        if value.strip().lower() == "none":
            return None
        if kind in FIXED and not argument:
            return FIXED[kind]()
        if kind in COUNTED and re.fullmatch("[0-9]+", argument):
            return COUNTED[kind](int(argument))
        if kind == "selective":
            return Selective(tuple(part.strip() for part in argument.split(",")))
    raise refused(name, value, FORMS)


def identity(policy: Policy | None) -> object:
    """Returns data that identifies a policy in every process: its ``uuid()``, or its class's source and its fields.

    Raises ``OptionsError`` for a policy that has neither, because torch's caches would confuse it with others.
    """
    if policy is None:
        return None
    if callable(uuid := getattr(policy, "uuid", None)):
        return uuid()
    written = policy if inspect.isfunction(policy) else type(policy)
    plain = inspect.isfunction(policy) and policy.__closure__ is None
    if isinstance(policy, Hashable) and (plain or is_dataclass(policy)):
        try:
            source = hashlib.sha256(inspect.getsource(written).encode()).hexdigest()
        except (OSError, TypeError):
            source = ""
        if source:
            return [f"{written.__module__}.{written.__qualname__}", "" if plain else repr(policy), source]
    raise OptionsError(
        f"policy={policy!r} is not accepted: caches must tell it from others. Make it a frozen dataclass or a function without "
        "a closure, written in a file, or give it a uuid() method"
    )
