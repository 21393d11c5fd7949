"""The command line: gem run · list · train · doctor · report · gate. A wrong request is one line on stderr and exit 2.

torch is imported by `gem run`, `gem train` and `gem doctor` only, and only once the request is known to be right.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from gem import __version__
from gem.commands import gate, inspect, report, run, train
from gem.commands.common import EXIT_INTERRUPTED, EXIT_REQUEST
from gem.commands.completion import completing, mend_bash_words
from gem.commands.examples import epilog
from gem.errors import RequestError

app = typer.Typer(add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False)
# typer carries its own click from 0.16 on and used the click package before; its public errors share one ancestor.
_UsageError: Any = typer.BadParameter.__mro__[2]


@app.callback(invoke_without_command=True, epilog=epilog())
def _gem(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Ops of GEM-style recommendation training, and the harness that proves them."""
    if version:
        typer.echo(f"gem {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


# In the order of gem --help: what is asked first stands first.
app.command("run", epilog=epilog("run"))(completing(run.run))
app.command("list", epilog=epilog("list"))(completing(inspect.list_cases))
app.command("doctor", epilog=epilog("doctor"))(completing(inspect.doctor))
app.command("train", epilog=epilog("train"))(completing(train.train))
app.command("report", epilog=epilog("report"))(completing(report.report))
app.command("gate", epilog=epilog("gate"))(completing(gate.gate))


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `gem`: runs the command line and exits with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    mend_bash_words()
    try:
        code = app(args=given, obj=given, prog_name="gem", standalone_mode=False)
    except RequestError as error:
        code = _complain(str(error))
    except _UsageError as error:  # click's: an unknown option, a value of the wrong type
        code = _complain(f"{error.format_message()} (gem --help)")
    except OSError as error:  # the table's own way out: a full disk behind a redirection
        code = _complain(f"cannot write the output: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("gem: interrupted", err=True)
        code = EXIT_INTERRUPTED
    sys.exit(code or 0)


def _complain(message: str) -> int:
    typer.echo(f"gem: error: {' '.join(message.split())}", err=True)
    return EXIT_REQUEST
