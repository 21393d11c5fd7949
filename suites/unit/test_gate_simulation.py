"""What the gate promises, held on recorded noise with a fixed seed: false alarms, and slowdowns found."""

from pathlib import Path

import numpy as np
import pytest
from gate_documents import cases, patch_file, write_rounds

from gem import paths
from gem.errors import RequestError
from gem.harness import gate_noise
from gem.harness.gate_simulation import DEFAULT, Machine, caught_by_row, gate_run, main, rates, recorded_changes, upper
from gem.harness.gate_stats import ALPHA, LOOKS

ROOT = paths.checkout_root()
ROWS = 28  # of the CPU's throughput cases


@pytest.fixture(scope="module")
def recorded() -> np.ndarray:
    if ROOT is None:
        pytest.skip("not run from a checkout")
    return recorded_changes(str(ROOT / DEFAULT))


def test_the_recorded_noise_is_enough_and_has_no_side(recorded: np.ndarray) -> None:
    rows, rounds = recorded.shape
    assert rows >= 6
    assert rounds >= 12
    # Of identical code neither side is slower: the gate's test takes for granted no more than that.
    for row in recorded:
        ups = int((row > 0).sum())
        assert rounds / 2 - 2 * rounds**0.5 <= ups <= rounds / 2 + 2 * rounds**0.5


@pytest.mark.parametrize(("name", "scale"), [("gate-noise", 1.0), ("gate-noise", 4.0), ("gate-noise-busy", 1.0)])
def test_at_most_one_false_alarm_in_a_hundred_gate_runs(name: str, scale: float) -> None:
    if ROOT is None:
        pytest.skip("not run from a checkout")
    recorded = recorded_changes(str(ROOT / "ci" / "measured" / "cpu" / f"{name}.json"))
    found = rates(recorded, ROWS, slow=0.0, runs=300, seed=1, scale=scale)
    assert found.false_alarm <= ALPHA


def test_a_slowdown_of_5_percent_is_caught_95_times_in_a_hundred(recorded: np.ndarray) -> None:
    found = rates(recorded, ROWS, slow=0.05, runs=300, seed=2)
    assert found.caught >= 0.95
    assert found.false_alarm <= ALPHA + 0.01  # of its neighbours


def test_the_simulation_tells_a_bad_gate_from_a_good_one(recorded: np.ndarray) -> None:
    """The rule that comes to mind first, more than half the threshold on average, cries wolf on the same noise."""
    machine = Machine(recorded, ROWS, seed=3)
    alarms = sum(bool((machine.rounds(6).mean(axis=1) > 0.025).any()) for _ in range(200))
    assert alarms / 200 > 10 * ALPHA


def test_rounds_are_those_recorded_with_a_coin_for_the_sides() -> None:
    recorded = np.array([[0.01, 0.02, 0.03], [0.1, 0.2, 0.3]])
    drawn = Machine(recorded, 4, seed=0).rounds(400)
    assert drawn.shape == (4, 400)
    assert np.allclose(drawn[1], 10 * drawn[0]), "rows of one recorded round stay together"
    assert not np.allclose(drawn[2], drawn[0])
    assert set(np.round(np.abs(drawn[0]), 6)) == {0.01, 0.02, 0.03}
    assert 0.35 < (drawn[0] > 0).mean() < 0.65


def test_without_noise_everything_is_known() -> None:
    quiet = Machine(np.full((2, 3), 1e-4), 4, seed=0)
    outcome = gate_run(quiet, [0.0, 0.05, 0.0, 0.1])
    assert outcome.worse == {1, 3}
    assert (outcome.ambiguous, outcome.suspects, outcome.fresh_rounds) == (0, 2, LOOKS[0])
    # Six rounds of which each shows 10 % and more are proof by themselves; 5 % is not.
    assert gate_run(quiet, [0.0, 0.05, 0.0, 0.12], limit=0).worse == {3}


def test_power_by_row_names_the_loud_one() -> None:
    """One row hardly moves, the other as much as the slowdown itself."""
    recorded = np.array([[0.001, -0.001, 0.0012, -0.0008], [0.3, -0.25, 0.2, -0.35]])
    quiet, loud = caught_by_row(recorded, 4, 0.05, runs=8)
    assert quiet == 1.0
    assert loud < 0.5


def test_the_upper_end_of_a_share() -> None:
    assert upper(0.0, 2000) == pytest.approx(0.0019, abs=1e-4)
    assert upper(0.01, 2000) == pytest.approx(0.0154, abs=1e-3)


def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "noise.json"
    gate_noise.main([*map(str, write_rounds(tmp_path, {"a": cases, "also": cases}, 8)), str(file)])
    main([str(file), "--runs", "4", "--rows", "3"])
    said = capsys.readouterr().out
    assert "3 rows, 8 rounds" in said
    assert said.count("\n| × ") == 15
    main([str(file), "--runs", "2", "--rows", "3", "--by-row"])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_noise_is_of_one_clean_commit(tmp_path: Path) -> None:
    def same(number: int):
        return cases(number, side=1)

    base, new = write_rounds(tmp_path, {"a": cases, "b": same}, 3)
    with pytest.raises(RequestError, match="accepted: noise of one clean commit"):
        gate_noise.record(str(base), str(new))
    for file in new.iterdir():
        patch_file(file, lambda data: data["environment"].update(git_commit="a" * 40))
    noise = gate_noise.record(str(base), str(new))
    assert [row.row for row in noise.rows] == [
        f"suites/throughput/jagged_attention.toml::{name} torch forward ms" for name in ("one", "two", "three")
    ]
    assert all(len(row.changes) == 3 for row in noise.rows)
    patch_file(new / "000.json", lambda data: data["environment"].update(git_dirty=True))
    with pytest.raises(RequestError, match="with changes"):
        gate_noise.record(str(base), str(new))
    (tmp_path / "no.json").write_text("[]")
    with pytest.raises(RequestError, match="no noise of"):
        gate_noise.read_noise(tmp_path / "no.json")
