"""The rates of the present device: measured once, then read from disk.

Stored rates are specific to device, torch version, number of threads and precision of matrix products. A measurement that shows
a disturbance by another program is repeated. Rates that were measured on a busy machine serve until a process finds the machine
idle and measures again. To measure all rates again, delete the folder ``rates`` of the cache.
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
from autoremat.torch_private import kernel_settings

log = logging.getLogger("autoremat")

LONGEST_RUN = 0.05
"""Seconds. A size with a longer expected time is skipped if a smaller size was measured."""

LEAST_SHARE = 0.1
"""The least share of a measured time that counts as the op's own, after the launch is subtracted."""

MOST_TURNS, AGREEMENT = 6, 1.5
"""The most measurements of one rate; the largest ratio of two measurements that count as undisturbed."""

WORRYING_SHARE = 0.25
"""The share of rates without an undisturbed measurement above which the user is warned. A few such rates are normal."""

LONGEST_WAIT = 180.0
"""Seconds to wait for another process that calibrates the same device. After that, this process calibrates too."""

LONGEST_CALIBRATION = 45.0
"""Seconds after which no rate is measured a third time."""

Points = dict[float, float]
"""Seconds by amount of work."""

TINY, PROBE = 8, 1024
"""Sides of matrices: the product of the one costs little more than the launch, that of the other takes several milliseconds."""


def device_name(device: torch.device) -> str:
    """Returns the device's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()} {_cpu_model()}"


@cache
def _cpu_model() -> str:
    """Returns the processor's name: from ``/proc/cpuinfo`` on Linux, else from ``platform``."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def device_key(device: torch.device) -> str:
    """Returns a name for files. It is equal for devices and settings that give the same measurements."""
    parts = (device_name(device), torch.__version__, str(torch.get_num_threads()), kernel_settings.float32_precision())
    return f"{device.type}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}"


_known: dict[str, Rates] = {}


def rates_of(device: torch.device) -> Rates | None:
    """Returns the rates of ``device``, from disk or by measuring them; None if the device is not present.

    A missing device is logged once.
    """
    if not measurable(device):
        _say_unmeasurable(device.type)
        return None
    key = device_key(device)
    if key not in _known:
        stored = _stored(key)
        serves = stored is not None and not (stored.is_disturbed and _is_idle(device))
        _known[key] = stored if stored is not None and serves else _measured(device, key, stored)
    return _known[key]


def _is_idle(device: torch.device) -> bool:
    """Returns True if other programs leave the processors to this one."""

    def timed() -> bool:
        timer = stopwatch_for(device)
        timer.seconds(matmul(Place(device), PROBE)[1])
        return timer.disturbed_timings == 0

    return undisturbed(device, timed)


@cache
def _say_unmeasurable(device_type: str) -> None:
    log.warning("a %s device cannot be calibrated here: costs are taken from data sheets", device_type)


def _stored(key: str) -> Rates | None:
    try:
        return Rates.from_json(disk_cache.read_text("rates", key) or "")
    except disk_cache.UNUSABLE:
        return None


def _measured(device: torch.device, key: str, known: Rates | None = None) -> Rates:
    """Returns new rates of ``device``, or those that another process has stored in place of ``known``."""
    # Ranks of a job start together. One rank measures, and all ranks that share a cache folder plan with its rates.
    with disk_cache.locked("rates", key, LONGEST_WAIT):
        if (others := _stored(key)) not in (None, known):
            assert others is not None
            return others
        log.info("calibrating %s", device)
        now(f"calibrating {device}, about 30 s, only once")
        rates = undisturbed(device, lambda: calibrate(device, stopwatch_for(device), compiled))
        if (others := _stored(key)) not in (None, known):  # from a process that stopped waiting
            assert others is not None
            return others
        disk_cache.write_text("rates", key, rates.to_json())
        return rates


def calibrate(device: torch.device, timer: Timer, compile_: Compile) -> Rates:
    """Returns the rates of ``device``, after running all recipes.

    A rate is the least plausible time, or the data sheet's if no measured time is plausible. ``compile_`` compiles fused
    arithmetic. Raises ``RuntimeError`` if the device cannot do 32-bit arithmetic.
    """
    # The cost of a call of compiled code does not depend on the arithmetic in it.
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
    rates = Rates(device_name(device), overheads["launch"], curves, timer.disturbed_share)
    if doubtful:
        _say_doubtful(device, doubtful, rates)
    return rates


def _say_doubtful(device: torch.device, doubtful: set[str], rates: Rates) -> None:
    again = f"To measure again, delete {disk_cache.folder('rates')}"
    log.log(
        logging.WARNING if len(doubtful) > WORRYING_SHARE * len(rates.curves) else logging.INFO,
        "%s seems to have been busy while it was calibrated: seconds of %s may be wrong. %s",
        device, ", ".join(sorted(doubtful)), "An idle machine measures again" if rates.is_disturbed else again,
    )  # fmt: skip


def _measured_twice(recipes: Mapping[str, Recipe], device: torch.device, timer: Timer) -> tuple[dict[str, Points], set[str]]:
    """Returns the least seconds of each recipe, and the names of recipes without two results that agree.

    The first two rounds measure all recipes, later rounds those whose results differ. A disturbance has usually passed by the
    next round.
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
    """Returns the ``points`` that the data sheet does not contradict; all of them for a card without a data sheet."""
    sheet = _datasheet(device, recipe.dtype)
    if device.type == "cuda" and datasheet(sheet.name) is None:
        return points
    return {amount: seconds for amount, seconds in points.items() if is_plausible(recipe.rate, amount, seconds, sheet)}


def _by_datasheet(recipe: Recipe, points: Points, device: torch.device) -> Points:
    """Returns the data sheet's seconds for the amounts of ``points``. They replace measurements that are not plausible."""
    return {amount: datasheet_seconds(recipe.rate, amount, _datasheet(device, recipe.dtype)) for amount in points}


def _datasheet(device: torch.device, dtype: torch.dtype) -> Device:
    if device.type == "cpu":
        return cpu_device(torch.get_num_threads())
    return cuda_device(torch.cuda.get_device_name(device), dtype is not torch.float32, kernel_settings.rounds_to_tf32())


def _points(recipe: Recipe, place: Place, timer: Timer) -> Points:
    """Returns seconds by amount, including the call; empty if the device has no such op for the type."""
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
    """Returns an upper estimate of the seconds of ``amount``, from smaller amounts whose last may have been disturbed."""
    last = max(points)
    if is_plausible(recipe.rate, last, points[last], sheet):
        return points[last] * amount / last
    return SLOWEST * datasheet_seconds(recipe.rate, amount, sheet)


def _agree(one: Points, other: Points) -> bool:
    """Returns True if two measurements have similar times and similar ranges. One of them may lack the largest size."""
    common = one.keys() & other.keys()
    near = all(max(one[a], other[a]) <= AGREEMENT * min(one[a], other[a]) for a in common)
    return near and max(len(one), len(other)) - len(common) <= 1


def _lesser(one: Points, other: Points) -> Points:
    """Returns the lesser seconds for each amount."""
    return {amount: min(p[amount] for p in (one, other) if amount in p) for amount in sorted({*one, *other})}
