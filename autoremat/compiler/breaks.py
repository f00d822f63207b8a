"""Tells the user of functions that Dynamo breaks or leaves alone, where no plan holds the budget.

The backend receives only the graphs that Dynamo captures. Dynamo's own counters, callbacks and errors supply the rest.
"""

import re
import weakref
from collections import Counter
from types import CodeType

import torch
from torch import fx

from autoremat.basics.checks import options_of, underscored
from autoremat.basics.display import short_source
from autoremat.basics.errors import BudgetWarning, unwrapped
from autoremat.basics.warn import warn_at
from autoremat.options.options import Options
from autoremat.request.budgets import is_profile
from autoremat.request.surroundings import RECEIVER
from autoremat.torch_private import compilers, dynamo, frames, split_graphs
from autoremat.torch_private.frames import Compiler, GivenUp

SHOWN = 3
"""Number of reasons of graph breaks that a message lists."""

BROKEN = "Dynamo broke the function"

IN_TRANSFORM = "Dynamo compiles nothing inside of a transform of torch.func"

BETWEEN_GRAPHS = "the memory of code between graphs is not counted"

OUTSIDE_OF_GRAPHS = (
    "Modules and functions that it calls are compiled one by one, each with that budget, where Dynamo can trace them"
)

COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")

BACKENDS = ("autoremat.compiler.dynamo_backend", "autoremat.step_profile.blocks")
"""The modules of the backends whose budgets hold for functions of the user."""

REMEDIES = {
    dynamo.WITHOUT_RNN: "torch._dynamo.config.allow_rnn = True lets Dynamo trace it, but at an nn.LSTM on a CPU torch may fail",
    "generator": "Compile a function that the generator calls",
    frames.MODE: "Run the first steps outside of that mode: count FLOPs, or watch ops, in a later step",
    frames.LISTED: "Pass a module with a forward of its own, which calls torch's modules, to torch.compile",
    "`loss_type=": 'model.loss_type = "ForCausalLM", or the loss of another task, takes that line out',
    "Backend compiler": "torch logs the compiler's error; compiler='inductor' may do",
}
"""What to do, by a phrase in Dynamo's reason."""

REMEDY = (
    "Take that line out of the training step, or out of its loop, `with` or `try`; or give the computation beside it a "
    "function or a module of its own"
)
"""What to do otherwise."""

BREAKS = "TORCH_LOGS=graph_breaks prints the lines to take out of the training step"
"""What to do where Dynamo tells no reason."""

_told: weakref.WeakKeyDictionary[CodeType, str] = weakref.WeakKeyDictionary()
"""The functions that a warning has told of, each with the line that Dynamo cannot trace."""


def what_dynamo_said(since: int = 0) -> str:
    """Returns the reasons why Dynamo broke or left functions, as lines of text, from the reason with that number on.

    The text is empty if there are none.
    """
    said = list(dict.fromkeys(f"  - {_where(code)}: {dynamo.in_few_words(text)}" for code, text in frames.reasons.since(since)))
    more = [f"  - and {len(said) - SHOWN} other reasons"] if len(said) > SHOWN else []
    return "\n".join(["Dynamo broke graphs here, or left whole functions alone:", *said[:SHOWN], *more]) if said else ""


def note_on(gm: fx.GraphModule) -> str:
    """Returns a note on what the report of ``gm`` does not count, if Dynamo broke the function; else an empty text."""
    after = dynamo.graph_break_around(gm)
    if after is None and not dynamo.is_called_by_a_broken_function():
        return ""
    found = frames.frame_in_work()
    if after and found is not None:  # graphs behind this one ask for it, and `listen` may have come within this frame
        frames.reasons.note(found[0], after)
    reason, side = after or frames.reasons.behind(), "after" if after else "around" if after is None else "before"
    return f"{BROKEN} {side} this graph{_cause(reason)}"


def note_on_breaks(since: int) -> str:
    """Returns a note on a step that Dynamo broke, with the first reason from the one with that number on."""
    reason = next((text for _, text in frames.reasons.since(since)), "")
    return f"Dynamo broke graphs{_cause(reason)}"


def _cause(reason: str) -> str:
    why = f" ({dynamo.in_few_words(reason).partition('. ')[0]})" if reason else ""
    return f"{why}: {BETWEEN_GRAPHS}. {_remedy(reason)}"


def _remedy(reason: str) -> str:
    return next((text for phrase, text in REMEDIES.items() if phrase in reason), REMEDY if reason else BREAKS)


_breaks_before: Counter[str] | None = None
"""The graph breaks before the present frame; None if ``listen`` was not active then."""


def listen() -> None:
    """Has Dynamo call back before and after each frame, and where it gives one up.

    A function that trains without a plan, although a budget was asked for, gets one ``BudgetWarning``.
    """
    dynamo.around_each_frame(_before_a_frame, _after_a_frame)
    frames.when_given_up(_gave_up)
    split_graphs.watch_parts()


def _before_a_frame(*_: object) -> None:
    """Warns of a frame inside of a transform of ``torch.func``."""
    global _breaks_before
    _breaks_before = dynamo.graph_breaks()
    found = frames.frame_in_work() if dynamo.runs_in_transform() else None
    if found is not None:
        code, compiler = found
        frames.reasons.note(code, IN_TRANSFORM)
        if asked := _asked(compiler):
            _warn_once(
                code,
                f"{asked} does not hold in {_where(code)}: {IN_TRANSFORM}, as in torch.func.grad(compiled). Compile a function "
                "that returns its loss, and call backward() on that",
            )


def _after_a_frame(*_: object) -> None:
    """Notes why Dynamo broke the frame."""
    global _breaks_before
    before, _breaks_before = _breaks_before, None
    found = frames.frame_in_work()
    if found is not None and before is not None:
        for reason in dynamo.graph_breaks() - before:
            frames.reasons.note(found[0], reason)


def _gave_up(given: GivenUp) -> None:
    """Notes a frame that runs uncompiled, and warns if it trains and a budget was asked for."""
    error = unwrapped(given.error)
    full = str(error) if error is given.error else f"{type(error).__name__}: {error}"
    reason = dynamo.in_few_words(full, given.line)
    is_listed = frames.LISTED in full
    reason = "no function of the user that Dynamo compiles calls this module of torch" if is_listed else reason
    if (frames.is_library(given.code.co_filename) and not is_listed) or given.code.co_name == "<genexpr>":
        return
    frames.reasons.note(given.code, reason)
    asked = _asked(given.compiler)
    is_within = any(frame.f_code in _told for frame in frames.calling()) and not full.startswith(frames.LIMIT)
    # A warning told of the same line, or of the function of a helper such as a generator.
    is_told = is_within and (not given.line or given.line in _told.values() or given.code.co_name in COMPREHENSIONS)
    if not asked or RECEIVER.get() is not None or is_told or not given.trains:
        return
    if full.startswith(frames.LIMIT):
        limit = next(iter(re.findall(r"Limit type: (\w+)", full)), "recompile_limit")
        number = next(iter(re.findall(r"currently set to (\d+)", full)), "")
        text = (
            f"{asked} no longer holds in {_where(given.code)}: Dynamo has compiled it as often as torch._dynamo.config.{limit} "
            f"({number}) allows. Calls that no earlier graph fits run uncompiled from now on, with all that "
            f"they call. Raise torch._dynamo.config.{limit}, pad inputs to fewer sizes, or leave out dynamic=False"
        )
    else:
        remedy = _remedy(full) if given.is_refused else "torch._dynamo.config.suppress_errors = False raises the error in full"
        text = (
            f"{asked} does not hold in {_where(given.code)}, which Dynamo leaves uncompiled: {reason}. "
            f"{remedy if is_listed else f'{OUTSIDE_OF_GRAPHS}. {remedy}'}"
        )
    _warn_once(given.code, text, given.line)


def warn_of_rnn(gm: fx.GraphModule, budget: object) -> None:
    """Warns of an RNN beside the graph ``gm``, if Dynamo broke the function there instead of giving it up."""
    reason = dynamo.graph_break_around(gm) or frames.reasons.behind()
    found = frames.frame_in_work() if dynamo.WITHOUT_RNN in reason and budget is not None else None
    if found is None or not torch.is_grad_enabled():
        return
    code, compiler = found
    asked, function = _asked(compiler), frames.function_of(code)
    if asked and function not in map(frames.function_of, _told):
        text = f"{asked} does not hold for an RNN in {_where(code)}, which runs uncompiled: {dynamo.in_few_words(reason)}"
        _warn_once(code, f"{text}. {REMEDIES[dynamo.WITHOUT_RNN]}")


def _asked(compiler: Compiler) -> str:
    """Returns the budget that a compiler was given, in words; empty for none, and for other compilers than ours."""
    if getattr(compiler.backend, "__module__", "") not in BACKENDS:
        return ""
    given = compiler.keywords.get("options")
    options = Options.parse(given, compiler.keywords.get("mode"), compilers.inductor_config_names)
    if options.memory_budget is None:
        return ""
    budget = underscored(options_of(given)).get("memory_budget", options.memory_budget)
    return "the step profile" if is_profile(options) else f"memory_budget={budget!r}"


def _where(code: CodeType) -> str:
    file, name = frames.function_of(code)
    rest = "the rest of " if code.co_name.startswith(frames.RESUMED) else ""
    own = name if rest else getattr(code, "co_qualname", name).rpartition("<locals>.")[2]
    return f"{rest}`{own}` ({short_source(file)}:{code.co_firstlineno})"


def _warn_once(code: CodeType, text: str, line: str = "") -> None:
    """Warns at the function itself, whatever calls it."""
    if code not in _told:
        _told[code] = line
        warn_at(code, text, BudgetWarning)
