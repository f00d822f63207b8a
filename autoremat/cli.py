"""The command line: a thin layer over the public interface.

Exit codes: 0 all went well; 1 no plan within the budget; 2 wrong usage or input; 3 anything else, such as a model that fails.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click

from autoremat import __version__
from autoremat.errors import AutorematError, BudgetInfeasible
from autoremat.report import Report

INFEASIBLE, USAGE, FAILURE = 1, 2, 3


class _Commands(click.Group):
    """Errors as a line of text with an exit code of their own; ``--traceback`` lets them through."""

    def invoke(self, ctx: click.Context) -> Any:
        """What click calls once the arguments of the whole line are parsed."""
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]  # takes any arguments
            try:
                return super().invoke(ctx)
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except Exception as error:  # the user's model runs below: whatever it raises ends here
                if ctx.params.get("traceback"):
                    raise
                raise _failure(error) from error


def _failure(error: BaseException) -> click.ClickException:
    """The error as click shows it, without its traceback, and the exit code that it has."""
    error = getattr(error, "inner_exception", None) or error  # torch wraps what a backend raises
    if isinstance(error, AutorematError):
        shown = click.ClickException(str(error))
        code = INFEASIBLE if isinstance(error, BudgetInfeasible) else USAGE
    else:
        shown = click.ClickException(f"{type(error).__name__}: {error}\n(autoremat --traceback ... shows where)")
        code = FAILURE
    vars(shown)["exit_code"] = code  # declared as the class's
    return shown


def _show_warning(message: Warning | str, *_: Any) -> None:
    click.echo(f"Warning: {message}", err=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="autoremat")
@click.option("--traceback", is_flag=True, help="On an error show where it was raised.")
def main(traceback: bool) -> None:
    """Plan the memory of training steps, and look at plans.

    \b
    Exit codes: 0 all went well, 1 no plan within the budget, 2 wrong usage or input, 3 any other failure.
    """


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def report(file: Path, as_json: bool) -> None:
    """Show a report that was stored as JSON (FILE, written from Report.to_json())."""
    try:
        found = Report.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{file}: {error}", param_hint="FILE") from error
    click.echo(found.to_json() if as_json else str(found))
