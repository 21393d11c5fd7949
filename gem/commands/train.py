"""gem train: the GEM model, alone or as torchrun's processes."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gem.commands.common import EXIT_INTERRUPTED, Device, check_outputs, show
from gem.errors import RequestError
from gem.train.starter import place as place_of_rank


def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file that says what to train, on what data.")],
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The run's folder.  [default: results/<name of CONFIG>]"),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file that says how the model lies on torchrun's processes."),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Over the file's: --set reader.batch=512.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Refuse a folder that holds a run; without it a run is gone on with.")
    ] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results document.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report with the step's waterfall.")] = None,
    device: Device = "auto",
) -> None:
    """Train the GEM model, alone or as torchrun's processes: torchrun --nproc-per-node 8 -m gem train CONFIG.

    A folder with a checkpoint is gone on with, as if the run had not been stopped. Exit 1: a figure of the results is
    not defined. 2: the request was wrong, or the run diverged. 3: a rank failed, died or hung, which is said once, and
    all have ended. 130: interrupted; 143: told to end. The last checkpoint stays.
    """
    if _with_others():  # a lost connection is pages of C++ to torch; the line that says why would drown
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from gem.train.config import load_config

    try:
        check_outputs(json, html)
        checked = load_config(config, tuple(changes or ()), plan)
    except RequestError as error:
        if not _with_others():
            raise
        from gem.sharding.watch import refuse

        _leave(refuse(error))

    from gem.harness import environment, table, training
    from gem.sharding.verdict import Ended
    from gem.train.checkpoint import Checkpoints
    from gem.train.loop import Run
    from gem.train.world import join

    place = Path("results") / config.stem if folder is None else folder
    try:
        with join(device, checked.timeout_s) as world:
            if not world.first:
                Run(checked, place, world).train(resume=not fresh)
                return
            with training.TrainingConsole(table.make_console(stderr=True), place) as console:
                result = Run(checked, place, world, console).train(resume=not fresh)
            env = environment.capture(world.device.type)
            document = training.document_of(result, checked, config.stem, env, world.size)
    except Ended as ended:
        _leave(ended.code)
    except KeyboardInterrupt:
        latest = Checkpoints(place / "checkpoints").latest()
        kept = f"the last checkpoint is {latest}; the same command goes on from it" if latest is not None else ""
        typer.echo(f"gem: interrupted: {kept or 'no checkpoint was saved yet'}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    document.request["argv"] = [re.sub(r"(^|=)/(?:.*/)?", r"\1", word) for word in context.obj]
    summary = show(document, json, html, verbose=True)
    raise typer.Exit(1 if summary.failed or summary.errored else 0)


def _with_others() -> bool:
    return place_of_rank()[1] > 1


def _leave(code: int) -> NoReturn:
    """End here and now: the end of an interpreter waits for process groups, whose other ranks may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
