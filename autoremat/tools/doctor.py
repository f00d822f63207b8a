"""What this machine has of all that autoremat needs, for ``autoremat doctor``. Measures and changes nothing."""

import os
import platform
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version

from autoremat.basics import disk_cache, environment
from autoremat.basics.errors import SUPPORTED_MINORS, UnsupportedTorchError
from autoremat.basics.units import format_bytes

OPTIONAL = ("triton", "matplotlib", "accelerate", "transformers", "lightning", "peft")
"""Packages that some uses need."""

GOOD, BAD, ABSENT = "ok", "NO", "-"


def findings() -> Iterator[tuple[str, str, str]]:
    """Yields rows: whether all is well, what is looked at, what was found."""
    for name, look in LOOKS.items():
        try:
            yield from ((verdict, name, text) for verdict, text in look())
        except Exception as error:  # each look has its own row, whatever fails
            yield BAD, name, f"{type(error).__name__}: {error}"
    for name in OPTIONAL:
        try:
            found = version(name)
            if name == "accelerate":
                autoloads = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0" and entry_points(
                    group="torch.backends", name="autoremat"
                )
                found += f": knows the name autoremat{'' if autoloads else ' after `import autoremat`'}"
            yield GOOD, name, found
        except PackageNotFoundError:
            yield ABSENT, name, "not installed"
    yield from ((ABSENT, name, value) for name, value in environment.given().items())


def _versions() -> Iterator[tuple[str, str]]:
    import autoremat

    yield GOOD, f"{autoremat.__version__}, Python {platform.python_version()}, {platform.platform()}"


def _torch() -> Iterator[tuple[str, str]]:
    import torch

    text = f"{torch.__version__}: 2.{SUPPORTED_MINORS[0]} to 2.{SUPPORTED_MINORS[-1]} are supported"
    try:
        import_module("autoremat.torch_private")
    except UnsupportedTorchError:
        yield BAD, text
    else:
        yield GOOD, text


def _compiler() -> Iterator[tuple[str, str]]:
    from autoremat.torch_private.compilers import cpp_compiler

    found = cpp_compiler()
    yield ((GOOD, found) if found else (BAD, "none works: Inductor needs one on a CPU, such as g++"))


def _cards() -> Iterator[tuple[str, str]]:
    import torch

    from autoremat.planner.cost.datasheets import datasheet

    for index in range(torch.cuda.device_count()):
        name, (free, total) = torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)
        known = "with a data sheet" if datasheet(name) else "without a data sheet: times are those of a middling card"
        yield GOOD, f"{name}: {format_bytes(free)} free of {format_bytes(total)} for torch, {known}"
    if not torch.cuda.device_count():
        yield ABSENT, "none; plans by name need none"


def _cache() -> Iterator[tuple[str, str]]:
    folder = disk_cache.folder("")
    used = sum(about.st_size for kind in disk_cache.KINDS for about in disk_cache.stored(kind).values())
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    writable = os.access(nearest, os.W_OK) and nearest.is_dir()
    yield GOOD if writable else BAD, f"{folder}: {format_bytes(used)}{'' if writable else ', not writable'}"


LOOKS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "autoremat": _versions, "torch": _torch, "C++ compiler": _compiler, "CUDA card": _cards, "cache": _cache,
}  # fmt: skip
