"""What torchrun, or whoever starts the ranks, tells each of them in its environment. Nothing here imports torch."""

import os

from gem.errors import RequestError


def told(name: str, default: int, least: int = 0) -> int:
    """A number of the environment, ``default`` where it is not set. RequestError where it is none."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.strip().isascii() and text.strip().isdigit()) or int(text) < least:
        raise RequestError(
            f"{name}={text} in the environment; accepted: a whole number, {least} or more, as torchrun's"
        )
    return int(text)


def place() -> tuple[int, int]:
    """(this process's rank, how many there are). RequestError where they do not agree."""
    rank, ranks = told("RANK", 0), told("WORLD_SIZE", 1, least=1)
    if rank >= ranks:
        raise RequestError(f"RANK={rank} with WORLD_SIZE={ranks} in the environment; accepted: 0 to {ranks - 1}")
    told("LOCAL_RANK", 0)
    told("LOCAL_WORLD_SIZE", 1, least=1)
    return rank, ranks
