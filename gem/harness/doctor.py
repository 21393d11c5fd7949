"""`gem doctor`: what this machine can run, and of the rest why not. Every lack is a line, never a failure."""

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gem.harness import environment, names
from gem.harness.case import AnyCase
from gem.harness.needs import Facts, check_needs
from gem.harness.params import SUBJECTS


def report(cases: list[AnyCase], facts: Facts, console: Console) -> None:
    """Print the machine, the implementations, the peers, the needs of `cases` and how many of them can run."""
    for table in (_machine(facts), _implementations(facts), _peers(facts)):
        console.print(table)
        console.print()
    if any(case.needs for case in cases):
        console.print(_needs(cases, facts))
        console.print()
    reasons = Counter(reason for case in cases if (reason := check_needs(case.needs, facts)))
    skipped = sum(reasons.values())
    console.print(f"{len(cases)} declared cases: {len(cases) - skipped} can run here, {skipped} would be skipped")
    for reason, count in reasons.most_common():
        console.print(f"  {count} × {reason}")


def _state(reason: str | None) -> Text:
    return Text("yes", style="green") if reason is None else Text(f"no: {reason}", style="yellow")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False, show_header=len(columns) > 2)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _machine(facts: Facts) -> Table:
    found = environment.capture(facts.device)
    table = _table("machine", "what", "value")
    shown = ("python", "torch", "triton", "cuda", "numpy", "host", "platform", "cpu", "cores", "threads", "memory_gib")
    for key in shown:
        missing = {"torch": "not installed", "triton": "not installed", "cuda": facts.no_cuda}.get(key, "unknown")
        table.add_row(key, str(found[key]) if found[key] is not None else missing)
    for gpu in environment.visible_gpus():
        table.add_row("gpu", ", ".join(f"{key} {value}" for key, value in gpu.items() if key != "uuid"))
    if not environment.visible_gpus():
        table.add_row("gpu", f"none: {facts.no_cuda}")
    table.add_row("compiler", facts.compiler or f"none: {facts.no_compiler}")
    table.add_row("device", f"{facts.device} (what --device auto takes)")
    table.add_row("gem", f"{found['gem']}, commit {found['git_commit']}{' with changes' if found['git_dirty'] else ''}")
    for key, value in found["settings"].items():
        table.add_row(key, value)
    return table


def implementation_reasons(facts: Facts) -> dict[tuple[str, str], str | None]:
    """(subject, implementation) → None when `gem` can run it on the run's device, else why not."""
    pairs = [(subject, one) for subject in SUBJECTS for one in names.IMPLEMENTATIONS]
    try:
        import torch

        from gem import dispatch

        # In a type and shape that all of them take.
        return {
            (subject, one): dispatch.refusal(dispatch.Call(subject, facts.device, torch.bfloat16, 4, 64), one)
            for subject, one in pairs
        }
    except Exception as error:  # torch without its shared libraries fails in many ways, and telling so is our job
        reason = f"cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        return dict.fromkeys(pairs, reason)


def _implementations(facts: Facts) -> Table:
    table = _table(f"implementations on {facts.device}", "op", *names.IMPLEMENTATIONS)
    reasons = implementation_reasons(facts)
    for subject in SUBJECTS:
        table.add_row(subject, *(_state(reasons[subject, one]) for one in names.IMPLEMENTATIONS))
    return table


def _peers(facts: Facts) -> Table:
    table = _table("peers", "peer", "what it is", "here")
    for name, peer in names.PEERS.items():
        table.add_row(name, peer.what, _state(check_needs(peer.needs, facts)))
    return table


def _needs(cases: list[AnyCase], facts: Facts) -> Table:
    table = _table("needs of the declared cases", "needs", "cases", "here")
    for needs, count in Counter(case.needs for case in cases if case.needs).most_common():
        table.add_row(needs, str(count), _state(check_needs(needs, facts)))
    return table
