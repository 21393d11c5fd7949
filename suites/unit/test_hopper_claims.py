"""Jobs that are claimed: a launch's counter is its own and zero, and each job is claimed once whoever is fast."""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)

from gem.kernels.hopper import claims, ops
from gem.kernels.hopper.choose import Variant

# -- counters ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch) -> dict[str, int]:
    """As if a GPU were there; its current stream, whether that is captured, and how often something was filled."""
    state = {"stream": 7, "captured": False, "fills": 0}
    zeros = torch.zeros

    def fill(*shape, dtype, device) -> torch.Tensor:
        state["fills"] += 1
        assert torch.device(device).type == "cuda"
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state["captured"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: state["stream"], raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "zeros", fill)
    monkeypatch.setattr(claims, "_unused", {})
    return state


def take(count: int, device: str = "cuda") -> list[torch.Tensor]:
    """Counters of so many launches, each of which counts."""
    found = []
    for _ in range(count):
        counter = claims.counter(torch.device(device))
        assert counter.dtype == torch.int32 and counter.data_ptr() % 16 == 0 and (counter == 0).all()
        counter += 1
        found.append(counter)
    return found


def test_each_launch_has_zeros_of_its_own_and_few_are_filled_alone(gpu):
    found = take(600)
    assert len({x.data_ptr() for x in found}) == 600
    assert gpu["fills"] == 3


def test_streams_and_devices_share_no_fill(gpu):
    """What one stream fills another may read too early."""
    take(10)
    gpu["stream"] = 8
    take(10)
    take(10, "cuda:1")
    assert gpu["fills"] == 3
    gpu["stream"] = 7
    take(10)
    take(10, "cuda:0")
    assert gpu["fills"] == 3


def test_a_captured_launch_fills_its_own(gpu):
    """It runs at every replay."""
    take(1)
    gpu["captured"] = True
    take(5)
    assert gpu["fills"] == 6
    gpu["captured"] = False
    take(1)
    assert gpu["fills"] == 6


# -- each job once -----------------------------------------------------------------------------------------------------

VARIANTS = {
    "long": Variant("long", 128, 16, 2, turns=1),
    "lanes": Variant("long", 64, 16, 2, lanes=2),
    "short": Variant("short", 128, 16, 4),
}


@pytest.mark.parametrize(("seed", "programs"), [(0, 3), (3, 16)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_number_is_drawn_once(variant, seed, programs, monkeypatch):
    """As many draws as there are jobs, and one of each lane that finds none: had a job been run twice or been dealt as
    well, there would be others."""
    pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet")
    from gluon_emulated import emulating
    from gluon_laws import LENGTHS, inputs

    counter = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(claims, "counter", lambda device: counter)
    lengths, chosen = LENGTHS["ragged"], VARIANTS[variant]
    x, batch = inputs(lengths, 2, 16, torch.bfloat16), lengths.batch()
    with emulating(seed, programs):
        ops.gdpa_forward(x.q, x.k, x.v, batch, activation="silu", qk_scale=0.3, variant=chosen)
    entries = batch.tiles("q", chosen.rows)
    programs = min(programs, 2 * len(entries))
    assert counter.tolist() == [2 * int((entries[:, 0] >= 0).sum()) + chosen.lanes * programs, 0, 0, 0]
