"""Checks the values of single options and returns them in the form in which ``Options`` holds them."""

import os
from collections.abc import Collection
from numbers import Real

from autoremat.basics.budget import FORMS_ANYWHERE, parse_budget
from autoremat.basics.checks import MOST_BYTES, as_float, as_int, refused, text_to_bytes
from autoremat.basics.units import BYTE_FORMS
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.ledger import Share
from autoremat.planner.multigraph.open_calls import OpenCalls
from autoremat.planner.multigraph.step_profile import Budget, StepProfile
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_file import PlanFile
from autoremat.planner.settings import SETTINGS

BUDGET_FORMS = (
    f'{FORMS_ANYWHERE}; "auto" (what is free on the CUDA device, less `auto_headroom`); an `autoremat.profile_step`; '
    "an `autoremat.device_budget`"
)
PATTERN_FORMS = 'a list of globs of module paths ("layers.*.mlp"), ops ("aten.mm") and names of tensors'
CHUNK_FORMS = '"auto", True, False or a number of parts, an int >= 2'
BANDWIDTH_FORMS = 'text such as "50GB/s", a number of bytes per second >= 1, or None'
AGREEMENT_FORMS = '"auto", "off" or a list of ranks, such as torch.distributed.get_process_group_ranks(group)'
IN_FLIGHT_FORMS = "an int >= 1, or None to read it from the running pipeline schedule"
SLOWDOWN_FORMS = 'a share in [0, 1], such as 0.03 for 3 %; "free" (costs nothing measurable); None (no bound)'
HEADROOM_FORMS = f"an int >= 0 (bytes) or a string such as {BYTE_FORMS}"


def budget(value: object, name: str) -> Budget:
    """Returns ``value`` as bytes (an int), a float in (0, 1], "auto", a step profile, a share, a device budget or None."""
    if isinstance(value, StepProfile | Share | DeviceBudget):
        return value
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    return parse_budget(value, name, BUDGET_FORMS)


def headroom(value: object) -> int:
    """Returns the auto headroom in bytes."""
    count = text_to_bytes(value, "auto_headroom", HEADROOM_FORMS) if isinstance(value, str) else as_int(value)
    if count is None or not 0 <= count <= MOST_BYTES:
        raise refused("auto_headroom", value, HEADROOM_FORMS)
    return count


def bandwidth(value: object) -> float | None:
    """Returns the option ``interconnect_bandwidth`` in bytes per second."""
    if value is None:
        return None
    if isinstance(value, str):
        return float(text_to_bytes(value.strip().removesuffix("/s"), "interconnect_bandwidth", BANDWIDTH_FORMS))
    if isinstance(value, bool) or not isinstance(value, Real) or not 1 <= as_float(value) <= MOST_BYTES:
        raise refused("interconnect_bandwidth", value, BANDWIDTH_FORMS)
    return as_float(value)


def slowdown(value: object) -> float | None:
    """Returns the option ``max_slowdown`` as a share of the time of the fastest plan."""
    if value is None:
        return None
    if value == "free":
        return SETTINGS.search.free_slowdown
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= as_float(value) <= 1:
        raise refused("max_slowdown", value, SLOWDOWN_FORMS)
    return as_float(value)


def plans(value: object) -> tuple[PlanFile, ...]:
    """Returns the plans that ``value`` names. Raises PlanFileError for one that cannot be read."""
    if value is None:
        return ()
    found = []
    for one in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(one, str | os.PathLike | Plan | PlanFile):
            raise refused("plan", one, "the path of a plan that Plan.save wrote, a Plan, or a sequence of these")
        found.append(one if isinstance(one, PlanFile) else PlanFile.of(one))
    return tuple(found)


def patterns(value: object, name: str) -> tuple[str, ...]:
    """Returns the patterns without repetition."""
    if isinstance(value, str) or not isinstance(value, Collection):
        raise refused(name, value, PATTERN_FORMS)
    if wrong := [pattern for pattern in value if not isinstance(pattern, str) or not pattern.strip()]:
        raise refused(name, wrong[0], PATTERN_FORMS)
    return tuple(dict.fromkeys(value))


def chunks(value: object) -> bool | int | str:
    """Returns the option ``chunk_loss``, with int-like numbers of chunks as ints."""
    if isinstance(value, bool) or value == "auto":
        return value
    count = as_int(value)
    if count is None or count < 2:
        raise refused("chunk_loss", value, CHUNK_FORMS)
    return count


def agreement(value: object) -> str | tuple[int, ...]:
    """Returns the option ``agreement``, with ranks in ascending order."""
    if value in ("auto", "off"):
        return str(value)
    ranks = [as_int(one) for one in value] if isinstance(value, list | tuple | range) else []
    if not ranks or any(rank is None or rank < 0 for rank in ranks):
        raise refused("agreement", value, AGREEMENT_FORMS)
    return tuple(sorted({rank for rank in ranks if rank is not None}))


def calls(value: object) -> int | OpenCalls | None:
    """Returns the option ``in_flight``, with an int-like number as an int."""
    if value is None or isinstance(value, OpenCalls):
        return value
    count = as_int(value)
    if count is None or count < 1:
        raise refused("in_flight", value, IN_FLIGHT_FORMS)
    return count
