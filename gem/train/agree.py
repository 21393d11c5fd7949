"""What ranks agree on before and while they train together: the data, and how the data are dealt to them."""

import json
from pathlib import Path
from typing import Any

from gem.data.samples import Samples
from gem.errors import RequestError
from gem.train.checkpoint import Checkpoints
from gem.train.world import World

LANES = "lanes"  # beside the configuration's fields in config.json: ranks that the run began with


def same_everywhere(facts: dict[str, Any], world: World) -> None:
    """RequestError, the same on every rank, that names the first rank which sees something else than rank 0 does.

    Each rank may read a disk of its own. Ranks with fewer samples would have fewer batches, and the others would wait.
    """
    everyone = world.gather(facts)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if everyone[0].get(name) != value:
                raise RequestError(
                    f"rank {rank}: {name} {value}, and {everyone[0].get(name)} on rank 0; accepted: the same data on "
                    "every rank"
                )


def lanes_of(folder: Path, checkpoints: Checkpoints, ranks: int) -> int:
    """Into how many the data are dealt: as many as the run in the folder began with ranks, these where none has."""
    latest = checkpoints.latest()
    if latest is None:
        return ranks
    for path, name in ((folder / "config.json", LANES), (latest / "manifest.json", "ranks")):
        try:
            found = json.loads(path.read_text()).get(name)
        except (OSError, ValueError, AttributeError):  # said where it is read for what else it holds
            continue
        if isinstance(found, int) and found > 0:
            return found
    return ranks


def pieces_of(batch: Samples, pieces: int, world: World) -> list[Samples]:
    """Of a step, on the device. With other ranks always so many, some without a sample where there are too few: ranks
    that have one model together go through each piece together."""
    found = batch.split(pieces)
    if world.size > 1:
        found += [batch.take(len(batch), len(batch))] * (pieces - len(found))
    return [piece.to(world.device) for piece in found]
