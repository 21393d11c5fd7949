"""The results document: nothing not finite is written, nothing half is written, and what is read is checked."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from gem.errors import RequestError
from gem.harness.results import (
    Document,
    Row,
    WaterfallPart,
    case_status,
    own_status,
    read_document,
    write_document,
    write_text,
)


def row(**given: object) -> Row:
    fields = {"suite": "suites/t.toml", "case": "a", "impl": "torch", "direction": "forward", "metric": "ms"}
    return Row.model_validate({**fields, "status": "pass", "value": 1.5, **given})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_an_error_without_a_value(value: float) -> None:
    found = row(value=value, metric="max_error", reason="dq")
    assert (found.value, found.status) == (None, "error")
    assert found.reason == f"max_error is {value}; dq"


def test_samples_that_are_not_finite_are_an_error() -> None:
    found = row(samples=[1.0, math.nan, 2.0])
    assert (found.samples, found.status) == ([1.0, 2.0], "error")
    assert found.reason == "1 of 3 samples are not finite"


def test_a_document_comes_back_as_it_was(tmp_path: Path) -> None:
    document = Document(
        environment={"torch": "2.13", "cores": np.int64(2), "path": Path("x"), "clock": math.nan},
        request={"argv": ("run", "suites")},
        fixtures={"f": {"q": {"counts": np.array([1, 2])[0], "edges": [0.0, math.inf]}}},
        rows=[row(samples=[1.25, 1.5]), row(metric="ratio_to.flex", better="higher", status="fail", reason="> 2")],
        ceilings={"gbps": np.float32(2.5)},
    )
    path = tmp_path / "made" / "r.json"
    assert write_document(document, path) == path
    text = path.read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"bare {word} is no JSON"))
    again = read_document(path)
    assert again.rows == document.rows
    assert again.environment == {"torch": "2.13", "cores": 2, "path": "x", "clock": None}
    assert again.fixtures == {"f": {"q": {"counts": 1, "edges": [0.0, None]}}}
    assert (again.schema_version, again.request, again.ceilings) == (2, {"argv": ["run", "suites"]}, {"gbps": 2.5})


def test_a_row_has_the_fields_of_the_design() -> None:
    wanted = "suite case impl direction metric value unit better samples status reason"
    assert list(Row.model_fields) == wanted.split()
    parts = "schema_version environment request fixtures rows ceilings waterfalls"
    assert list(Document.model_fields) == parts.split()


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_text(tmp_path / "r.json", "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["r.json"]


def test_the_file_appears_only_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "r.json", []
    real = os.replace

    def spy(source: str, target: Path) -> None:
        seen.append((path.exists(), Path(source).read_text()))
        real(source, target)

    monkeypatch.setattr(os, "replace", spy)
    write_text(path, "all of it")
    assert seen == [(False, "all of it")]
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "file" / "r.json"):
        with pytest.raises(RequestError, match="cannot be written") as caught:
            write_text(target, "x")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"{", "document: Invalid JSON"),
        (b"[]", "document: Input should be an object"),
        (
            b'{"schema_version": 1, "waterfalls": {"s::a/gem": []}}',
            "document: Value error, waterfalls in a document of",
        ),
        (b'{"waterfalls": {"s::a/gem": []}}', "document: Value error, waterfalls.s::a/gem: no row is of that case"),
        (
            b'{"waterfalls": {"k": [{"part": "x", "ms": 1, "of": "modle"}]}}',
            "waterfalls.k.0.of: Input should be 'model'",
        ),
        (b'{"waterfalls": {"k": [{"part": "x", "ms": null, "of": "rest"}]}}', "waterfalls.k.0.ms: Input should be"),
        (b'{"schema_version": 3}', "schema_version: Input should be 1 or 2"),
        (b'{"rows": [{"suite": "s"}]}', "rows.0.case: Field required"),
        (b'{"rows": [], "notes": 1}', "notes: Extra inputs"),
        (b"\xff", "cannot be read: not UTF-8 text"),
    ],
)
def test_what_is_no_document_is_one_line(text: bytes, where: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text)
    with pytest.raises(RequestError) as caught:
        read_document(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {where}") and "accepted:" in message and "\n" not in message


def test_a_missing_document_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no\.json: cannot be read: No such file"):
        read_document(tmp_path / "no.json")


def test_a_case_is_as_bad_as_the_worst_row_of_its_subject() -> None:
    assert own_status([row(), row(status="skipped")]) == "pass"
    assert own_status([row(status="skipped")]) == "skipped"
    assert own_status([row(), row(status="oom"), row(status="fail")]) == "oom"
    assert own_status([row(status="oom"), row(status="error")]) == "error"
    # A peer out of memory is the peer's; a case of which nothing is said did not pass.
    assert own_status([row(), row(impl="flex", status="oom")]) == "pass"
    assert own_status([row(impl="flex")]) == "error"
    assert own_status([]) == "error"
    rows = [row(case="b"), row(case="a", status="fail"), row(case="b", status="error"), row(case="a")]
    assert list(case_status(rows).items()) == [("suites/t.toml::b", "error"), ("suites/t.toml::a", "fail")]


def test_waterfalls_belong_to_contestants_and_older_documents_have_none(tmp_path: Path) -> None:
    parts = [WaterfallPart(part="tower", ms=3.5, of="model"), WaterfallPart(part="between", ms=-0.5, of="rest")]
    document = Document(rows=[row(impl="gem", direction="")], waterfalls={"suites/t.toml::a/gem": parts})
    assert read_document(write_document(document, tmp_path / "r.json")).waterfalls == document.waterfalls
    old = tmp_path / "old.json"
    old.write_text('{"schema_version": 1, "rows": []}')
    assert (read_document(old).schema_version, read_document(old).waterfalls) == (1, {})
