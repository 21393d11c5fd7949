"""Where a run takes place: read without torch, from a machine with GPUs (a stand-in nvidia-smi here) or without."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gem import paths
from gem.errors import RequestError
from gem.harness import environment

GPUS = """\
0, GPU-aaaa, NVIDIA H200, 9.0, 580.159, 143771, 345, 1980, 3201, 700.00
1, GPU-bbbb, NVIDIA B200, 10.0, 580.159, 183359, 120, 1965, 3996, [N/A]
"""


@pytest.fixture(autouse=True)
def _fresh_answers() -> Iterator[None]:
    """nvidia-smi is asked once a process: a stand-in's answer must not outlive its test."""
    environment._nvidia_smi.cache_clear()
    yield
    environment._nvidia_smi.cache_clear()


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi answers with GPUS, and torch is built for CUDA."""
    (tmp_path / "answer").write_text(GPUS)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "torch_cuda", lambda: "13.0")


def test_capture_holds_what_the_design_asks_for() -> None:
    found = environment.capture("cpu")
    for key in ("gpu", "driver", "sm_clock_mhz", "power_limit_w", "torch", "triton", "cuda", "host", "cpu", "threads"):
        assert key in found
    assert found["device"] == "cpu"
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert abs((datetime.now(UTC) - datetime.fromisoformat(found["time"])).total_seconds()) < 60
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory_gib"] > 0.1


def test_torch_is_described_as_it_describes_itself() -> None:
    import torch

    assert environment.version("torch") == torch.__version__
    assert environment.torch_cuda() == torch.version.cuda
    assert environment.torch_threads() == torch.get_num_threads()


def test_capture_imports_no_torch() -> None:
    code = "import sys; from gem.harness import environment as e; e.capture(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_threads_are_those_of_a_fresh_torch() -> None:
    """What torch_threads foretells without torch is what a torch that is then loaded says."""
    code = (
        "from gem.harness import environment as e; before = e.torch_threads(); import torch;"
        "assert before == torch.get_num_threads() == 1, (before, torch.get_num_threads())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("asked", [None, "default", "avx2", "nonsense"])
def test_the_cpu_capability_is_that_of_a_fresh_torch(asked: str | None) -> None:
    """What is foretold without torch is what a torch that is then loaded says."""
    if environment.cpu_capability() is None:
        pytest.skip("only x86 is foretold")
    code = (
        "from gem.harness import environment as e; before = e.capture('cpu')['cpu_capability']; import torch;"
        "after = torch.backends.cpu.get_cpu_capability();"
        "assert before == after == e.capture('cpu')['cpu_capability'], (before, after); print(after)"
    )
    env = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"}
    env |= {"ATEN_CPU_CAPABILITY": asked} if asked else {}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True)
    assert asked not in ("default", "avx2") or done.stdout == f"{asked.upper()}\n"


def test_git_state_names_the_commit_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    monkeypatch.setattr(paths, "checkout_root", lambda: tmp_path)
    assert environment.git_state() == {"git_commit": None, "git_dirty": None}  # sources without a repository
    monkeypatch.setenv("GEM_COMMIT", "3f2a1c9")
    assert environment.git_state() == {"git_commit": "3f2a1c9", "git_dirty": None}
    monkeypatch.delenv("GEM_COMMIT")
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "untracked").write_text("")  # results and caches lie about: no change of the code
    assert environment.git_state() == {"git_commit": commit, "git_dirty": False}
    (tmp_path / "file").write_text("2")
    assert environment.git_state() == {"git_commit": commit, "git_dirty": True}
    monkeypatch.setattr(paths, "checkout_root", lambda: None)  # installed from a wheel
    assert environment.git_state() == {"git_commit": None, "git_dirty": None}


def test_a_gpu_machine_is_described(gpu_machine: None) -> None:
    found = environment.capture()
    assert (found["device"], found["gpu"], found["gpu_count"]) == ("cuda", "NVIDIA H200", 2)
    assert (found["driver"], found["capability"], found["cuda"]) == ("580.159", "9.0", "13.0")
    assert (found["sm_clock_mhz"], found["max_sm_clock_mhz"], found["memory_clock_mhz"]) == (345.0, 1980.0, 3201.0)
    assert (found["power_limit_w"], found["gpu_memory_mib"]) == (700.0, 143771.0)
    assert environment.facts().capabilities == (90, 100)
    assert environment.facts("cpu").device == "cpu"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["NVIDIA B200"]),
        ("1,0", ["NVIDIA B200", "NVIDIA H200"]),
        ("GPU-bbbb", ["NVIDIA B200"]),
        ("MIG-1234", ["NVIDIA H200"]),
        ("0,7,1", ["NVIDIA H200"]),  # CUDA stops at the first that is none
        ("", []),
        ("-1", []),
    ],
)
def test_hidden_gpus_do_not_count(
    visible: str, names: list[str], gpu_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu["name"] for gpu in environment.visible_gpus()] == names
    facts = environment.facts()
    assert facts.device == ("cuda" if names else "cpu")
    assert bool(names) or "CUDA_VISIBLE_DEVICES" in facts.no_cuda


def test_no_gpu_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "torch_cuda", lambda: None)
    assert re.fullmatch(r"torch \S+ is built without CUDA", environment.facts().no_cuda)
    monkeypatch.setattr(environment, "torch_cuda", lambda: "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.facts().no_cuda == "no NVIDIA GPU here (no nvidia-smi)"
    with pytest.raises(RequestError, match="device 'cuda': no NVIDIA GPU here"):
        environment.facts("cuda")
    with pytest.raises(RequestError, match="unknown device 'tpu'; accepted: auto, cpu, cuda"):
        environment.facts("tpu")


def test_a_driver_that_fails_is_no_gpu(gpu_machine: None, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho Failed to initialize NVML\nexit 9\n")
    assert environment.visible_gpus() == []
    assert environment.facts().no_cuda == "nvidia-smi lists no GPU"


def test_the_compiler_is_the_one_that_inductor_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert environment.cxx_compiler()[0] is None
    program = tmp_path / "mycxx"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", "mycxx")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert environment.cxx_compiler() == (None, f"no Python headers ({tmp_path / 'Python.h'})")
    (tmp_path / "Python.h").write_text("")
    assert environment.cxx_compiler() == (str(program), "")


def test_settings_are_those_that_change_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GEM_CHECK", "1")
    monkeypatch.setenv("MY_TOKEN", "secret")
    for name in ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "avx2")
        assert environment.settings()[name] == "avx2"
    found = environment.settings()
    assert found["OMP_NUM_THREADS"] == "3" and found["GEM_CHECK"] == "1" and "MY_TOKEN" not in found


def test_busy_ticks_of_the_cores_asked_for():
    """user nice system idle iowait irq softirq steal guest guest_nice; guests are in user already."""
    stat = "cpu  999 9 9 9 9 9 9 9 9 9\ncpu0 10 1 5 100 7 2 3 4 6 1\ncpu1 50 0 0 1 0 0 0 0 0 0\nintr 5\n"
    assert environment._busy_ticks(stat, {0}) == 10 + 1 + 5 + 2 + 3 + 4
    assert environment._busy_ticks(stat, {0, 1}) == 25 + 50
    assert environment._busy_ticks(stat, {7}) == 0


@pytest.mark.skipif(
    environment.busy_cores(0.01) is None, reason="cores are shared by a quota, or there is no /proc/stat"
)
def test_other_work_is_seen():
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        found = environment.busy_cores(1.0)
    finally:
        other.kill()
        other.wait()
    assert found is not None and 0.3 < found <= environment.usable_cores() + 0.1
