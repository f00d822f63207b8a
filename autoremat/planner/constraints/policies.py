"""Policies: which parts of the forward run again in the backward, as practice knows them.

A policy is a function of the forward that returns *regions*: sets of ops that run again when the backward reaches them. What
a region makes for ops outside is saved; so is all that no region recomputes and the backward reads. To write one, make a
frozen dataclass with a ``__call__``:

    @dataclass(frozen=True)
    class EverySecond:
        def __call__(self, forward: Forward) -> list[Region]:
            return [Region(layer) for layer in forward.layers[::2]]

and pass an instance as ``policy``. (:mod:`autoremat.planner.search.baselines` has fixed plans of graphs that have no modules.)
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from autoremat.basics.errors import ConstraintWarning, OptionsError
from autoremat.planner.constraints.model_structure import Forward as Forward
from autoremat.planner.constraints.model_structure import Ops
from autoremat.planner.constraints.patterns import matches_path, nearest
from autoremat.planner.graph.graph import Scope


@dataclass(frozen=True)
class Region:
    """Numbers of forward ops that run again together. With ``results_too``, what they make for others is not saved either:
    it is made again for its readers in the backward."""

    ops: Ops
    results_too: bool = False


Policy = Callable[[Forward], Sequence[Region]]
"""Hashable, and equal to what makes the same choices. What a policy has to say to the user it says by ``ConstraintWarning``."""


def grouped(layers: Sequence[Ops], size: int) -> list[Region]:
    """Regions of ``size`` consecutive layers each, with the ops between them; the last may have fewer."""
    parts = (layers[start : start + size] for start in range(0, len(layers), size))
    return [Region(tuple(sorted({*range(part[0][-1], part[-1][0]), *(op for ops in part for op in ops)}))) for part in parts]


def _layers(forward: Forward, policy: Policy) -> tuple[Ops, ...]:
    if not forward.layers:
        warnings.warn(
            f"{policy} has no effect on a graph of {len(forward.ops)} forward ops: it has no layers, neither numbered modules "
            "nor ops that repeat",
            ConstraintWarning,
            stacklevel=2,
        )
    return forward.layers


@dataclass(frozen=True)
class Full:
    """Every layer is recomputed: of each only its input is saved (``torch.utils.checkpoint`` around every layer)."""

    def __call__(self, forward: Forward) -> list[Region]:
        return grouped(_layers(forward, self), 1)


@dataclass(frozen=True)
class Uniform:
    """Every ``layers`` consecutive layers are one region: of each only the input is saved (Megatron's "uniform")."""

    layers: int

    def __post_init__(self) -> None:
        _check_count(self, self.layers)

    def __call__(self, forward: Forward) -> list[Region]:
        return grouped(_layers(forward, self), self.layers)


@dataclass(frozen=True)
class Block:
    """The first ``layers`` layers are recomputed, each by itself; the others are kept (Megatron's "block")."""

    layers: int

    def __post_init__(self) -> None:
        _check_count(self, self.layers)

    def __call__(self, forward: Forward) -> list[Region]:
        return grouped(_layers(forward, self)[: self.layers], 1)


@dataclass(frozen=True)
class Segments:
    """``count`` stretches of the whole forward, cut where little crosses; all but the last, which the backward reads first,
    are recomputed (``checkpoint_sequential``)."""

    count: int

    def __post_init__(self) -> None:
        _check_count(self, self.count)

    def __call__(self, forward: Forward) -> list[Region]:
        return [Region(ops) for ops in forward.segments(self.count)[:-1]]


@dataclass(frozen=True)
class Sqrt:
    """As :class:`Segments`, as many as the root of the number of layers, or of ops where there are no layers (Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost", 2016)."""

    def __call__(self, forward: Forward) -> list[Region]:
        return Segments(max(2, round(math.sqrt(len(forward.layers) or len(forward.ops)))))(forward)


@dataclass(frozen=True)
class Module:
    """How modules of one purpose are called in Megatron, Hugging Face and torch: globs of class names and of the last part of
    paths."""

    classes: tuple[str, ...]
    parts: tuple[str, ...]
    results_too: bool = False
    """Whether Megatron discards the module's results as well ("output-discarding checkpointing")."""

    def __call__(self, scope: Scope) -> bool:
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
"""Megatron's names of what may be recomputed."""


@dataclass(frozen=True)
class Selective:
    """Only the insides of certain modules are recomputed, for each call of a module by itself.

    ``modules`` are names of ``MODULES`` or globs of module paths. Without a module of that name, "core_attn" is the core of
    attention itself. "moe" is also any module that has ``experts``, "moe_act" counts only inside ``experts``, and "mlp"
    leaves out what has them. "mla_up_proj" reaches up to the attention, over the rotary embedding.
    """

    modules: tuple[str, ...] = ("core_attn",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", tuple(dict.fromkeys(self.modules)))
        unknown = [name for name in self.modules if name not in MODULES and not set("*?[.") & set(name)]
        if not self.modules or unknown:
            what = f"the module {unknown[0]!r}" if unknown else "an empty list of modules"
            raise OptionsError(f"recompute_modules: {what} is not accepted. Accepted: a list of {_MODULE_FORMS}")

    def __call__(self, forward: Forward) -> list[Region]:
        found: list[Region] = []
        for name in self.modules:
            regions = _regions_of(forward, name)
            if not regions:
                warnings.warn(
                    f"recompute_modules: {name!r} matches no module in a graph of {len(forward.ops)} forward ops; "
                    f"{nearest(name, forward.ops, MODULES)}",
                    ConstraintWarning,
                    stacklevel=2,
                )
            found += regions
        return found


def _regions_of(forward: Forward, name: str) -> list[Region]:
    """A region for each call of the modules that ``name`` stands for."""
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
    if name == "mla_up_proj":  # with the rotary embedding: what attention reads, and so keeps, is the result of that
        cores = frozenset(op for region in _regions_of(forward, "core_attn") for op in region.ops)
        calls = tuple(forward.up_to_products(ops, cores) for ops in calls)
    return [Region(ops, module.results_too) for ops in calls]


_MODULE_FORMS = f'{", ".join(MODULES)}, or globs of module paths such as "*.mlp"'

# -- from options ------------------------------------------------------------------------------------------------------

COUNTED: dict[str, Callable[[int], Policy]] = {"uniform": Uniform, "block": Block, "segments": Segments}
"""Policies written as "name:number"."""

FORMS = (
    '"full", "sqrt", "uniform:4", "block:4", "segments:4" (any number > 0), "selective", "selective:mlp,layernorm", a frozen '
    "dataclass as in autoremat.policies, or None"
)


def parse(value: Any, name: str = "policy") -> Policy | None:
    """The policy that an option stands for: itself, or written as text. Raises ``OptionsError`` for anything else."""
    if value is None or (callable(value) and not isinstance(value, type)):
        identity(value)
        return value
    if isinstance(value, str):
        kind, _, argument = value.strip().partition(":")
        if value.strip().lower() == "none":
            return None
        if kind in ("full", "sqrt") and not argument:
            return Full() if kind == "full" else Sqrt()
        if kind in COUNTED and re.fullmatch("[0-9]+", argument):
            return COUNTED[kind](int(argument))
        if kind == "selective":
            return Selective(tuple(part.strip() for part in argument.split(","))) if argument else Selective()
    raise OptionsError(f"{name}={value!r} is not accepted. Accepted: {FORMS}")


def identity(policy: Policy | None) -> object:
    """What tells a policy from any other in every process: its ``uuid()``, or its class's source and its fields.

    Raises ``OptionsError`` for a policy of which neither is to be had: torch's caches would mix it up with others.
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


def _check_count(policy: Policy, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise OptionsError(f"policy={policy!r} is not accepted: expected a whole number > 0. Accepted: {FORMS}")
