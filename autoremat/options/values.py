"""Checks the values of single options and returns them in the form in which ``Options`` holds them."""

import os
from collections.abc import Mapping, Sequence, Set
from numbers import Real

from autoremat.basics.checks import (
    FORMS_ANYWHERE,
    MOST_BYTES,
    MOST_PARTS,
    as_float,
    as_int,
    bytes_given,
    count_given,
    likely_share,
    parse_budget,
    refused,
    text_to_bytes,
)
from autoremat.basics.errors import OptionsError
from autoremat.basics.units import BYTE_FORMS, parse_percent
from autoremat.planner.constraints.constraints import SavePattern
from autoremat.planner.graph.op import BITS, DEVICE, HOST, SHARDS
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.step_profile import Budget, StepProfile
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_file import PlanFile
from autoremat.planner.settings import settings

BUDGET_FORMS = (
    f'{FORMS_ANYWHERE}; "auto" (what is free on the CUDA device, less `auto_headroom`); an `autoremat.profile_step`; '
    "an `autoremat.device_budget`"
)
PATTERN_FORMS = 'a list of globs of module paths ("layers.*.mlp"), ops ("aten.mm") and names of tensors'
SAVE_FORMS = f"{PATTERN_FORMS}, or a mapping from such patterns to forms among 'device', 'host' and 'bits'"
PLAN_FORMS = "the path of a plan that Plan.save wrote, a Plan, a list of these, or None (search for a plan)"
PARTS_FORMS = f'"auto", True, False or a number of parts, an int from 2 to {MOST_PARTS}'
TILE_FORMS = f'"auto", False or a number of tiles, an int from 2 to {MOST_PARTS}'
BANDWIDTH_FORMS = 'text such as "50GB/s", a number of bytes per second >= 1, or None'
AGREEMENT_FORMS = '"auto", "off" or a list of ranks, such as torch.distributed.get_process_group_ranks(group)'
IN_FLIGHT_FORMS = f"an int from 1 to {MOST_PARTS}, or None to read it from the running pipeline schedule"
SLOWDOWN_FORMS = 'a share in [0, 1], such as 0.03 or "3%"; "free" (costs nothing measurable); None (no bound)'
HOST_FORMS = f'an int > 0 (bytes), a string such as {BYTE_FORMS}, "auto" or None'
STORES = (DEVICE, HOST, BITS, SHARDS)
STORE_FORMS = f"a list of names among {', '.join(map(repr, STORES))} that has {DEVICE!r}, or None"
HEADROOM_FORMS = f"an int >= 0 (bytes) or a string such as {BYTE_FORMS}"


def budget(value: object, name: str) -> Budget:
    """Returns ``value`` as bytes (an int), a share (a float), "auto", a step profile, a device budget or None."""
    if isinstance(value, StepProfile | DeviceBudget):
        return value
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    return parse_budget(value, name, BUDGET_FORMS)


def headroom(value: object, name: str) -> int:
    """Returns the auto headroom in bytes."""
    return bytes_given(value, name, HEADROOM_FORMS)


def host_memory(value: object, name: str) -> int | str:
    """Returns the option ``host_memory`` as bytes, "auto" or None."""
    is_auto = isinstance(value, str) and value.strip().lower() == "auto"
    return "auto" if is_auto else bytes_given(value, name, HOST_FORMS, least=1)


def forms(value: object, name: str) -> tuple[str, ...]:
    """Returns the option ``store`` as names in the sequence of :data:`STORES`."""
    given = list(value) if isinstance(value, list | tuple | Set) else []
    if DEVICE not in given or any(one not in STORES for one in given):
        raise refused(name, value, STORE_FORMS)
    return tuple(one for one in STORES if one in given)


def bandwidth(value: object, name: str) -> float:
    """Returns the option ``interconnect_bandwidth`` in bytes per second."""
    if isinstance(value, str):
        return float(text_to_bytes(value.strip().removesuffix("/s"), name, BANDWIDTH_FORMS))
    if isinstance(value, bool) or not isinstance(value, Real) or not 1 <= as_float(value) <= MOST_BYTES:
        raise refused(name, value, BANDWIDTH_FORMS)
    return as_float(value)


def slowdown(value: object, name: str) -> float:
    """Returns the option ``max_slowdown`` as a share of the time of the plan without a budget."""
    if isinstance(value, str) and value == "free":
        return settings.free_slowdown
    share = parse_percent(value) if isinstance(value, str) else value
    if isinstance(share, bool) or not isinstance(share, Real):
        raise refused(name, value, SLOWDOWN_FORMS)
    share = as_float(share)
    if 1 < share <= 100:
        raise OptionsError(f"max_slowdown={value!r} is above 1. {likely_share(share)}Accepted: {SLOWDOWN_FORMS}")
    if not 0 <= share <= 1:
        raise refused(name, value, SLOWDOWN_FORMS)
    return share


def plans(value: object, name: str) -> tuple[PlanFile, ...]:
    """Returns the plans that ``value`` names. Raises PlanFileError for one that cannot be read."""
    given = value if isinstance(value, list | tuple) else [value]
    if not given:
        raise refused(name, value, PLAN_FORMS)
    found = []
    for one in given:
        if not isinstance(one, str | os.PathLike | Plan | PlanFile) or (isinstance(one, str) and not one.strip()):
            raise refused(name, one, PLAN_FORMS)
        found.append(one if isinstance(one, PlanFile) else PlanFile.of(one))
    return tuple(found)


def saves(value: object, name: str) -> tuple[SavePattern, ...]:
    """Returns the option ``save``: patterns, and pairs of a pattern and the form in which its tensors are kept."""
    given = [*value.items()] if isinstance(value, Mapping) else value
    if isinstance(given, str) or not isinstance(given, Sequence | Set):
        raise refused(name, value, SAVE_FORMS)
    for one in given:
        pattern, form = one if isinstance(one, tuple) and len(one) == 2 else (one, DEVICE)
        if not isinstance(pattern, str) or not pattern.strip() or form not in STORES:
            raise refused(name, one, SAVE_FORMS)
    return tuple(dict.fromkeys(given))


def patterns(value: object, name: str) -> tuple[str, ...]:
    """Returns the patterns without repetition."""
    if isinstance(value, str) or not isinstance(value, Sequence | Set):
        raise refused(name, value, PATTERN_FORMS)
    if wrong := [pattern for pattern in value if not isinstance(pattern, str) or not pattern.strip()]:
        raise refused(name, wrong[0], PATTERN_FORMS)
    return tuple(dict.fromkeys(value))


def parts(value: object, name: str) -> bool | int | str:
    """Returns the option ``name``, with int-like numbers of parts as ints."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "auto"):
        return value
    return count_given(value, name, PARTS_FORMS, least=2)


def tiles(value: object, name: str) -> bool | int | str:
    """Returns the option ``tiles``, with int-like numbers of tiles as ints."""
    if value is False or (isinstance(value, str) and value == "auto"):
        return value
    return count_given(value, name, TILE_FORMS, least=2)


def agreement(value: object, name: str) -> str | tuple[int, ...]:
    """Returns the option ``agreement``, with ranks in ascending order."""
    if isinstance(value, str) and value in ("auto", "off"):
        return value
    ranks = [as_int(one) for one in value] if isinstance(value, list | tuple | range) else []
    if not ranks or any(rank is None or rank < 0 for rank in ranks):
        raise refused(name, value, AGREEMENT_FORMS)
    return tuple(sorted({rank for rank in ranks if rank is not None}))


def calls(value: object, name: str) -> int:
    """Returns the option ``in_flight``, with an int-like number as an int."""
    return count_given(value, name, IN_FLIGHT_FORMS)
