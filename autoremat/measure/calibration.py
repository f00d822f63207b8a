"""The rates of the present device: measured on request, and stored on disk.

A card with a data sheet is not measured: kernels of its architecture were, and their shapes tell more than a few typical ops.
Stored rates are specific to device, torch version, number of threads and precision of matrix products.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Mapping
from functools import cache

import torch

from autoremat.basics import disk_cache
from autoremat.basics.progress import now
from autoremat.measure.machine import Stopwatch, measurable, outside_of_modes
from autoremat.measure.microbenchmarks import FUSED, VERSION, Compile, Place, Recipe, compiled, matmul, recipes
from autoremat.planner.cost.datasheets import datasheet
from autoremat.planner.cost.rates import Curve, Rate, Rates, curve_name
from autoremat.torch_private import kernel_settings

log = logging.getLogger("autoremat")

ELEMENT_BYTES = 8
"""Bytes moved per element: one 32-bit float read and one written."""

LONGEST_RUN = 0.05
"""Seconds. A size with a longer expected time is skipped if a smaller size was measured."""

LEAST_SHARE = 0.1
"""The least share of a measured time that counts as the op's own, after the launch is subtracted."""

LONGEST_WAIT = 90.0
"""Seconds to wait for another process that calibrates the same device. After that, this process calibrates too."""

TINY = 8
"""Side of matrices whose product costs little more than the launch."""

Points = dict[float, float]
"""Seconds by amount of work."""

Timer = Callable[[Callable[[], object]], float]
"""Returns the seconds of a run."""


def device_name(device: torch.device) -> str:
    """Returns the device's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()} {_cpu_model()}"


@cache
def _cpu_model() -> str:
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


def takes_measured_rates(device: torch.device) -> bool:
    """Returns False if data sheets give the rates: of a card that has one, and of a device that cannot be measured."""
    return measurable(device) and (device.type == "cpu" or datasheet(device_name(device)) is None)


def rates_of(device: torch.device) -> Rates | None:
    """Returns the rates of ``device``, from disk or by measuring them; None if data sheets take their place.

    That a device cannot be measured is logged once.
    """
    if not takes_measured_rates(device):
        if not measurable(device):
            _say_unmeasurable(device.type)
        return None
    key = device_key(device)
    if key not in _known:
        # Ranks of a job start together. One rank measures, and all ranks that share a cache folder plan with its rates.
        with disk_cache.locked("rates", key, LONGEST_WAIT):
            _known[key] = _stored(key) or measure(device)
    return _known[key]


def measure(device: torch.device) -> Rates:
    """Returns new rates of ``device``, and stores them."""
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else bool
    rates = outside_of_modes(device, lambda: calibrate(device, Stopwatch(wait).seconds, compiled))
    disk_cache.write_text("rates", device_key(device), rates.to_json())
    return rates


@cache
def _say_unmeasurable(device_type: str) -> None:
    log.warning("a %s device cannot be calibrated here: costs are taken from data sheets", device_type)


def _stored(key: str) -> Rates | None:
    try:
        return Rates.from_json(disk_cache.read_text("rates", key) or "")
    except disk_cache.UNUSABLE:
        return None


def calibrate(device: torch.device, timer: Timer, compile_: Compile) -> Rates:
    """Returns the rates of ``device``, each by the least time. ``compile_`` compiles fused arithmetic.

    Raises ``RuntimeError`` if the device cannot do 32-bit arithmetic.
    """
    every = {curve_name(recipe.rate, str(recipe.dtype).removeprefix("torch.")): recipe for recipe in recipes(device, compile_)}
    now(f"calibrating {device}")
    launch = timer(matmul(Place(device), TINY)[1])
    # The cost of a call of compiled code does not depend on the arithmetic in it.
    call = timer(compile_(torch.neg, torch.zeros(1, device=device)))
    found: dict[str, Points] = {}
    for name, recipe in every.items():
        found[name] = _points(recipe, Place(device, recipe.dtype), timer)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Rates(device_name(device), launch, _curves(every, found, launch, call, device.type == "cuda"))


def _curves(
    recipes: Mapping[str, Recipe], found: Mapping[str, Points], launch: float, call: float, is_card: bool
) -> dict[str, Curve]:
    """Returns the curves through measured points without the overhead of a launch or a call."""
    curves = dict[str, Curve]()
    for name, whole in sorted(found.items(), key=lambda pair: recipes[pair[0]].rate in FUSED):  # after that of streams
        arithmetic, moving = FUSED.get(recipes[name].rate), dict.fromkeys(whole, 0.0)
        overhead = launch if arithmetic is None else call
        if arithmetic is not None and is_card:  # what a CPU's cache holds, a card moves
            stream = curves[curve_name(Rate.STREAM)]
            moving = {amount: stream.seconds(ELEMENT_BYTES * amount / arithmetic.times) for amount in whole}
        if whole:
            own = {amount: max(seconds - overhead - moving[amount], LEAST_SHARE * seconds) for amount, seconds in whole.items()}
            curves[name] = Curve.through(own.items())
    return curves


def _points(recipe: Recipe, place: Place, timer: Timer) -> Points:
    """Returns seconds by amount, including the call; empty if the device has no such op for the type."""
    points: Points = {}
    for size in recipe.sizes:
        try:
            amount, run = recipe.prepare(place, size)
            if points and max(points.values()) * amount / max(points) > LONGEST_RUN:
                break
            points[amount] = timer(run)
        except RuntimeError:
            if recipe.dtype is torch.float32 and not points:
                raise
            break
    return points
