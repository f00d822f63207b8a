"""The rates of the present device: measured once, then read from disk.

A card with a data sheet is not measured: kernels of its architecture were, and their shapes tell more than a few typical ops.

Stored rates are specific to device, torch version, number of threads and precision of matrix products. A measurement that shows
a disturbance by another program is repeated. Rates that were measured on a busy machine serve until a process finds the machine
idle and measures again. To measure all rates again, delete the folder ``rates`` of the cache.

A calibration ends after ``LONGEST_CALIBRATION`` seconds. Rates that it has not reached come from data sheets until the next
process measures them.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import statistics
from collections.abc import Iterable, Mapping
from functools import cache

import torch

from autoremat.basics import disk_cache
from autoremat.basics.progress import Tally, now
from autoremat.measure.microbenchmarks import FUSED, VERSION, Compile, Place, Recipe, compiled, matmul, recipes
from autoremat.measure.timer import Timer, measurable, stopwatch_for, undisturbed
from autoremat.planner.cost import (
    ELEMENT_BYTES,
    SLOWEST,
    TF32,
    Curve,
    Device,
    Rate,
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

LONGEST_CALIBRATION = 30.0
"""Seconds after which no further measurement begins."""

EAGER, COMPILED, OTHER_TYPES = "eager kernels", "compiled arithmetic", "other types"
PARTS = ((EAGER, 0.5), (COMPILED, 0.8), (OTHER_TYPES, 1.0))
"""The parts of a calibration, each with the share of ``LONGEST_CALIBRATION`` at which it ends. On a busy machine, compilation
alone takes longer than all of it."""

LONGEST_WAIT = 90.0
"""Seconds to wait for another process that calibrates the same device. After that, this process calibrates too."""

Points = dict[float, float]
"""Seconds by amount of work."""

ASSUMED_AMOUNT = 1e6
"""Amount of work of the one point of a curve from a data sheet, which is proportional everywhere."""

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
    settings = (str(torch.get_num_threads()), kernel_settings.float32_precision())
    parts = (device_name(device), torch.__version__, *settings, str(VERSION))
    return f"{device.type}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}"


_known: dict[str, Rates] = {}


def rates_of(device: torch.device) -> Rates | None:
    """Returns the rates of ``device``, from disk or by measuring them; None if data sheets take their place.

    They do for a card that has one, and for a device that is not present, which is logged once.
    """
    if not measurable(device):
        _say_unmeasurable(device.type)
        return None
    if device.type == "cuda" and datasheet(device_name(device)) is not None:
        return None
    key = device_key(device)
    if key not in _known:
        stored = _stored(key)
        serves = stored is not None and not stored.unmeasured and not (stored.is_disturbed and _is_idle(device))
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
        rates = undisturbed(device, lambda: calibrate(device, stopwatch_for(device), compiled, known))
        if (others := _stored(key)) not in (None, known):  # from a process that stopped waiting
            assert others is not None
            return others
        disk_cache.write_text("rates", key, rates.to_json())
        return rates


def calibrate(device: torch.device, timer: Timer, compile_: Compile, known: Rates | None = None) -> Rates:
    """Returns the rates of ``device``, after running the recipes that ``known`` lacks, or all if it lacks none.

    A rate is the least plausible time, or the data sheet's if no measured time is plausible. So is a rate for which the time
    does not suffice. ``compile_`` compiles fused arithmetic. Raises ``RuntimeError`` if the device cannot do 32-bit arithmetic.
    """
    begin, tally = timer.now(), Tally()
    now(f"calibrating {device}, at most {LONGEST_CALIBRATION:.0f} s", tally.count)
    every = {curve_name(recipe.rate, str(recipe.dtype).removeprefix("torch.")): recipe for recipe in recipes(device, compile_)}
    kept = {} if known is None else {name: known.curves[name] for name in known.curves.keys() - set(known.unmeasured)}
    wanted = set(known.unmeasured if known and known.unmeasured else every)
    calls = {"launch": matmul(Place(device), TINY)[1]}
    overheads = {"launch": timer.seconds(calls["launch"])}
    found: dict[str, Points] = {}
    doubtful: set[str] = set()
    for part, share in PARTS:
        todo = {name: recipe for name, recipe in every.items() if name in wanted and _part_of(recipe) == part}
        end = begin + share * LONGEST_CALIBRATION
        if part == COMPILED and todo and timer.now() <= end:
            # The cost of a call of compiled code does not depend on the arithmetic in it.
            calls["call"] = compile_(torch.neg, torch.zeros(1, device=device))
            overheads["call"] = timer.seconds(calls["call"])
        points, unsettled = _measured_twice(todo, device, timer, end, tally)
        found, doubtful = found | points, doubtful | unsettled
    overheads = {name: min(overheads[name], timer.seconds(run)) for name, run in calls.items()}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    curves, implausible = _curves(every, found, overheads, device, kept)
    unmeasured = tuple(sorted(wanted - found.keys() - kept.keys()))
    disturbed = max(timer.disturbed_share, known.disturbed_share if known and known.unmeasured else 0.0)
    curves = {**_assumed(unmeasured, curves, device), **curves}
    rates = Rates(device_name(device), overheads["launch"], curves, disturbed, unmeasured)
    _say_incomplete(device, rates, doubtful | implausible, len(every))
    return rates


def _part_of(recipe: Recipe) -> str:
    """Returns the part of a calibration in which the recipe runs."""
    if recipe.rate in FUSED:
        return COMPILED
    return EAGER if recipe.dtype is torch.float32 else OTHER_TYPES


def _curves(
    recipes: Mapping[str, Recipe],
    found: Mapping[str, Points],
    overheads: Mapping[str, float],
    device: torch.device,
    kept: Mapping[str, Curve],
) -> tuple[dict[str, Curve], set[str]]:
    """Returns the curves through measured points without the overhead of a call, and the names with implausible points.

    The curves of earlier measurements, ``kept``, are among them.
    """
    curves, implausible = dict(kept), set[str]()
    for name, whole in sorted(found.items(), key=lambda pair: recipes[pair[0]].rate in FUSED):  # after that of streams
        arithmetic, moving = FUSED.get(recipes[name].rate), dict.fromkeys(whole, 0.0)
        overhead = overheads["launch" if arithmetic is None else "call"]
        if arithmetic is not None and device.type == "cuda":  # what a CPU's cache holds, a card moves
            stream = curves.get(curve_name(Rate.STREAM)) or _by_datasheet_alone(Rate.STREAM, device)
            moving = {amount: stream.seconds(ELEMENT_BYTES * amount / arithmetic.times) for amount in whole}
        points = {amount: max(seconds - overhead - moving[amount], LEAST_SHARE * seconds) for amount, seconds in whole.items()}
        plausible = _plausible(recipes[name], points, device)
        if points:
            curves[name] = Curve.through((plausible or _by_datasheet(recipes[name], points, device)).items())
        if plausible != points:
            implausible.add(name)
    return curves, implausible


def _by_datasheet_alone(rate: Rate, device: torch.device, slowdown: float = 1.0) -> Curve:
    """Returns the data sheet's curve of ``rate`` for float32, whose seconds are multiplied by ``slowdown``."""
    return Curve(((ASSUMED_AMOUNT, slowdown * datasheet_seconds(rate, ASSUMED_AMOUNT, _datasheet(device, torch.float32))),))


def _assumed(names: Iterable[str], measured: Mapping[str, Curve], device: torch.device) -> dict[str, Curve]:
    """Returns the data sheet's curves for those of ``names`` that every device needs, slowed down as ``measured`` ones are."""
    sheet = _datasheet(device, torch.float32)
    rates = {curve_name(rate): rate for rate in Rate}
    ratios = [measured[n].points[-1][1] / datasheet_seconds(rates[n], measured[n].points[-1][0], sheet)
              for n in measured.keys() & rates.keys()]  # fmt: skip
    slowdown = statistics.median(ratios) if ratios else 1.0
    return {n: _by_datasheet_alone(rates[n], device, slowdown) for n in names if n in rates}


def _say_incomplete(device: torch.device, rates: Rates, doubtful: set[str], total: int) -> None:
    """Logs in one line how many rates may be wrong and how many are not measured; their names follow at the level DEBUG."""
    again = "an idle machine measures again" if rates.is_disturbed else f"delete {disk_cache.folder('rates')} to measure again"
    lacking = len(rates.unmeasured)
    said = [f"the machine was busy, so {len(doubtful)} of {total} rates may be wrong; {again}"] if doubtful else []
    if lacking:
        said.append(f"{lacking} of {total} rates come from data sheets or other types until the next process measures them")
    if said:
        is_worrying = lacking or len(doubtful) > WORRYING_SHARE * total
        log.log(logging.WARNING if is_worrying else logging.INFO, "autoremat: calibrated %s: %s", device, "; ".join(said))
        log.debug("autoremat: rates that may be wrong: %s; not measured: %s", sorted(doubtful), rates.unmeasured)


def _measured_twice(
    recipes: Mapping[str, Recipe], device: torch.device, timer: Timer, end: float, tally: Tally
) -> tuple[dict[str, Points], set[str]]:
    """Returns the least seconds of each recipe until ``end``, and the names of recipes without two results that agree.

    The first two rounds measure all recipes, later rounds those whose results differ. A disturbance has usually passed by the
    next round. A recipe that was not reached is in neither result.
    """
    found: dict[str, Points] = {}
    unsettled = dict(recipes)
    tally.total += 2 * len(recipes)
    for turn in range(MOST_TURNS):
        tally.total += len(unsettled) if turn > 1 else 0
        for name, recipe in tuple(unsettled.items()):
            if timer.now() > end:
                return found, unsettled.keys() & found.keys()
            points = _points(recipe, Place(device, recipe.dtype), timer)
            if turn and _agree(points, found[name]):
                del unsettled[name]
            found[name] = _lesser(points, found.get(name, {}))
            tally.done += 1
    return found, set(unsettled)


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
    rounds = dtype is torch.float32 and kernel_settings.rounds_to_tf32()
    return cuda_device(torch.cuda.get_device_name(device)).of_type(TF32 if rounds else str(dtype).removeprefix("torch."))


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
