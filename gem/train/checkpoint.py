"""Checkpoints by torch.distributed.checkpoint that a kill at any moment cannot spoil, and what an exact resume needs.

A checkpoint is a folder ``step-000123`` that exists only when it is whole: it is written as ``step-000123.part``,
brought to the disk, and renamed. Nothing that is replaced or removed is touched under its own name.
"""

import json
import os
import random
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful

from gem.errors import RequestError
from gem.train.checkpoint_plans import ExactLoad, PiecewiseSave, cause

_NAME = re.compile(r"step-(\d{6,})(\.old)?")
_MANIFEST = "manifest.json"
_OWN = "own"  # entries own/<rank>: what only that rank can use
_T = TypeVar("_T")

State = Mapping[str, Any]  # by name: Stateful objects, or dicts


class Damaged(RequestError):
    """A checkpoint whose files are not as they were written."""

    path: Path
    fault: str
    before: int | None  # step of the whole one before it


class Checkpoints:
    """The checkpoints of one run in one folder, which all ranks can reach; the newest ``keep`` stay.

    Alone or in a process group (``group``, None: the default one, once it is initialised); then every rank calls
    ``save`` and ``load``, and each gets the error that one of them meets.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, group: dist.ProcessGroup | None = None) -> None:
        if keep < 1:
            raise RequestError(f"checkpoints: keep {keep}; accepted: 1 or more")
        self.folder, self.keep, self.group = Path(folder), keep, group
        if self.folder.exists() and not self.folder.is_dir():
            raise RequestError(f"{self.folder}: is no folder; accepted: a folder for checkpoints, or nothing yet")

    # -- what there is

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        return sorted(self._found())

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = self._found()
        return found[max(found)] if found else None

    def _found(self) -> dict[int, Path]:
        # A kill while a step is saved for the second time may leave its first checkpoint under the name of .old alone.
        names = {path.name: path for path in self.folder.iterdir()} if self.folder.is_dir() else {}
        matches = [match for match in map(_NAME.fullmatch, names) if match]
        return {int(m[1]): names[m[0]] for m in sorted(matches, key=lambda m: len(m[0]), reverse=True)}

    # -- save

    def save(self, step: int, state: State, own: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint and return its folder; older ones beyond ``keep`` go once it is whole.

        state  by name: Stateful objects (modules, optimizers) or dicts of tensors and plain values, keyed by names.
               Plain tensors and values are taken to be the same on every rank and are written once, DTensors by shards
        own    any values of this rank alone (random numbers, the reader's place); they can only be loaded by as many
               ranks. Here no tensors that matter in size

        RequestError where it cannot be written, on a full disk say: nothing of it is left, the older ones stay.

        Steps grow: a step before the newest one is refused (``forget_after``). The same step is replaced.
        """
        _check_names(state, "state")
        part = self.folder / f"step-{step:06d}.part"
        self.first(lambda: self._prepare(step, part))
        try:
            final = self._write(step, part, state, own)
        except OSError as error:
            raise self._unwritten(part, error) from None
        finally:  # renamed where all went well; half a checkpoint would only fill the disk
            if self._rank == 0 and part.exists():
                shutil.rmtree(part, ignore_errors=True)
        self.first(lambda: self._tidy(final))
        return final

    def _write(self, step: int, part: Path, state: State, own: Mapping[str, Any] | None) -> Path:
        entries = {**state, f"{_OWN}/{self._rank}": (dict(own or {}),)}  # a tuple is stored as one value
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                dcp_save(
                    entries, storage_writer=FileSystemWriter(part), planner=PiecewiseSave(),
                    process_group=self.group, no_dist=not self._distributed,
                )  # fmt: skip
            except CheckpointException as error:
                raise cause(error) from None
        prefixes = (f"__{self._rank}_", *([".metadata"] if self._rank == 0 else []))
        written, fault = {}, None
        try:
            written = {path.name: _seal(path) for path in part.iterdir() if path.name.startswith(prefixes)}
        except OSError as error:  # told to the others, which wait for what this rank has to say
            fault = error
        everyone = []
        for seals, of_rank in self._gather((written, fault)):
            if of_rank is not None:
                raise of_rank
            everyone.append(seals)
        return self.first(lambda: self._commit(step, part, {n: s for seals in everyone for n, s in seals.items()}))

    def _unwritten(self, part: Path, error: OSError) -> RequestError:
        try:
            free = f"{shutil.disk_usage(self.folder).free / 2**30:.2f} GiB"
        except OSError as fault:
            free = f"unknown ({fault.strerror})"
        what = error.strerror or " ".join(str(error).split())
        return RequestError(
            f"{part}: cannot be written: {what}; free on its disk: {free}; accepted: a disk that "
            "can be written, with room for it; the checkpoints before it stay"
        )

    def _prepare(self, step: int, part: Path) -> None:
        if step < 0 or (newer := [s for s in self.steps() if s > step]):
            accepted = "0 or more" if step < 0 else f"{max(newer)} or more, or any after forget_after({step})"
            raise RequestError(f"{self.folder}: save of step {step}; accepted: {accepted}")
        try:
            self._clean()
            part.mkdir(parents=True)
        except OSError as error:
            raise self._unwritten(part, error) from None

    def _commit(self, step: int, part: Path, files: dict[str, list[int]]) -> Path:
        wanted = {info.relative_path for info in FileSystemReader(part).read_metadata().storage_data.values()}
        if missing := wanted - {path.name for path in part.iterdir()}:
            raise RequestError(f"{part}: {min(missing)} is not there; accepted: a folder that every rank can reach")
        manifest = {"step": step, "ranks": self._ranks, "torch": torch.__version__, "files": files}
        with open(part / _MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(part)
        final = part.with_suffix("")
        if final.exists():
            os.rename(final, final.with_suffix(".old"))
        os.rename(part, final)
        _sync_folder(self.folder)
        return final

    def _tidy(self, final: Path) -> None:
        """Remove what a whole checkpoint replaces, and the older ones."""
        replaced = final.with_suffix(".old")
        shutil.rmtree(replaced, ignore_errors=True)
        found = self._found()
        self._remove([found[s] for s in sorted(found)[: -self.keep]])

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: training goes on from ``step``, or the later ones are damaged."""

        def act() -> None:
            self._clean()
            self._remove([path for s, path in self._found().items() if s > step])

        self.first(act)

    def _clean(self) -> None:
        """Remove what a kill has left behind."""
        for path in self.folder.glob("step-*.part"):
            shutil.rmtree(path)
        for path in self.folder.glob("step-*.old"):
            if path.with_suffix("").exists():
                shutil.rmtree(path)

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            part = path.with_suffix(".part")  # half a checkpoint must not have the name of a whole one
            os.rename(path, part)
            _sync_folder(self.folder)
            shutil.rmtree(part)

    # -- load

    def load(
        self, state: State, own: dict[str, Any] | None = None, step: int | None = None, *, any_ranks: bool = False
    ) -> int | None:
        """Load the newest checkpoint, or that of ``step``, into ``state``; its step, or None where there is none.

        Tensors are filled in place, a piece at a time; other values are replaced in their dicts; Stateful objects get
        load_state_dict. Names, shapes and types must be the checkpoint's, all of them. ``own``: filled with what this
        rank saved; None: not asked for, then any number of ranks can load. ``any_ranks``: they can with ``own`` too,
        each with what one of those saved that there were, its number modulo theirs.

        RequestError where a file is not as it was written, before anything is loaded, naming the checkpoint before it;
        it is for the caller to go back to that one.
        """
        _check_names(state, "state")
        path, number = self.first(lambda: self._choose(step))
        if path is None:
            return None
        manifest = self.first(lambda: self._read_manifest(path, number))
        files = sorted(manifest["files"].items())[self._rank :: self._ranks]
        own_faults = [fault for name, seal in files if (fault := _fault(path, name, seal))]
        faults = [fault for found in self._gather(own_faults) for fault in found]
        if faults:
            raise self._damaged(path, number, faults[0])
        if own is not None and not any_ranks and manifest["ranks"] != self._ranks:
            raise RequestError(
                f"{path}: saved by {manifest['ranks']} ranks, each with values of its own; accepted: as many, not "
                f"{self._ranks}, or own=None to go without them"
            )
        entries: dict[str, Any] = dict(state)
        mine = f"{_OWN}/{self._rank % manifest['ranks']}"
        if own is not None:
            entries[mine] = None
        others = {f"{_OWN}/{rank}" for rank in range(manifest["ranks"])} - entries.keys()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                dcp_load(
                    entries, storage_reader=FileSystemReader(path), planner=ExactLoad(str(path), others, self._gather),
                    process_group=self.group, no_dist=not self._distributed,
                )  # fmt: skip
            except CheckpointException as error:
                raise cause(error) from None
        if own is not None:
            own.update(entries[mine][0])
        return number

    def _choose(self, step: int | None) -> tuple[Path | None, int]:
        found = self._found()
        if step is not None and step not in found:
            there = ", ".join(map(str, sorted(found))) or "none is there"
            raise RequestError(f"{self.folder}: no checkpoint of step {step}; accepted: {there}")
        if not found:
            return None, -1
        number = max(found) if step is None else step
        return found[number], number

    def _read_manifest(self, path: Path, step: int) -> dict[str, Any]:
        try:
            manifest = json.loads((path / _MANIFEST).read_text("utf-8"))
            if manifest["step"] == step and manifest["ranks"] > 0 and manifest["files"]:
                return manifest
            fault = f"{_MANIFEST} is of step {manifest['step']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            fault = f"{_MANIFEST}: {type(error).__name__}"
        raise self._damaged(path, step, fault)

    def _damaged(self, path: Path, step: int, fault: str) -> Damaged:
        older = [s for s in self.steps() if s < step]
        before = f"that of step {older[-1]}: load(step={older[-1]})" if older else "a whole one; none is before it"
        error = Damaged(f"{path}: damaged: {fault}; accepted: {before}")
        error.path, error.fault, error.before = path, fault, older[-1] if older else None
        return error

    # -- ranks

    @property
    def _distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    @property
    def _rank(self) -> int:
        return dist.get_rank(self.group) if self._distributed else 0

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self.group) if self._distributed else 1

    def _gather(self, value: _T) -> list[_T]:
        if not self._distributed:
            return [value]
        found: list[Any] = [None] * self._ranks
        dist.all_gather_object(found, value, group=self.group)
        return found

    def first(self, act: Callable[[], _T]) -> _T:
        """Have rank 0 act and the others wait for it; all return its value or raise its error."""
        outcome: list[Any] = [None, None]
        if self._rank == 0:
            try:
                outcome[0] = act()
            except Exception as error:
                outcome[1] = error
        if self._distributed:
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def _check_names(value: Any, where: str, depth: int = 0) -> None:
    """RequestError for keys that are no names, which would come back as names, and for what would be pickled whole."""
    stateful = isinstance(value, Stateful)
    fine = stateful or isinstance(value, dict) if depth == 1 else not stateful
    if not fine:
        accepted = "a dict, or an object with state_dict" if depth == 1 else "its state_dict()"
        raise RequestError(f"{where}: {type(value).__name__}; accepted: {accepted}")
    inside = value.state_dict() if stateful else value
    if not isinstance(inside, Mapping):
        return
    for key, inner in inside.items():
        if not isinstance(key, str):
            raise RequestError(f"{where}: key {key!r}; accepted: names (of torch's AdamW: optimizers.DenseState)")
        _check_names(inner, f"{where}.{key}", depth + 1)


def _seal(path: Path) -> list[int]:
    """[bytes, CRC-32] of a file."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
        return [file.tell(), crc]


def _fault(folder: Path, name: str, seal: list[int]) -> str | None:
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if (size := path.stat().st_size) != seal[0]:
        return f"{name} has {size} bytes, {seal[0]} were written"
    return None if _seal(path) == seal else f"{name} has other bytes than were written"


def _sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- random numbers ----------------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """State of the generators of Python, numpy, torch, and torch's current GPU where CUDA is in use; for ``own``."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def seed_rng(*words: int) -> None:
    """Set the same generators anew, to what follows from these numbers."""
    seed = int(np.random.SeedSequence(words).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the generators that ``rng_state`` read; RequestError for a GPU's state where there is none."""
    if state["cuda"] is not None and not torch.cuda.is_available():
        raise RequestError("random numbers: state of a GPU's generator, and no GPU here; accepted: a machine with one")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
