"""docs/reference/ is made from the code: ops, commands, declarations, metrics, peers, results.

``python -m gem.commands.reference`` writes the pages of a checkout anew; a test fails while they differ from what
the code says. What a page tells is what a reader would find in the code: signatures, docstrings, models, tables of
names. So an error on a page is mended in the code.
"""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

import gem
from gem import paths
from gem.errors import RequestError, exit_code_of
from gem.harness import names, needs, select
from gem.harness.case import Case, Implementation, MeasuredCase, Name, Needs, PeerName
from gem.harness.declaration import Head
from gem.harness.measured_params import MEASURED
from gem.harness.params import SUBJECTS, Params, SubjectParams
from gem.harness.reference_types import accepted, comments_of, fields_table, note_at, table, tables_in
from gem.harness.results import Document, Row, Status, WaterfallPart, write_text

MADE = "<!-- Made from the code by `python -m gem.commands.reference`. Mend the code, not this page. -->"
# Fields of a case that the suite file's place and its [suite] table give.
_GIVEN = ("suite", "file", "kind", "subject")
_WORDS = {
    Name: "letters, digits and `_ . + -`",
    PeerName: "a [peer](peers.md) of the subject",
    Implementation: f"one of {', '.join(f'`{one}`' for one in names.IMPLEMENTATIONS)}",
    Needs: "[needs](#needs)",
    SubjectParams: "table, by subject below",
    Params: "table, by subject below",
}
_NO_PARAMS = {"params": "`{}`"}


def write(folder: Path) -> list[Path]:
    """Write every page into `folder`; the pages' paths."""
    return [write_text(folder / name, page()) for name, page in PAGES.items()]


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((MADE, f"# {title}", *(part.strip("\n") for part in parts if part))) + "\n"


def _doc(thing: Any) -> str:
    """A docstring as Markdown."""
    return _markdown(inspect.getdoc(thing) or "")


def _markdown(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)


def _module_doc(module: Any, skip_first: bool = True) -> str:
    text = _doc(module)
    return text.partition("\n\n")[2] if skip_first else text


# ---- ops


def ops_page() -> str:
    """The public names of `gem`."""
    from gem import dispatch, ops
    from gem.implementations import TABLE

    public = [getattr(gem, name) for name in gem.__all__ if not name.startswith("_")]
    functions = sorted((one for one in public if inspect.isfunction(one)), key=lambda one: one.__name__ == "explain")
    classes = [one for one in public if inspect.isclass(one)]
    others = dispatch.IMPLEMENTATIONS[1:]  # the first is the oracle, which has them all
    rows = [[f"`{op}`", "yes", *(_has(TABLE[op].get(one)) for one in others)] for op in TABLE]
    made = table(["op", *dispatch.IMPLEMENTATIONS], rows)
    parts = [_module_doc(ops)]
    for one in functions:
        parts += [f"## gem.{one.__name__}", f"```python\n{_signature(one)}\n```", _doc(one)]
    parts += ["## Implementations", _module_doc(dispatch), made]
    for one in classes:
        parts += [f"## gem.{one.__name__}", f"```python\n{_signature(one)}\n```", _doc(one)]
        for name, member in vars(one).items():
            if isinstance(member, classmethod):
                shown = _signature(getattr(one, name), f"{one.__name__}.{name}")
                parts += [f"```python\n{shown}\n```", _doc(getattr(one, name))]
    return _page("Ops", *parts)


def _has(found: Any) -> str:
    return "–" if found is None else "yes"


def _signature(function: Callable[..., Any], name: str = "") -> str:
    """``name(`` a parameter a line, as it is written in the source ``)``."""
    signature = inspect.signature(function)
    shown = []
    keyword = False
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not keyword:
            keyword = True
            shown.append("*")
        shown.append(_plain(str(one)))
    returns = signature.return_annotation
    arrow = "" if returns is signature.empty else f" -> {_plain(inspect.formatannotation(returns))}"
    inside = "".join(f"    {one},\n" for one in shown)
    return f"{name or function.__name__}(\n{inside}){arrow}"


def _plain(text: str) -> str:
    return re.sub(r"(?:torch|gem\.\w+|collections\.abc|typing)\.(?=[A-Z])|'(?=[A-Z])|(?<=\w)'$", "", text)


# ---- commands


def commands_page() -> str:
    """Every command of `gem` with its arguments and options."""
    import typer

    from gem import cli
    from gem.commands.examples import EXAMPLES

    parts = [_module_doc(cli), "Of every command: `--help`. [Completion in shells](../howto.md#complete-in-the-shell)."]
    group: Any = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        told = inspect.getdoc(command.callback) or ""
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
        usage = " ".join(["gem", name, *(_argument(one) for one in arguments), "[OPTIONS]" if options else ""]).strip()
        rows = [[f"`{_argument(one)}`", _help(one), ""] for one in arguments]
        rows += [[f"`{_option(one)}`", _help(one), _default(one)] for one in options]
        parts += [f"## gem {name}", f"```\n{usage}\n```", _markdown(told), table(["", "", "default"], rows)]
        if name in EXAMPLES:
            shown = "\n".join(f"# {what}\n{line}" for what, line in EXAMPLES[name])
            parts.append(f"```bash\n{shown}\n```")
    return _page("Commands", *parts)


def _argument(one: Any) -> str:
    shown = (one.metavar or one.name.upper()).removesuffix("...").strip("[]{}")
    shown += "..." if one.nargs == -1 else ""
    return shown if one.required else f"[{shown}]"


def _option(one: Any) -> str:
    value = "" if one.is_flag else f" {one.metavar or one.name.upper()}"
    return ", ".join(sorted(one.opts, key=len)) + value + (" …" if one.multiple else "")


def _help(one: Any) -> str:
    return (one.help or "").partition("  [default:")[0]


def _default(one: Any) -> str:
    written = re.search(r"\[default: (.*)\]", one.help or "")
    if written:
        return f"`{written[1]}`"
    return "" if one.default in (None, False, ()) else f"`{one.default}`"


# ---- declarations


def declarations_page() -> str:
    """Suite files, length profiles, and what their fields accept."""
    from gem.data import lengths
    from gem.data.distributions import AnyDistribution

    kinds = {**dict.fromkeys(SUBJECTS, names.OP_KINDS), **{name: one.kinds for name, one in MEASURED.items()}}
    models = {**SUBJECTS, **{name: one.params for name, one in MEASURED.items()}}
    matrix = (
        "And `matrix`: a table of parameter = list of values, one case each; of an op also `fixture`. "
        "In `[suite.defaults]` the same fields but `name`."
    )
    parts = [
        "A suite is a TOML file: a `[suite]` table, then `[[case]]` tables. [Explained](../cases.md). An unknown "
        "field, or text for a number, is an error of one line that names file, case, field and what is accepted.",
        "## `[suite]`",
        fields_table(Head),
        table(["subject", "kinds"], [[f"`{one}`", ", ".join(f"`{kind}`" for kind in of)] for one, of in kinds.items()]),
        "## `[[case]]` of an op",
        _doc(Case),
        fields_table(Case, _GIVEN, _words(Case), _NO_PARAMS),
        matrix,
        "## `[[case]]` of a measured subject",
        _doc(MeasuredCase),
        fields_table(MeasuredCase, _GIVEN, _words(MeasuredCase), _NO_PARAMS),
    ]
    for field, model in {**tables_in(Case), **tables_in(MeasuredCase)}.items():
        if field != "params":
            parts += [f"## `[case.{field}]`", _doc(model), fields_table(model)]
    for subject, model in models.items():
        parts += [f"## params of {subject}", _doc(model), fields_table(model)]
    parts += [
        "## needs",
        _module_doc(needs),
        "## expect",
        "`<direction>.<metric>`, of a measured subject `<metric>`, to a comparison (`>=`, `<=`, `>`, `<`, `==`) and a "
        "number. [Metrics](metrics.md).",
        "## -k EXPR",
        _doc(select),
        "## Length profiles",
        _doc(lengths.Profile),
        fields_table(lengths.Profile, ("name",), {AnyDistribution: "table, its `kind` below"}),
    ]
    for model in get_args(get_args(AnyDistribution)[0]):
        kind = accepted(model.model_fields["kind"].annotation)
        parts += [f"### kind = {kind}", _doc(model), fields_table(model, ("kind",))]
    return _page("Declarations", *parts)


def _words(model: type[BaseModel]) -> dict[Any, str]:
    """What the fields accept, in words; tables are links to their own."""
    links = {one: f"table, [below](#case{field})" for field, one in tables_in(model).items() if field != "params"}
    return {**_WORDS, **links}


# ---- metrics, peers, results


def metrics_page() -> str:
    """Every metric of a row, with the comments of its declaration, in the groups that these make."""
    source = inspect.getsource(names)
    comments = comments_of(source)
    entries = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "METRICS"
    )
    assert isinstance(entries, ast.Dict)
    groups: dict[str, list[list[str]]] = {"of an op": []}
    group = "of an op"
    for key, value in zip(entries.keys, entries.values, strict=True):
        assert isinstance(key, ast.Constant)
        above = comments.get(key.lineno - 1)
        if above and above[1]:
            group = above[0]
        beside = {line: one for line, one in comments.items() if not one[1]}
        metric = names.METRICS[str(key.value)]
        note = note_at(beside, key.lineno, value.end_lineno or key.lineno)
        groups.setdefault(group, []).append([f"`{key.value}`", metric.unit or "–", metric.better, note])
    ratio = names.metric(f"{names.RATIO_PREFIX}x")
    assert ratio is not None
    note = "the peer's time over ours, or our rate over the peer's"
    groups["of an op"].append([f"`{names.RATIO_PREFIX}<peer>`", ratio.unit, ratio.better, note])
    slowdown = names.metric(f"{names.SLOWDOWN_PREFIX}x")
    assert slowdown is not None
    note = "time beside the neighbour over time alone, measured in turns"
    groups["of contention"].append([f"`{names.SLOWDOWN_PREFIX}<neighbour>`", slowdown.unit, slowdown.better, note])
    note = "of `bytes_sent`: for what, on which tier (`host`, `zone`, `cluster`); of the rank that sends most of it"
    groups["of ranks"].append([f"`{names.SENT_PREFIX}<what>.<tier>`", "B", "lower", note])
    parts = [
        "What the metrics of an op mean, and how they are measured: [What a row says](../cases.md#what-a-row-says)."
    ]
    for title, rows in groups.items():
        parts += [f"## {title[0].upper()}{title[1:]}", table(["metric", "unit", "better", ""], rows)]
    return _page("Metrics", *parts)


def peers_page() -> str:
    """Every peer: what it is, what it needs, of which subjects, and where its code is."""
    from gem.harness.peers import REGISTRY

    racers = {name: target for one in MEASURED.values() for name, target in one.racers.items()}
    rows = [
        [
            f"`{name}`", peer.what, f"`{peer.needs}`" if peer.needs else "",
            ", ".join(f"`{one}`" for one in peer.subjects), f"`{(REGISTRY.get(name) or racers[name])}`",
        ]
        for name, peer in names.PEERS.items()
    ]  # fmt: skip
    how = (
        "What each is given, and how it is made comparable: [Peers](../cases.md#peers). [Adding one](../extending.md)."
    )
    return _page("Peers", how, table(["peer", "what it is", "needs", "subjects", "code"], rows))


def results_page() -> str:
    """The document that a run writes."""
    statuses = f"Statuses, from harmless to worst: {', '.join(f'`{one}`' for one in _severity())}."
    known = {Status: ", ".join(f"`{one}`" for one in get_args(Status))}
    return _page(
        "Results",
        "`gem run --json FILE` and `gem train --json FILE` write one JSON document.",
        "## Document", _doc(Document), fields_table(Document),
        "## Row", _doc(Row), statuses, fields_table(Row, named=known).replace("left out", "null"),
        "## WaterfallPart", _doc(WaterfallPart), fields_table(WaterfallPart),
    )  # fmt: skip


def _severity() -> tuple[str, ...]:
    return importlib.import_module("gem.harness.results").SEVERITY


PAGES: dict[str, Callable[[], str]] = {
    "ops.md": ops_page,
    "commands.md": commands_page,
    "declarations.md": declarations_page,
    "metrics.md": metrics_page,
    "peers.md": peers_page,
    "results.md": results_page,
}


def main() -> None:
    """Write the pages of this checkout."""
    root = paths.checkout_root()
    if root is None:
        raise RequestError("gem is not run from a checkout; accepted: a checkout, which has docs/reference/")
    for path in write(root / "docs" / "reference"):
        print(path.relative_to(root))


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
