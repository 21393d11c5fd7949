"""asv's result files as the repository keeps them: ``ci/measured/asv/<machine>/<commit>-<environment>.json``.

asv writes into them where it ran: paths of the Python, names of the host, memory to the byte. A kept file is built anew
from what is known to be right, so that nothing else gets in, and so that two machines of one kind make one series.
"""

import json
import math
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gem.errors import RequestError
from gem.harness import environment

RESULT_VERSION, MACHINE_VERSION, BENCHMARKS_VERSION = 2, 1, 2  # asv 0.6.6's
# Of one machine's name on a CPU and on a GPU: another of these is another machine.
SAME = {"cpu": ("cpu", "num_cpu"), "gpu": ("gpu",)}
SOFTWARE = ("python", "torch", "triton", "threads")
COLUMNS = [
    "result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b", "stats_q_25",
    "stats_q_75", "stats_number", "stats_repeat", "samples", "profile",
]  # fmt: skip
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}")
NOT_MEASURED = "not-measured.txt"  # of a machine: "<commit> <reason>" a line; asv reads .json alone
_ABSOLUTE = re.compile(r"""(?:^|[\s"'(<=:,])(/(?:[\w.+-]+/)*[\w.+-]+)""")


# ---- the machine


def machine_name(gpu: str | None) -> str:
    """``h200`` of "NVIDIA H200", ``cpu`` without a GPU: a host's name changes with the host, its kind does not."""
    if gpu is None:
        return "cpu"
    words = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return words.removeprefix("nvidia-") or "gpu"


def checked_name(name: str) -> str:
    """The name, if a folder can have it. Raises RequestError."""
    if not NAME.fullmatch(name):
        raise RequestError(f"--machine: {name!r}; accepted: lower-case letters, digits, '.', '_' and '-'")
    return name


def machine_facts(name: str, env: dict[str, Any]) -> dict[str, Any]:
    """asv's machine.json for the `environment` of a results document: of which kind the machine is, not which."""
    memory = env.get("memory_gib")
    found = {
        "machine": checked_name(name),
        "os": str(env.get("platform") or platform.system()).partition("-")[0],
        "arch": platform.machine() if not env.get("platform") else _arch(str(env["platform"])),
        "cpu": env.get("cpu"),
        "num_cpu": str(env["cores"]) if env.get("cores") else None,
        "ram": f"{round(memory)} GiB" if memory else None,
        "gpu": env.get("gpu"),
    }
    return {key: value for key, value in found.items() if value} | {"version": MACHINE_VERSION}


def _arch(text: str) -> str:
    return next((word for word in ("x86_64", "aarch64", "arm64") if word in text), "")


def software(env: dict[str, Any]) -> dict[str, str]:
    """What is told of the software: a new torch is a new series, since its kernels are measured too.

    On a CPU the number of torch's threads decides most.
    """
    python = ".".join(str(env.get("python") or platform.python_version()).split(".")[:2])
    own = ("torch", "triton") if env.get("gpu") else ("torch", "threads")
    return {"python": python, **{key: str(env[key]) for key in own if env.get(key)}}


def environment_name(told: dict[str, str]) -> str:
    """``py3.11-torch2.13.0``: in file names."""
    parts = [f"py{told['python']}", *(f"{key}{value}" for key, value in told.items() if key != "python")]
    return re.sub(r"[^A-Za-z0-9.-]+", "_", "-".join(parts))


# ---- result files


def clean_result(document: dict[str, Any], machine: dict[str, Any], told: dict[str, str]) -> dict[str, Any]:
    """asv's result document with nothing of the place but its kind."""
    python = told["python"]
    columns = document["result_columns"]
    # The process's profile and the samples' single values are of no use to a graph.
    dropped = {columns.index(name) for name in ("samples", "profile") if name in columns}
    results = {}
    for name, row in sorted(document["results"].items()):
        kept = [None if at in dropped else value for at, value in enumerate(row)]
        while kept and kept[-1] is None:
            kept.pop()
        results[name] = kept
    found = {
        "commit_hash": document["commit_hash"],
        "env_name": environment_name(told),
        "date": document["date"],
        # Each value that differs is a series of its own; memory that a host has more of must not begin one.
        "params": {"machine": machine["machine"], **told},
        "python": python,
        "requirements": {},
        "env_vars": {},
        "result_columns": columns,
        "results": results,
        "durations": {},
        "version": RESULT_VERSION,
    }
    refuse_places(found)
    return found


def refuse_places(document: Any) -> None:
    """Raises ValueError for an absolute path, or this host's or user's name as a value, anywhere in it."""
    own = {platform.node(), os.environ.get("USER", ""), os.environ.get("LOGNAME", "")} - {""}
    for text in _texts(document):
        if text in own:
            raise ValueError(f"{text!r} is a name of this host or user; accepted: what is said of a kind of machine")
        if found := _ABSOLUTE.search(text):
            raise ValueError(f"{found[1]!r} is a path of this machine; accepted: what is said of a kind of machine")


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def keep(document: dict[str, Any], machine: dict[str, Any], folder: Path) -> Path:
    """Write a clean result under ``folder/<machine>/``; benchmarks of an earlier run that this one had not, stay.

    Raises RequestError where the folder holds results of another machine.
    """
    own = folder / machine["machine"]
    path = own / f"{document['commit_hash'][:8]}-{document['env_name']}.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["result_columns"] == document["result_columns"]:
            document = document | {"results": dict(sorted((before["results"] | document["results"]).items()))}
    known = own / "machine.json"
    if known.exists():
        before = json.loads(known.read_text(encoding="utf-8"))
        for key in SAME["gpu" if machine.get("gpu") else "cpu"]:
            if before.get(key) != machine.get(key):
                what = f"its {key} was {before.get(key)} and is {machine.get(key)} here"
                raise RequestError(f"machine {machine['machine']!r}: {what}; accepted: another name, by --machine")
    else:
        write_json(known, machine)
    write_json(path, document)
    forget(folder, machine["machine"], document["commit_hash"])
    return path


def failures(document: dict[str, Any]) -> int:
    """Benchmarks of which some parameter has no result because it failed (n/a is no failure)."""
    results = (row[0] if row else None for row in document["results"].values())
    return sum(found is None or None in found for found in results)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Written whole or not at all; a benchmark a line, so that what changed shows as that."""
    parts = (f" {json.dumps(key)}: {_lines(value)}" for key, value in _rounded(document).items())
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _lines(value: Any) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(inner)}" for key, inner in value.items()) + "\n }"


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


# ---- commits that could not be measured


def note_failure(folder: Path, machine: str, commit: str, reason: str) -> None:
    """Write down why a commit has no results; its earlier reason goes."""
    forget(folder, machine, commit)
    text = re.sub(r"\s+", " ", re.sub(r"\(?/[\w./+-]+\)?", "", reason)).strip() or "no reason given"
    path = folder / machine / NOT_MEASURED
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(before + f"{commit[:10]} {text}\n", encoding="utf-8")


def forget(folder: Path, machine: str, commit: str) -> None:
    """Take the commit off the list of those that were not measured."""
    path = folder / machine / NOT_MEASURED
    if path.exists():
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:10] != commit[:10]]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        if not kept:
            path.unlink()


# ---- the repository


def git(root: Path, *words: str) -> str:
    """What git says. Raises RequestError with its last line."""
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        raise RequestError(f"git {' '.join(words[:2])}: {said}; accepted: a commit of this repository")
    return done.stdout


def commit_and_date(root: Path, commit: str) -> tuple[str, int]:
    """(full hash, date in ms as asv has it) of a commit that may be given in short. Raises RequestError."""
    full = git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").strip()
    return full, 1000 * int(git(root, "show", "--no-patch", "--format=%at", full).strip())


def here() -> dict[str, Any]:
    """The environment of a run on this machine."""
    return environment.capture(os.environ.get("GEM_DEVICE", "auto"))
