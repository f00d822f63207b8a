"""The rates of the device at hand: measured once, then read from disk.

What was measured is kept by device, torch version, number of threads and precision of matrix products. What another program
disturbs is measured again, as far as it shows; delete the folder ``rates`` of the cache to measure all of it again.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Mapping
from functools import cache

import torch

from autoremat.basics import disk_cache
from autoremat.basics.progress import Tally, now
from autoremat.measure.microbenchmarks import FUSED, Compile, Place, Recipe, compiled, matmul, recipes
from autoremat.measure.timer import Timer, measurable, stopwatch_for, undisturbed
from autoremat.planner.cost import (
    SLOWEST,
    Curve,
    Device,
    Rates,
    cpu_device,
    cuda_device,
    curve_name,
    datasheet,
    datasheet_seconds,
    is_plausible,
)
from autoremat.torch_private import compat

log = logging.getLogger("autoremat")

LONGEST_RUN = 0.05
"""Seconds: a size that is expected to take longer is left out, once there is a smaller one."""

LEAST_SHARE = 0.1
"""At least this share of a measured time is the op's own, whatever the launch was measured to take."""

MOST_TURNS, AGREEMENT = 6, 1.5
"""How often a rate is measured at most; the largest factor between two measurements that are taken to be undisturbed."""

WORRYING_SHARE = 0.25
"""Of the rates: of how many an undisturbed measurement may be missing before the user is warned. A few always are."""

LONGEST_WAIT = 180.0
"""Seconds to wait for another process that calibrates the same device, before this one does so too."""

LONGEST_CALIBRATION = 45.0
"""Seconds after which nothing is measured a third time."""

Points = dict[float, float]
"""Seconds by amounts of work."""

TINY = 8
"""The side of a matrix whose product costs little but the launch."""


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()} {_cpu_model()}"


@cache
def _cpu_model() -> str:
    """The processor's name, where the system tells it in the manner of Linux."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def device_key(device: torch.device) -> str:
    """A name for files: equal where the same figures would be measured."""
    parts = (device_name(device), torch.__version__, str(torch.get_num_threads()), compat.float32_precision())
    return f"{device.type}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}"


_known: dict[str, Rates] = {}


def rates_of(device: torch.device) -> Rates | None:
    """The rates of ``device``, measured if they are not on disk; None, said once, if it is not there to be measured."""
    if not measurable(device):
        _say_unmeasurable(device.type)
        return None
    key = device_key(device)
    if key not in _known:
        _known[key] = _stored(key) or _measured(device, key)
    return _known[key]


@cache
def _say_unmeasurable(device_type: str) -> None:
    log.warning("a %s device cannot be calibrated here: costs are taken from data sheets", device_type)


def _stored(key: str) -> Rates | None:
    try:
        return Rates.from_json(disk_cache.read_text("rates", key) or "")
    except disk_cache.UNUSABLE:
        return None


def _measured(device: torch.device, key: str) -> Rates:
    # Ranks of a job start together: one measures, and all that share a cache folder plan by its figures.
    with disk_cache.locked("rates", key, LONGEST_WAIT):
        if (others := _stored(key)) is not None:
            return others
        log.info("calibrating %s", device)
        now(f"calibrating {device}, about 30 s, only once")
        rates = undisturbed(device, lambda: calibrate(device, stopwatch_for(device), compiled))
        if (others := _stored(key)) is not None:  # of a process that did not wait any longer
            return others
        disk_cache.write_text("rates", key, rates.to_json())
        return rates


def calibrate(device: torch.device, timer: Timer, compile_: Compile) -> Rates:
    """Run all recipes on ``device``.

    The least times count, as far as they are plausible; where none is, the data sheet. ``compile_`` is what compiles fused
    arithmetic. Raises ``RuntimeError`` if the device cannot do 32-bit arithmetic.
    """
    # What calling compiled code costs has nothing to do with the arithmetic in it.
    calls = {"launch": matmul(Place(device), TINY)[1], "call": compile_(torch.neg, torch.zeros(1, device=device))}
    overheads = {name: timer.seconds(run) for name, run in calls.items()}
    todo = {curve_name(recipe.rate, _name(recipe.dtype)): recipe for recipe in recipes(device, compile_)}
    found, doubtful = _measured_twice(todo, device, timer)
    overheads = {name: min(overheads[name], timer.seconds(run)) for name, run in calls.items()}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    curves: dict[str, Curve] = {}
    for name, whole in found.items():
        overhead = overheads["call" if todo[name].rate in FUSED else "launch"]
        points = {amount: max(seconds - overhead, LEAST_SHARE * seconds) for amount, seconds in whole.items()}
        plausible = _plausible(todo[name], points, device)
        if points:
            curves[name] = Curve.through((plausible or _by_datasheet(todo[name], points, device)).items())
        if plausible != points:
            doubtful.add(name)
    if doubtful:
        log.log(
            logging.WARNING if len(doubtful) > WORRYING_SHARE * len(found) else logging.INFO,
            "%s seems to have been busy while it was calibrated: seconds of %s may be wrong. To measure again, delete %s",
            device, ", ".join(sorted(doubtful)), disk_cache.folder("rates"),
        )  # fmt: skip
    return Rates(device_name(device), overheads["launch"], curves)


def _measured_twice(recipes: Mapping[str, Recipe], device: torch.device, timer: Timer) -> tuple[dict[str, Points], set[str]]:
    """The least seconds of each recipe, and of which no two results agree.

    All are measured, then all again, then those whose results differ, for what disturbs a measurement has passed by then.
    """
    begin = timer.now()
    found: dict[str, Points] = {}
    unsettled = dict(recipes)
    for turn in range(MOST_TURNS):
        if turn > 1 and timer.now() - begin > LONGEST_CALIBRATION:
            break
        tally = Tally(len(unsettled))
        now(f"calibrating {device}, about 30 s, only once{', again what differed' * (turn > 1)}", tally.count)
        for name, recipe in tuple(unsettled.items()):
            points = _points(recipe, Place(device, recipe.dtype), timer)
            if turn and _agree(points, found[name]):
                del unsettled[name]
            found[name] = _lesser(points, found.get(name, {}))
            tally.done += 1
    return found, set(unsettled)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plausible(recipe: Recipe, points: Points, device: torch.device) -> Points:
    """Those of ``points`` that the data sheet, where there is one, does not contradict."""
    sheet = _datasheet(device, recipe.dtype)
    if device.type == "cuda" and datasheet(sheet.name) is None:
        return points
    return {amount: seconds for amount, seconds in points.items() if is_plausible(recipe.rate, amount, seconds, sheet)}


def _by_datasheet(recipe: Recipe, points: Points, device: torch.device) -> Points:
    """Where no measurement is plausible."""
    return {amount: datasheet_seconds(recipe.rate, amount, _datasheet(device, recipe.dtype)) for amount in points}


def _datasheet(device: torch.device, dtype: torch.dtype) -> Device:
    if device.type == "cpu":
        return cpu_device(torch.get_num_threads())
    return cuda_device(torch.cuda.get_device_name(device), dtype is not torch.float32, compat.rounds_to_tf32())


def _points(recipe: Recipe, place: Place, timer: Timer) -> Points:
    """Seconds by amount, with the call; none if the device has no such op for the type."""
    points: Points = {}
    for size in recipe.sizes:
        try:
            amount, run = recipe.prepare(place, size)
            if points and _expected(recipe, points, amount, _datasheet(place.device, place.dtype)) > LONGEST_RUN:
                break
            seconds = timer.seconds(run)
        except RuntimeError:
            if recipe.dtype is torch.float32 and not points:
                raise
            break
        points[amount] = seconds
    return points


def _expected(recipe: Recipe, points: Points, amount: float, sheet: Device) -> float:
    """At most how many seconds ``amount`` will take, after smaller ones, of which the last may have been disturbed."""
    last = max(points)
    if is_plausible(recipe.rate, last, points[last], sheet):
        return points[last] * amount / last
    return SLOWEST * datasheet_seconds(recipe.rate, amount, sheet)


def _agree(one: Points, other: Points) -> bool:
    """Whether two measurements got about equally far, with about the same figures: one may have left out the largest size."""
    common = one.keys() & other.keys()
    near = all(max(one[a], other[a]) <= AGREEMENT * min(one[a], other[a]) for a in common)
    return near and max(len(one), len(other)) - len(common) <= 1


def _lesser(one: Points, other: Points) -> Points:
    """The lesser seconds for each amount."""
    return {amount: min(p[amount] for p in (one, other) if amount in p) for amount in sorted({*one, *other})}
