"""Ranks that die, hang, fail alone or have no batch: all end, soon, with one line, and the last checkpoint goes on.

Real processes on gloo, which are really killed and stopped. Whoever goes on, on however many ranks, by whatever plan
or none, ends where the run ends that nothing has befallen.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks_program
import torch
from ranks_program import CONFIG, Fault, Ranks

from gem.train.checkpoint import Checkpoints
from gem.train.config import parse_config
from gem.train.loop import Run
from gem.train.sources import open_sources
from gem.train.step import Stepper
from gem.train.world import join

PLAN: dict[str, Any] = {"expert": 2, "tables": "v3", "table_replicas": 2}
TIMEOUT, GONE = 6.0, 3.0  # of the runs: CONFIG's timeout_s, and what follows from it for who has died
SLACK = 30.0  # for a machine that has other things to do; far below the minutes of torch's own timeouts
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


def started(folder: Path, ranks: int, fault: Fault | None = None, **changes: Any) -> Ranks:
    """`gem train` in that folder, by the plan unless another or none is said."""
    config = {name: x for name, x in (CONFIG | {"plan": PLAN} | changes).items() if x is not None}
    return ranks_program.start(ranks, Path(f"{folder}.err"), ranks_program.main, config, str(folder), fault)


def came_through(folder: Path, ranks: int, fault: Fault | None = None, **changes: Any) -> str:
    """What such a run said that ended well."""
    run = started(folder, ranks, fault, **{"timeout_s": 60.0} | changes)
    codes = run.wait(120)
    assert codes == [0] * ranks, run.said[-3000:]
    return run.said


def ended(run: Ranks, within_s: float, but: int | None = None) -> tuple[list[int | None], str]:
    """(exit codes, the one line that was said); the bound is of the time from the last checkpoint on."""
    seen = time.monotonic() + 60
    while time.monotonic() < seen and any(code is None for r, code in enumerate(run.codes) if r != but):
        if "step-000004" in run.said or run.lines:
            break
        time.sleep(0.05)
    began = time.monotonic()
    codes = run.wait(within_s + SLACK, but)
    assert time.monotonic() - began < within_s + SLACK, run.said[-3000:]
    assert len(run.lines) == 1, run.said[-3000:]
    return codes, run.lines[0]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Of a checkpoint, by one process, with the optimizers' state."""
    config = parse_config(CONFIG, "test")
    with join("cpu") as world:
        stepper = Stepper(open_sources(config, folder, world).schema, config, world)
        state = stepper.state()
        assert Checkpoints(folder / "checkpoints", keep=100).load(state, step=step) == step
        sums = {f"sum {name}": x for name, x in state["tables"].state_dict()["sums"].items()}
        return {name: x.clone() for name, x in (stepper.model.state_dict() | sums).items()}


def same(folder: Path, reference: Path, step: int = 10) -> None:
    """The same weights after so many steps, up to the order of sums."""
    found, wanted = weights(folder, step), weights(reference, step)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def losses(said: str) -> dict[int, float]:
    """By step, as told."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)/\d+  loss (\S+)", said, re.MULTILINE)}


def alone(folder: Path, **changes: Any) -> None:
    """The run in one process without a plan."""
    with join("cpu") as world:
        Run(parse_config(CONFIG | changes, "test"), folder, world).train()


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Path, dict[int, float]]:
    """(folder, losses told) of the run that nothing befalls: two ranks by the plan."""
    return folder / "reference", losses(came_through(folder / "reference", 2, log_every=1, checkpoint_every=1))


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_ends_the_others_and_the_same_command_goes_on(folder, reference):
    run = started(folder / "killed", 2, Fault("SIGKILL"))
    codes, line = ended(run, GONE)
    assert codes == [3, -9]
    assert line.startswith("gem: error: rank 1: no sign of life for ") and "(killed, out of memory, stopped" in line
    latest = f"{folder}/killed/checkpoints/step-000004"
    assert line.endswith(f"; the last checkpoint is {latest}; the same command goes on from it")
    assert "process " in line and "Traceback" not in run.said
    assert "going on from" in came_through(folder / "killed", 2)
    same(folder / "killed", reference[0])


def test_rank_0_which_keeps_the_store_may_die_too(folder):
    run = started(folder / "first", 2, Fault("SIGKILL", rank=0))
    codes, line = ended(run, GONE)
    assert codes == [-9, 3]
    assert line.startswith("gem: error: rank 0: gone, and with it the ranks' store") and "step-000004" in line


def test_a_rank_that_is_stopped_is_found_by_its_silence(folder, reference):
    run = started(folder / "stopped", 2, Fault("SIGSTOP"))
    codes, line = ended(run, TIMEOUT, but=1)
    assert codes == [3, None]  # a stopped process can end nothing, itself neither: torchrun kills it
    assert line.startswith("gem: error: rank 1: no sign of life for 6 s") and "step-000004" in line
    alone(folder / "stopped")
    same(folder / "stopped", reference[0])


def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it(folder):
    run = started(folder / "hung", 2, Fault("hang"))
    codes, line = ended(run, TIMEOUT)
    assert codes == [3, 3]  # its own thread ends the one that hangs
    assert line.startswith("gem: error: rank 1: no progress for ")
    assert "in step 6, reading its batch at gem/train/loop.py:" in line
    assert (
        "; the others wait in step 6 at gem/train/world.py:" in line and "in all_have; the last checkpoint is" in line
    )


def test_a_rank_that_fails_alone_says_what_and_where(folder):
    run = started(folder / "failed", 2, Fault("raise"))
    codes, line = ended(run, GONE)
    assert codes == [3, 3]
    assert line.startswith(
        "gem: error: rank 1: in step 6, reading its batch: LookupError: a shelf is empty (gem/train/"
    )
    assert run.said.count("Traceback") == 1  # a mistake of the program's: where, and of one rank alone
    assert run.said.rstrip().endswith(line)


def test_rank_0_fails_alone(folder):
    """Only rank 0 writes events, and there is a file in their place."""
    place = folder / "first_alone"
    place.mkdir()
    (place / "tensorboard").write_text("")
    run = started(place, 2, plan=None)
    codes = run.wait(60)
    assert codes == [3, 3] and len(run.lines) == 1, run.said
    assert run.lines[0].startswith("gem: error: rank 0: in the report of step 2: FileExistsError")
    assert "gem/harness/training.py:" in run.lines[0] and run.lines[0].endswith("no checkpoint was saved yet")


def test_fewer_batches_end_all_together_and_cost_no_step(folder, reference):
    run = started(folder / "short", 2, Fault("short"))
    codes, line = ended(run, GONE)
    assert codes == [2, 2]
    assert line == (
        "gem: error: step 6 of 10: no batch on rank 1, the others have one; saved as step 5, from which the same "
        "command goes on; accepted: as many batches on every rank"
    )
    # On four ranks one has no row of the table of three categories.
    came_through(folder / "short", 4, plan={"expert": 2, "tables": "v1"})
    same(folder / "short", reference[0])


def test_a_rank_with_an_empty_batch_takes_part_in_the_step(folder, reference):
    """In pieces too, of which a rank with too few samples has empty ones."""
    said = came_through(folder / "empty", 2, Fault("empty", step=3), plan=PLAN, pieces=3)
    assert said.count("rank 1 gets none of its 8 samples of step 3") == 1
    same(folder / "empty", reference[0])


def test_told_to_end_all_end_and_one_says_so(folder):
    run = started(folder / "told", 2, Fault("SIGTERM"), steps=100_000)
    codes, line = ended(run, GONE)
    assert codes == [143, 143] and line.startswith("gem: error: rank 1: told to end by SIGTERM in ")
    assert f"the last checkpoint is {folder}/told/checkpoints/step-" in line


def test_other_data_on_a_rank_are_refused_before_the_first_step(folder):
    place = folder / "other"
    data = CONFIG["data"]
    fewer = data | {"train": data["train"] | {"samples": 192}}
    configs = tuple(CONFIG | {"plan": PLAN, "data": one} for one in (data, fewer))
    run = ranks_program.start(2, Path(f"{place}.err"), ranks_program.main, configs, str(place))
    assert run.wait(60) == [2, 2] and len(run.lines) == 1, run.said
    assert run.lines[0] == (
        "gem: error: rank 1: training samples 192, and 256 on rank 0; accepted: the same data on every rank"
    )


def test_a_rank_that_does_not_come_is_named(folder):
    """Two of three are started."""
    run = ranks_program.start(
        3, folder / "absent.err", _all_but_the_last, CONFIG | {"timeout_s": 5.0}, str(folder / "absent")
    )
    codes = run.wait(5 + SLACK + 10)
    assert codes[2] == 0 and 0 not in codes[:2] and None not in codes, run.said
    assert len(run.lines) == 1 and "2" in run.lines[0], run.said


def _all_but_the_last(config: dict[str, Any], out: str) -> None:
    if os.environ["RANK"] != "2":
        ranks_program.main(config, out)


# -- on with other ranks -----------------------------------------------------------------------------------------------


def test_two_ranks_four_eight_and_one_end_where_two_do(folder, reference):
    """By three plans and by none: each step has the same samples, and losses are told as they were."""
    place, told = folder / "chain", {}
    legs: list[tuple[int, int, dict[str, Any]]] = [
        (2, 3, PLAN), (4, 6, {"replicate": 2, "tables": "v2", "table_replicas": 4, "cuts": {"item": "column"}}),
        (8, 8, {"expert": 2, "tables": "v3", "table_replicas": 4}),
    ]  # fmt: skip
    for ranks, steps, plan in legs:
        said = came_through(place, ranks, steps=steps, plan=plan, log_every=1)
        told |= losses(said)
        assert ranks == 2 or f"dealt to 2 ranks, as the run began; now there are {ranks}" in said
        same(place, reference[0], steps)
    alone(place)
    same(place, reference[0])
    assert told == pytest.approx({step: reference[1][step] for step in range(1, 9)}, abs=2e-4)


def test_a_run_of_one_process_goes_on_by_a_plan(folder):
    """Where a batch has fewer samples than there are ranks, some have none of it."""
    small: dict[str, Any] = {"reader": {"batch": 3, "base": 1, "pool": 6}}
    whole, place = folder / "one", folder / "one_and_more"
    alone(whole, **small)
    alone(place, **small, steps=5)
    said = came_through(place, 4, None, **small)
    assert said.count("dealt to 1 ranks, as the run began; now there are 4") == 1
    same(place, whole)


# -- under torchrun ----------------------------------------------------------------------------------------------------


def torchrun(place: Path, ranks: int, *words: str, within_s: float = 120) -> tuple[int, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=within_s)
    return done.returncode, done.stderr


def test_torchrun_shows_the_line_and_starts_again_by_itself(folder, reference):
    """Killed at step 6 of its first attempt; the second goes on from step 4 to the end."""
    place = folder / "again"
    code, said = torchrun(
        folder, 2, "--max-restarts", "1", str(Path(__file__).with_name("restarted_program.py")), str(place)
    )
    assert code == 0, said[-3000:]
    lines = [line for line in said.splitlines() if line.startswith("gem: error: ")]
    assert len(lines) == 1 and lines[0].startswith("gem: error: rank 1: no sign of life for "), said[-3000:]
    assert "going on from" in said
    same(place, reference[0])


def test_torchrun_shows_a_refused_plan_once(folder):
    (folder / "run.toml").write_text('[data]\nkind = "synthetic"\n[plan]\nexpert = 3\n')
    code, said = torchrun(folder, 2, "-m", "gem", "train", "run.toml", "--device", "cpu")
    lines = [line for line in said.splitlines() if line.startswith("gem: error: ")]
    what = "plan.expert = 3 does not divide plan.shard = 2 (2 ranks: 1 zone, 1 host, 2 ranks a host); accepted, as "
    assert code == 1 and len(lines) == 1 and lines[0].startswith(f"gem: error: {what}"), said
    assert said.count("exitcode  : 2") == 2  # of both ranks, in torchrun's summary
    assert f"traceback : {lines[0]}" in said.partition("Root Cause")[2]


@pytest.mark.parametrize("words", [["--plan", "{odd}"], ["--set", "lr=-1"], ["--json", "/proc/no"]], ids=str)
def test_what_every_rank_refuses_before_it_joins_is_said_once(folder, words):
    odd = folder / "odd.toml"
    odd.write_text("exprt = 2")
    more = [word.format(odd=odd) for word in words]
    run = ranks_program.start(2, folder / "odd.err", ranks_program.main, CONFIG, str(folder / "refused"), None, more)
    assert run.wait(60) == [2, 2] and len(run.lines) == 1, run.said
    assert not run.lines[0].startswith("gem: error: rank ")
