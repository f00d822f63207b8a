"""The rates of the device at hand: measured once, then read from disk.

What was measured is kept by device, torch version, number of threads and precision of matrix products. While another
program keeps the device busy its rates come out too low; delete the folder ``rates`` of the cache to measure again.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from functools import cache

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from autoremat import store
from autoremat.cost import Curve, Rates, curve_name
from autoremat.timing.recipes import FUSED, Compile, Place, Recipe, compiled, matmul, recipes
from autoremat.timing.stopwatch import Timer, measurable, stopwatch_for, undisturbed

log = logging.getLogger("autoremat")

LONGEST_RUN = 0.05
"""Seconds: a size that is expected to take longer is left out, once there is a smaller one."""

LEAST_SHARE = 0.1
"""At least this share of a measured time is the op's own, whatever the launch was measured to take."""

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
    parts = (device_name(device), torch.__version__, str(torch.get_num_threads()), torch.get_float32_matmul_precision())
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
        return Rates.from_json(store.read_text("rates", key) or "")
    except ValueError:
        return None


def _measured(device: torch.device, key: str) -> Rates:
    log.info("calibrating %s", device)
    rates = undisturbed(device, lambda: calibrate(device, stopwatch_for(device), compiled))
    # Ranks of a job start together: all that share a cache folder plan by the figures of the first to be done.
    if (others := _stored(key)) is not None:
        return others
    store.write_text("rates", key, rates.to_json())
    return rates


def calibrate(device: torch.device, timer: Timer, compile_: Compile) -> Rates:
    """Run all recipes on ``device``, with a progress bar if there is a terminal to show it on.

    ``compile_`` is what compiles fused arithmetic. Raises ``RuntimeError`` if the device cannot do 32-bit arithmetic.
    """
    launch = timer.seconds(matmul(Place(device), TINY)[1])
    # What calling compiled code costs has nothing to do with the arithmetic in it.
    call = timer.seconds(compile_(torch.neg, torch.zeros(1, device=device)))
    curves: dict[str, Curve] = {}
    todo = list(recipes(device, compile_))
    console = Console(stderr=True)
    columns = (TextColumn("autoremat: calibrating [bold]{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(str(device), total=len(todo))
        for recipe in todo:
            overhead = call if recipe.rate in FUSED else launch
            curve = _curve(recipe, Place(device, recipe.dtype), timer, overhead)
            if curve is not None:
                curves[curve_name(recipe.rate, str(recipe.dtype).removeprefix("torch."))] = curve
            progress.advance(bar)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Rates(device_name(device), launch, curves)


def _curve(recipe: Recipe, place: Place, timer: Timer, overhead: float) -> Curve | None:
    """One curve, less the ``overhead`` of a call; None if the device has no such op for the type."""
    points: list[tuple[float, float]] = []
    for size in recipe.sizes:
        try:
            amount, run = recipe.prepare(place, size)
            if points and points[-1][1] * amount / points[-1][0] > LONGEST_RUN:
                break
            seconds = timer.seconds(run)
        except RuntimeError:
            if recipe.dtype is torch.float32 and not points:
                raise
            break
        points.append((amount, max(seconds - overhead, LEAST_SHARE * seconds)))
    return Curve.through(points) if points else None
