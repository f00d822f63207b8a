"""Torch's private names for the frames of Python that Dynamo looks at: which it gives up, and why.

A frame that Dynamo gives up runs uncompiled, and no backend hears of it.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._dynamo import resume_execution

from autoremat.torch_private import resolve

LIMIT = "Dynamo recompile limit exceeded"
"""The begin of the reason for a frame that Dynamo has compiled too often."""

MODE, LISTED = "torch dispatch mode", "skipfiles list"
"""Phrases in the reason for which Dynamo does not look at a frame."""

RESUMED = resume_execution.TORCH_DYNAMO_RESUME_IN_PREFIX
"""The prefix in the name of a function that resumes after a graph break."""

LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
"""Folders of torch and of this package, whose functions are not the user's."""

STANDARD = os.path.dirname(os.__file__) + os.sep
INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")

KEPT = 500
"""Number of reasons that are kept for later messages."""

REACH, MOST = 4, 10_000
"""The levels of containers, objects and functions that are searched for tensors and models, and the most objects."""


@dataclass(frozen=True)
class Compiler:
    """What ``torch.compile`` was given to compile a frame: a backend and its keywords."""

    backend: Any
    keywords: Mapping[str, Any]

    @classmethod
    def of(cls, function: Any) -> Compiler:
        """Returns what torch's wrappers of a backend, and the one for buckets, contain."""
        while (inner := getattr(function, "_torchdynamo_orig_backend", None)) is not None:
            function = inner
        divider = getattr(function, "__self__", None)
        inner = getattr(divider, "backend_compile_fn", None)
        if inner is not None:
            return cls.of(inner)
        backend = getattr(function, "compiler_fn", function)
        return cls(backend, getattr(function, "kwargs", {}))


class Skipped(Exception):
    """Dynamo does not look at a frame."""


@dataclass(frozen=True)
class GivenUp:
    """A frame that Dynamo runs uncompiled because of ``error``."""

    code: CodeType
    compiler: Compiler
    error: BaseException
    frame: Any

    @property
    def is_refused(self) -> bool:
        """True if Dynamo cannot trace the frame; False if it hides another error."""
        from torch._dynamo import exc

        return isinstance(self.error, (exc.Unsupported, exc.UserError, Skipped))

    @property
    def line(self) -> str:
        """The user's line that Dynamo cannot trace, as "file:line"; empty if it is unknown."""
        return line_of_user(getattr(self.error, "real_stack", None) or ())

    @property
    def trains(self) -> bool:
        """True if gradients are on, and something that the frame reaches requires one."""
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or self.frame is None:
            return False
        frame, left = self.frame, [MOST]
        reached = [*frame.f_locals.values(), *_contents(frame.closure), *_used_globals(self.code, frame.f_globals)]
        return any(_requires_gradient(value, REACH, left) for value in reached)


def _computes(code: CodeType, why_skipped: str) -> bool:
    """Returns True for a frame within a dispatch mode, and for a module of torch that no function of the user calls."""
    if MODE in why_skipped:
        return True
    file = code.co_filename.replace("\\", "/")
    if LISTED not in why_skipped or code.co_name != "forward" or "/torch/nn/modules/" not in file or "container" in file:
        return False
    for caller in calling():
        if caller.f_code.co_name in ("compile_wrapper", "_fn"):
            return True
        if not is_library(caller.f_code.co_filename):
            return False
    return False


class Reasons:
    """The latest reasons why Dynamo broke a function or gave it up, and the number of all reasons so far."""

    def __init__(self) -> None:
        self.count = 0
        self._latest: deque[tuple[CodeType, str]] = deque(maxlen=KEPT)

    def note(self, code: CodeType, reason: str) -> None:
        """Adds a reason that belongs to the function with that code."""
        self.count += 1
        self._latest.append((code, reason))

    def since(self, number: int) -> list[tuple[CodeType, str]]:
        """Returns the reasons behind the first ``number``, each with its code."""
        latest = list(self._latest)
        return latest[max(0, len(latest) - (self.count - number)) :]

    def behind(self) -> str:
        """Returns the latest reason for the function in work, or for one that calls it; empty if there is none."""
        latest, found = {function_of(code): reason for code, reason in self._latest}, _frames_in_work()
        in_work = [found[-1][0], *(frame.f_code for frame in above_dynamo())] if found else []
        return next((latest[function] for function in map(function_of, in_work) if function in latest), "")


reasons = Reasons()
"""The reasons of this process."""

_in_work = threading.local()
"""The ``frames`` that Dynamo compiles now in a thread, each with its compiler, and the one that ``failed`` last."""


def _frames_in_work() -> list[tuple[CodeType, Any]]:
    return getattr(_in_work, "frames", [])


def is_library(file: str) -> bool:
    """Returns True for a file of torch, of this package or of Python."""
    return file.startswith((*LIBRARIES, "<frozen")) or (file.startswith(STANDARD) and not INSTALLED.search(file))


def line_of_user(stack: Sequence[traceback.FrameSummary]) -> str:
    """Returns the innermost line of the user in a stack, as "file:line"; empty if there is none."""
    return next((f"{one.filename}:{one.lineno}" for one in reversed(stack) if not is_library(one.filename)), "")


def when_given_up(listener: Callable[[GivenUp], None]) -> None:
    """Calls ``listener`` for each frame that Dynamo gives up from now on. What it raises reaches the user's call.

    Repeated registration has no effect.
    """
    from torch._dynamo import convert_frame

    # Dynamo swallows the error after this function has put it into words, outside of all its locks.
    words: Any = vars(convert_frame)["format_error_msg"]
    if vars(words).get("listener") is listener:
        return
    compile_frame: Any = vars(convert_frame)["_compile"]

    def compiling(code: CodeType, of: Any, local: Any, builtins: Any, closure: Any, by: Any, *others: Any, **named: Any) -> Any:
        _in_work.frames = [*_frames_in_work(), (code, by)]
        _in_work.failed = None
        try:
            return compile_frame(code, of, local, builtins, closure, by, *others, **named)
        except BaseException:
            _in_work.failed = code, by
            raise
        finally:
            _in_work.frames = _in_work.frames[:-1]

    def telling(error: BaseException, code: CodeType, record_filename: Any = None, frame: Any = None) -> Any:
        failed, by = getattr(_in_work, "failed", None) or (None, None)
        listener(GivenUp(code, Compiler.of(by if failed is code else None), error, frame))
        return words(error, code, record_filename, frame)

    vars(telling)["listener"] = listener
    vars(convert_frame)["format_error_msg"] = telling
    vars(convert_frame)["_compile"] = compiling
    skip = resolve("torch._dynamo.convert_frame:CatchErrorsWrapper._handle_skip")
    if skip is None:  # torch 2.12 and earlier do not say why they skip a frame
        return

    def skipping(converter: Any, result: Any, frame: Any) -> Any:
        if _computes(frame.f_code, str(result.skip_reason)):
            listener(GivenUp(frame.f_code, Compiler.of(converter), Skipped(result.skip_reason), frame))
        return skip(converter, result, frame)

    vars(skipping)["listener"] = listener
    setattr(convert_frame.CatchErrorsWrapper, skip.__name__, skipping)


def frame_in_work() -> tuple[CodeType, Compiler] | None:
    """Returns the code that Dynamo compiles now, and by what; None outside of Dynamo, and in a lazy backward."""
    found = _frames_in_work()
    return (found[-1][0], Compiler.of(found[-1][1])) if found else None


def calling() -> Iterator[FrameType]:
    """Returns the frames of all functions that run in this thread, innermost first."""
    return (frame for frame, _ in traceback.walk_stack(inspect.currentframe()))


def function_of(code: CodeType) -> tuple[str, str]:
    """Returns the file and the name of a function, also for its rest behind a graph break."""
    return code.co_filename, re.sub(rf"^(?:{RESUMED}_)+(.*?)(?:_at_\d+)+$", r"\1", code.co_name)


def above_dynamo() -> Iterator[FrameType]:
    """Returns the innermost frame in which Dynamo compiles another, then those that called it."""

    def is_below(frame: FrameType) -> bool:
        file = frame.f_code.co_filename.replace("\\", "/")
        return frame.f_code.co_name != "_compile" or not file.endswith("_dynamo/convert_frame.py")

    return itertools.dropwhile(is_below, calling())


def _requires_gradient(value: Any, deep: int, left: list[int]) -> bool:
    left[0] -= 1
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, torch.nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    if not deep or left[0] < 0:
        return False
    return any(_requires_gradient(part, deep - 1, left) for part in parts_of(value))


def parts_of(value: Any) -> list[Any]:
    """Returns what a container, an object or a function holds: for a function also the globals that it names."""
    if isinstance(value, (str, bytes, int, float, type, ModuleType, torch.Tensor)):
        return []
    if isinstance(value, FunctionType):
        named = [] if is_library(value.__code__.co_filename) else _used_globals(value.__code__, value.__globals__)
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [*_contents(value.__closure__), *named, *defaults]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())


def _contents(closure: Iterable[Any] | None) -> list[Any]:
    found = []
    for cell in closure or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return found


def _used_globals(code: CodeType, values: Mapping[str, Any]) -> list[Any]:
    nested = [
        value for constant in code.co_consts if isinstance(constant, CodeType) for value in _used_globals(constant, values)
    ]
    return [*(values[name] for name in code.co_names if name in values), *nested]
