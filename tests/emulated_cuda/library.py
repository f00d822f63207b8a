"""Builds and loads the emulated device, a C++ library. It is loaded before torch is imported, in a process of its own."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
FOLDER = Path(__file__).resolve().parents[2] / "build" / "emulated_cuda"

Choose = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_double)
"""Arguments: those of :func:`emulated_cuda.card.choose_attention`."""


def torch_folder() -> Path:
    """Returns torch's folder, without an import of torch."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def missing() -> str:
    """Returns the reason why the device cannot be emulated here; empty if it can."""
    if shutil.which("g++") is None:
        return "no g++"
    if importlib.util.find_spec("triton") is None:
        return "no triton"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "torch is built with CUDA"
    return ""


def build() -> Path:
    """Returns the library, built for the present torch. A library from the same source is built once."""
    text = SOURCE.read_bytes() + version("torch").encode()
    FOLDER.mkdir(parents=True, exist_ok=True)
    library = FOLDER / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not library.exists():
        torch = torch_folder()
        places = [
            f"-I{torch}/include",
            f"-I{torch}/include/torch/csrc/api/include",
            f"-L{torch}/lib",
            f"-Wl,-rpath,{torch}/lib",
        ]
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *places, str(SOURCE), "-lc10", "-ltorch_cpu", "-ltorch"]
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.rename(library)
    return library


def load(choose: Callable[..., int]) -> ctypes.CDLL:
    """Loads the device. ``choose`` picks an attention kernel, as a number of ``at::SDPBackend``."""
    assert "torch" not in sys.modules, "torch asks for its CUDA hooks when it is imported, so the device is loaded before"
    library = ctypes.CDLL(str(build()))
    library.emulated_live_bytes.restype = library.emulated_peak_bytes.restype = ctypes.c_int64
    keep.append(callback := Choose(choose))
    library.emulated_start(callback)
    return library


keep: list[object] = []
"""Callbacks that the library holds."""
