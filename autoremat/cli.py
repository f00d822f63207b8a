"""The command line: a thin layer over the public interface.

Exit codes: 0 all went well; 1 no plan within the budget; 2 wrong usage or input; 3 anything else, such as a model that fails.
"""

import importlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import autoremat
from autoremat.basics import disk_cache
from autoremat.basics.checks import arguments_of
from autoremat.basics.display import as_text
from autoremat.basics.errors import AutorematError, BudgetInfeasible, unwrapped
from autoremat.basics.units import format_bytes
from autoremat.report.report import Report

INFEASIBLE, USAGE, FAILURE = 1, 2, 3


class _Commands(click.Group):
    """Errors as a line of text with an exit code of their own; ``--traceback`` lets them through."""

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: click.echo(f"Warning: {message}", err=True)
            try:
                return super().invoke(ctx)
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except Exception as error:  # the user's model runs below: whatever it raises ends here
                if ctx.params.get("traceback"):
                    raise
                raise _failure(error) from error


def _failure(error: BaseException) -> click.ClickException:
    error = unwrapped(error)  # torch wraps what a backend raises
    if isinstance(error, OSError) and error.filename:
        shown, code = click.ClickException(f"{error.filename}: {error.strerror}"), USAGE
    elif isinstance(error, AutorematError):
        shown = click.ClickException(str(error))
        code = INFEASIBLE if isinstance(error, BudgetInfeasible) else USAGE
    else:
        shown = click.ClickException(f"{type(error).__name__}: {error}\n(autoremat --traceback ... shows where)")
        code = FAILURE
    vars(shown)["exit_code"] = code  # declared as the class's
    return shown


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(autoremat.__version__, prog_name="autoremat")
@click.option("--traceback", is_flag=True, help="On an error show where it was raised.")
def main(traceback: bool) -> None:
    """Plan the memory of training steps, and look at plans.

    \b
    Exit codes: 0 all went well, 1 no plan within the budget, 2 wrong usage or input, 3 any other failure.
    """


class _Output(click.Path):
    """A file to be written. That its folder is there is known before the long work."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}", param, ctx)
        return path


# -- what is planned ---------------------------------------------------------------------------------------------------


def _load(target: str) -> Callable[..., Any]:
    """The function that ``MODULE:FUNCTION`` names; modules are also found in the present folder."""
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise click.BadParameter(f"{target!r} is not of the form MODULE:FUNCTION", param_hint="MODULE:FUNCTION")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
        for part in function_name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports another that is not
        hint = " (a module is named without .py)" if module_name.endswith(".py") else ""
        raise click.BadParameter(f"there is no module {error.name!r}{hint}", param_hint="MODULE:FUNCTION") from error
    except AttributeError as error:
        raise click.BadParameter(str(error), param_hint="MODULE:FUNCTION") from error
    if not callable(found):
        raise click.BadParameter(f"{target} is no function", param_hint="MODULE:FUNCTION")
    return found


def _made(target: str, *size: int) -> tuple[Any, Any, Any]:
    """The model, its inputs and its optimizer, as the function returns them; None for an optimizer that it does not return."""
    function = _load(target)
    try:
        inspect.signature(function).bind(*size)
    except TypeError as error:
        raise click.UsageError(f"{target} is called with {'the size' if size else 'nothing'} here: {error}") from error
    made = function(*size)
    if not (isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0])):
        expected = "(model, inputs) or (model, inputs, optimizer)"
        raise click.UsageError(f"{target} should return {expected}, and returns {type(made).__name__}")
    return made[0], made[1], made[2] if len(made) == 3 else None


def _number_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


_details = click.option("--details", is_flag=True, help="Also show all figures of the report.")

_html = click.option("--html", type=_Output(), metavar="FILE",
                     help="Also write the report, with pictures, as one HTML file.")  # fmt: skip


_lower = click.option("--lower", is_flag=True,
                      help="Also generate the code, without its kernels, and show what memory that needs.")  # fmt: skip


def _budget_of(given: dict[str, Any], model: Any, optimizer: Any) -> Any:
    """The budget of a command: bytes or a share, or that of a whole device; None without one."""
    if given["device_memory"] is None:
        if given["optimizer"] is not None or given["accumulate"] > 1:
            raise click.UsageError("--optimizer and --accumulate need --device-memory")
        return given["budget"]
    if given["budget"] is not None:
        raise click.UsageError("--budget and --device-memory exclude each other")
    modules = list(importlib.import_module("autoremat.tools.trace").models_in(model))
    if optimizer is None and given["optimizer"] is not None:
        kind = getattr(importlib.import_module("torch.optim"), given["optimizer"], None)
        if not isinstance(kind, type):
            raise click.BadParameter(f"torch.optim has no class {given['optimizer']!r}", param_hint="--optimizer")
        optimizer = kind([parameter for module in modules for parameter in module.parameters()])
    total = given["device_memory"]
    return autoremat.device_budget(total, modules, optimizer, accumulate=given["accumulate"], device=given["device"])


def _options_of(given: dict[str, Any], budget: Any = None) -> dict[str, Any]:
    """The backend's options, as ``torch.compile(options=...)`` takes them."""
    options: dict[str, Any] = {}
    for one in given["further"]:
        key, equals, value = one.partition("=")
        if not equals:
            raise click.BadParameter(f"{one!r} is not of the form KEY=VALUE", param_hint="--option")
        options[key] = _number_or_text(value)
    own = {"memory_budget": budget, "max_slowdown": given["max_slowdown"], "host_memory": given["host_memory"]}
    return options | {key: value for key, value in own.items() if value is not None}


_PLANNED = (
    click.option("--accumulate", type=click.IntRange(min=1), default=1, show_default=True,
                 help="With --device-memory: micro-batches in one step of the optimizer."),
    click.option("--optimizer", metavar="NAME", help="With --device-memory: a class of torch.optim, such as AdamW, where "
                 "the function returns no optimizer."),
    click.option("--device-memory", type=_number_or_text, metavar="TOTAL",
                 help="In place of --budget: the memory of the whole device, 24GiB or a card such as H100-80GB. "
                 "Parameters, gradients and optimizer are counted."),
    click.option("--host-memory", type=_number_or_text, metavar="BYTES",
                 help="Saved tensors may wait on the host, in at most so many bytes: 64GiB, or auto. Default: none."),
    click.option("--max-slowdown", type=_number_or_text, metavar="SHARE",
                 help="At most so much more time than without a budget: 0.03, or free. Default: no bound."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text."),
    click.option("-o", "--option", "further", metavar="KEY=VALUE", multiple=True,
                 help="Any other option of the backend; may be repeated."),
    click.option("--device", metavar="DEVICE", help="Where to plan for: cpu, cuda, or a card such as H100-80GB, here or "
                 "not. Default: where the model is."),
    click.argument("target", metavar="MODULE:FUNCTION"),
)  # fmt: skip


def _planning(budget_forms: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The argument and the options of commands that plan."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in (*_PLANNED, click.option("--budget", type=_number_or_text, metavar="BUDGET", help=budget_forms)):
            command = option(command)
        return command

    return decorate


@main.command()
@_planning("6GiB, bytes, or a share such as 0.5. Default: no bound.")
@_details
@click.option("--values", is_flag=True, help="Also show what becomes of the largest values of the forward, and why.")
@click.option("--totals", type=click.Choice(["module", "op"]), help="Also show sums by kind of module or by op.")
@click.option("--peak", is_flag=True, help="Also show what is live where memory is fullest.")
@click.option("--timeline", is_flag=True, help="Also show the simulated bytes of each op.")
@_lower
@_html
@click.option("--save-plan", type=_Output(), metavar="FILE", help="Store the plan.")
def explain(as_json: bool, lower: bool, html: Path | None, save_plan: Path | None, **given: Any) -> None:
    """Plan a training step without running it.

    MODULE:FUNCTION takes nothing and returns (model, inputs) or (model, inputs, optimizer): inputs is a tensor, a tuple of
    arguments or a dict of keyword arguments, and model(inputs) returns the loss. The model may be on the meta device.
    """
    model, inputs, own = _made(given["target"])
    args, kwargs = arguments_of(inputs)
    options = _options_of(given, _budget_of(given, model, own))
    found = autoremat.explain(model, *args, options=options, device=given["device"], lower=lower, **kwargs)
    if save_plan is not None:
        found.plan.save(save_plan)
    if html is not None:
        found.to_html(html)
    if as_json:
        click.echo(found.to_json())
        return
    click.echo(f"{found}\n\n{found.details}" if given["details"] else str(found))
    tables: dict[str, Callable[[], Any]] = {"values": found.table, "peak": found.peak_table, "timeline": found.op_bytes_table}
    for name, make in ({"totals": lambda: found.totals_table(given["totals"])} | tables).items():
        if given[name] and (table := make()) is not None:
            click.echo(f"\n{as_text(table)}")


@main.command(short_help="Find the largest size that fits a budget.")
@_planning("6GiB, bytes, or auto; no share.")
@click.option("--step", type=click.IntRange(min=1), default=1, show_default=True, help="Try multiples of this size only.")
@click.option("--limit", type=click.IntRange(min=1), default=1 << 20, show_default=True, help="The largest size to try.")
@_lower
def batch(as_json: bool, **given: Any) -> None:
    """The largest batch, or other size, that fits a budget.

    MODULE:FUNCTION takes the size and returns (model, inputs) or (model, inputs, optimizer). Nothing is allocated for the
    sizes that are tried.
    """
    model, _, own = _made(given["target"], given["step"])
    budget = _budget_of(given, model, own)
    if budget is None:
        raise click.UsageError("one of --budget and --device-memory is required")
    inputs = lambda size: _made(given["target"], size)[1]  # noqa: E731
    settings = {name: given[name] for name in ("device", "step", "limit", "lower")}
    found = autoremat.max_batch(inputs, model, budget, options=_options_of(given), **settings)
    if not as_json:
        click.echo(str(found))
        return
    report = json.loads(found.report.to_json())
    click.echo(json.dumps({"size": found.size, "next_size": found.next_size, "tried": found.tried, "report": report}))


# -- what was planned --------------------------------------------------------------------------------------------------


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@_details
@_html
def report(file: Path, as_json: bool, details: bool, html: Path | None) -> None:
    """Show a stored report.

    FILE is JSON, written from Report.to_json() or by `autoremat explain --json`.
    """
    try:
        found = Report.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{file}: {error}", param_hint="FILE") from error
    if html is not None:
        found.to_html(html)
    click.echo(found.to_json() if as_json else f"{found}\n\n{found.details}" if details else str(found))


@main.command(short_help="Measure the rates of this device.")
def calibrate() -> None:
    """Measure the rates of this device again, for cost_model="calibrated".

    Other programs disturb the timings. A card with a data sheet needs no rates.
    """
    import torch

    from autoremat.measure import calibration

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if not calibration.takes_measured_rates(device):
        click.echo(f"Data sheets give the rates of {calibration.device_name(device)}: nothing is measured.")
        return
    calibration.measure(device)
    click.echo(f"The rates of {calibration.device_name(device)} are stored in {disk_cache.folder('rates')}")


@main.command()
def doctor() -> None:
    """Say what this machine has of all that autoremat needs; a bug report asks for it."""
    from autoremat.tools import doctor as tool

    rows = list(tool.findings())
    width = max(len(name) for _, name, _ in rows)
    for verdict, name, text in rows:
        click.echo(f"{verdict:<3}{name:<{width}}  {text}")
    sys.exit(USAGE if any(verdict == tool.BAD for verdict, _, _ in rows) else 0)


# -- what is kept on disk ----------------------------------------------------------------------------------------------


@main.group("cache", invoke_without_command=True)
@click.pass_context
def cache_command(ctx: click.Context) -> None:
    """Show the folder of reports and measured figures.

    AUTOREMAT_CACHE_DIR names another folder, AUTOREMAT_CACHE_SIZE how much reports may take (default: 1 GiB).
    """
    if ctx.invoked_subcommand is not None:
        return
    click.echo(f"{disk_cache.folder('')}: at most {format_bytes(disk_cache.size_limit())} of reports")
    for kind in disk_cache.KINDS:
        files = disk_cache.stored(kind)
        click.echo(f"  {kind:<11}{len(files):>7} files {format_bytes(sum(about.st_size for about in files.values())):>12}")


@cache_command.command()
def clear() -> None:
    """Remove all of it. Graphs are then planned and devices measured again."""
    click.echo(f"{format_bytes(disk_cache.clear())} removed from {disk_cache.folder('')}")
