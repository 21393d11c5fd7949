"""gem train: the GEM model, alone or as torchrun's processes."""

import re
from pathlib import Path
from typing import Annotated

import typer

from gem.commands.common import EXIT_INTERRUPTED, Device, check_outputs, show


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
    not defined. 2: the request was wrong, or the run diverged. 130: interrupted; the last checkpoint stays.
    """
    from gem.train.config import load_config

    check_outputs(json, html)
    checked = load_config(config, tuple(changes or ()), plan)

    from gem.harness import environment, table, training
    from gem.train.checkpoint import Checkpoints
    from gem.train.loop import Run
    from gem.train.world import join

    place = Path("results") / config.stem if folder is None else folder
    try:
        with join(device) as world:
            if not world.first:
                Run(checked, place, world).train(resume=not fresh)
                return
            with training.TrainingConsole(table.make_console(stderr=True), place) as console:
                result = Run(checked, place, world, console).train(resume=not fresh)
            document = training.document_of(result, checked, config.stem, environment.capture(world.device.type))
    except KeyboardInterrupt:
        latest = Checkpoints(place / "checkpoints").latest()
        kept = f"the last checkpoint is {latest}; the same command goes on from it" if latest is not None else ""
        typer.echo(f"gem: interrupted: {kept or 'no checkpoint was saved yet'}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    document.request["argv"] = [re.sub(r"(^|=)/(?:.*/)?", r"\1", word) for word in context.obj]
    summary = show(document, json, html, verbose=True)
    raise typer.Exit(1 if summary.failed or summary.errored else 0)
