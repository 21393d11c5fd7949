"""The ablation of impl="gluon": peers change one thing each and refuse the rest, the suite is one that they can run.

Nothing runs: launches are looked at. What they compile to is test_hopper_compile's subject.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gem import reference, with_gluon
from gem.data.lengths import Lengths, load_profile
from gem.harness import names, peers
from gem.harness.case import ops_only
from gem.harness.params import GdpaParams, JaggedAttentionParams
from gem.harness.report_lines import lines_of
from gem.harness.report_measured import measured_sections
from gem.harness.subjects import build_inputs, run_reference
from gem.harness.suites import load_suites
from gem.harness.worker import Unsupported

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)

from result_rows import row

from gem.harness.report_commands import Commands
from gem.kernels import launch
from gem.kernels.hopper.choose import choose
from gem.kernels.schedule import Batch

SUITE = "suites/throughput/gdpa_ablation.toml"
ABLATION = ("gluon_unsorted", "gluon_drained", "gluon_tanh", "gluon_plain")
TAYLOR: dict[str, Any] = {"heads": 2, "head_dim": 64, "dtype": "bfloat16", "activation": "gelu_taylor", "qk_scale": 0.1}
LONG = Lengths("test", np.array([300, 0, 500]), np.array([300, 0, 500]), "self")
SHORT = Lengths("test", np.array([300, 200]), np.array([30, 50]), "cross")
PMA = Lengths("test", np.array([32, 32]), np.array([300, 500]), "pma", 32)


@pytest.fixture
def launched(monkeypatch) -> Iterator[list[tuple[Any, ...]]]:
    """As if a Hopper GPU were there; the launches that would have been: (Launch, grid, arguments)."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(with_gluon, "_look", lambda device, interpret: None)
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, grid, *given: found.append((self, grid, *given)))
    launch.PLANS.clear()
    yield found
    launch.PLANS.clear()


def taylor(**changed: Any) -> GdpaParams:
    return GdpaParams.model_validate(TAYLOR | changed)


def build(name: str, lengths: Lengths = LONG, **changed: Any) -> Any:
    inputs = build_inputs("gdpa", taylor(**changed), lengths, "cpu")
    return peers.load(name)(inputs, name)


@pytest.mark.parametrize("lengths", [LONG, SHORT, PMA], ids=["long", "short", "pma"])
@pytest.mark.parametrize("name", ABLATION)
def test_a_peer_is_the_unchanged_launch_but_for_one_thing(launched, name, lengths):
    """Against what the op itself launches for the same inputs."""
    if name == "gluon_plain" and lengths is not LONG:
        with pytest.raises(Unsupported, match="kernel for long keys and many queries; this batch has another"):
            build(name, lengths)
        return
    contestant = build(name, lengths)
    with torch.no_grad():
        assert contestant.forward().shape == contestant.inputs.d_out.shape
        inputs = contestant.inputs
        with_gluon.gdpa(
            inputs.q, inputs.k, inputs.v, None if inputs.shared_queries else inputs.q_offsets, inputs.k_offsets,
            activation="gelu_taylor", qk_scale=0.1, out_scale=1.0, causal=False, window=(-1, -1),
        )  # fmt: skip
    (changed, grid, *given), (plain, plain_grid, *plain_given) = launched
    assert grid == plain_grid
    assert [x is y for x, y in zip(given[:3], plain_given, strict=False)] == [True] * 3
    counter = (
        0 if name == "gluon_plain" else 1
    )  # of claimed jobs, which gdpa_plain has not; it stands before their number
    assert given[6 + counter :] == plain_given[7:]  # heads, programs, shared, scales
    if name == "gluon_plain":
        assert (changed.kernel.__name__, plain.kernel.__name__) == ("_gdpa_plain", "_gdpa_long")
        assert changed.options["num_warps"] == 8 and changed.options["ZIGZAG"] == 1
        assert changed.ragged == {0: 128, 1: 128, 2: 128, 3: 128}
        return
    assert given[6] == plain_given[6]  # jobs
    assert changed.kernel is plain.kernel
    differ = {key: value for key, value in changed.options.items() if value != plain.options[key]}
    assert (
        differ
        == {
            "gluon_unsorted": {"ZIGZAG": 0, "CLAIMS": 0},
            "gluon_drained": {"PIPELINED": 0},
            "gluon_tanh": {"ACT": "gelu_tanh"},
        }[name]
    )
    tiles, plain_tiles = given[4], plain_given[4]
    samples = [sample for sample, *_ in tiles.tolist() if sample >= 0]
    assert (tiles is plain_tiles) is (name != "gluon_unsorted")
    assert name != "gluon_unsorted" or samples == sorted(samples)


@pytest.mark.parametrize("name", ABLATION)
def test_what_a_peer_says_of_itself(launched, name):
    contestant = build(name)
    assert contestant.computes == ("gelu_tanh" if name == "gluon_tanh" else "same")
    assert contestant.repeatable and contestant.no_backward.startswith(f"{name} is a forward")
    assert contestant.leaves is contestant.inputs.leaves and contestant.negated is contestant.inputs.v
    assert names.PEERS[name].needs == "cuda:sm90, triton" and names.PEERS[name].subjects == ("gdpa",)


@pytest.mark.parametrize(("changed", "reason"), [
    ({"causal": True}, "no causal or window mask"),
    ({"dtype": "float32"}, "bfloat16 and float16, not float32"),
    ({"head_dim": 32}, "head_dim 64 and 128, not 32"),
])  # fmt: skip
@pytest.mark.parametrize("name", ABLATION)
def test_what_the_gluon_kernels_cannot_run_its_forms_cannot(launched, name, changed, reason):
    with pytest.raises(Unsupported, match=f"{name} is impl='gluon' with one thing changed: .*{reason}"):
        build(name, **changed)


def test_what_has_nothing_to_change_is_refused(launched):
    with pytest.raises(Unsupported, match="gelu_tanh in the place of gelu_taylor, and this case silu"):
        build("gluon_tanh", activation="silu")
    inputs = build_inputs("jagged_attention", JaggedAttentionParams(heads=2, head_dim=64), LONG, "cpu")
    with pytest.raises(Unsupported, match="gluon_drained computes gdpa, not jagged_attention"):
        peers.load("gluon_drained")(inputs, "gluon_drained")


@pytest.mark.parametrize("name", ABLATION)
def test_without_a_hopper_gpu_it_says_so(name):
    with pytest.raises(Unsupported, match=r"compute capability 9.0 \(Hopper\), not for cpu"):
        build(name)


def test_the_oracle_of_another_activation_is_that_ones():
    inputs = build_inputs("gdpa", taylor(dtype="float64"), SHORT, "cpu")
    args = (inputs.q, inputs.k, inputs.v, inputs.q_offsets, inputs.k_offsets)
    found = {way: run_reference(inputs, way) for way in ("same", "gelu_tanh", "softmax")}
    for activation, way in (("gelu_taylor", "same"), ("gelu_tanh", "gelu_tanh")):
        expected = reference.gdpa(*args, activation=activation, qk_scale=0.1)
        assert torch.equal(found[way], expected)
    assert not torch.equal(found["same"], found["gelu_tanh"])


# -- the suite ---------------------------------------------------------------------------------------------------------


def test_the_suite_holds_each_part_that_a_case_has():
    """A case names every peer that can run it, but for the sorting of equal lengths; and tells the claims of each."""
    claims = {"gluon_unsorted": "zigzag, skew 6x", "gluon_drained": "outer pipelining, ~10 %",
              "gluon_tanh": "Taylor instead of tanh", "gluon_plain": "warp specialisation"}  # fmt: skip
    cases = ops_only(load_suites([SUITE]))
    shapes = ("self_long_d128", "self_long_d64", "dense_4k_d128", "cross_short_kv_d128", "pma_q64_d128")
    assert [case.name for case in cases] == [f"ablation_{shape}" for shape in shapes]
    for case in cases:
        assert (case.impls, case.directions, case.needs) == (["gluon"], ["forward"], "cuda:sm90, triton")
        assert isinstance(case.params, GdpaParams) and case.params.activation == "gelu_taylor"
        lengths = load_profile(case.fixture).draw()
        edges = torch.zeros(lengths.batch + 1, dtype=torch.int64)
        shared = lengths.queries or 0
        batch = Batch(None if shared else edges, edges, lengths.tokens_q, lengths.tokens_k, shared=shared)
        variant = choose(batch, case.params.head_dim)
        equal = len({*lengths.k}) == 1
        plain = variant.kernel == "long" and variant.lanes == 1
        assert case.peers == [
            name for name in ABLATION if not (equal and name == "gluon_unsorted") and (plain or name != "gluon_plain")
        ]
        for name, claim in claims.items():
            assert (claim in case.description) is (name in case.peers), (case.name, name)


def test_the_report_has_a_section_of_what_each_part_gains():
    rows = []
    for case, gains in (("a", (1.05, 1.2)), ("b", (1.0, None))):
        told = {"suite": SUITE, "case": case, "direction": "forward"}
        rows.append(row(**told, impl="gluon", metric="ms", value=1.0))
        for peer, gain in zip(("gluon_unsorted", "gluon_plain"), gains, strict=True):
            status = "pass" if gain is not None else "skipped"
            rows.append(row(**told, impl="gluon", metric=f"ratio_to.{peer}", value=gain, status=status))
    (section,) = measured_sections(lines_of(rows, 0), Commands([{}], [""]), [""])
    assert (section.id, section.heading) == ("ablation", "Ablation")
    ((suite, (card,), table),) = section.parts
    assert table is not None and card.table is not None
    assert suite == SUITE and "ratio" not in card.note and table.size == 2
    found = {label.split(":")[0]: [line.cells[2].value for line in own] for label, own in card.table.groups}
    assert found == {"gluon_unsorted": [1.05, 1.0], "gluon_plain": [1.2]}
    assert all(names.PEERS[label.split(":")[0]].what in label for label, _ in card.table.groups)
