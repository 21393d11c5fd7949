"""The kernels' earlier generations as peers: what they refuse, that they are right, that a GPU could hold them.

Triton decides between compiler and interpreter when it is imported, so what runs or compiles has a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from peer_cases import CASES, SMALL, lengths

from gem.data.lengths import Lengths
from gem.harness import peers
from gem.harness.params import JaggedAttentionParams, SubjectParams
from gem.harness.subjects import build_inputs
from gem.harness.worker import Unsupported

V1 = "jfa_v1"
HERE = Path(__file__).parent

# Every case that v1 computes against the oracle: in bfloat16, whose tiles are the large ones, or as declared.
RIGHT = """
import json, os, sys
assert os.environ["TRITON_INTERPRET"] == "1"
from peer_cases import CASES, lengths, verdict_of
from gem.data.lengths import Lengths
from gem.harness import peers
from gem.harness.subjects import build_inputs

LONG = lengths([150, 0, 3, 70], [64, 5, 130, 0], tail_q=2, tail_k=5)
found = {}
for label, case, change, which in json.loads(sys.argv[1]):
    subject, params, own = CASES[case]
    params = params.model_copy(update={key: tuple(x) if isinstance(x, list) else x for key, x in change.items()})
    inputs = build_inputs(subject, params, LONG if which == "long" else own, "cpu")
    contestant = peers.load("jfa_v1")(inputs, "jfa_v1")
    assert contestant.computes == "same" and not contestant.repeatable and not contestant.no_backward
    found[label] = verdict_of(contestant, inputs).problems
print(json.dumps(found))
"""
BF16 = {"dtype": "bfloat16"}
COMPUTED = ("self", "strided", "causal", "cross", "cross_window", "blind", "pma", "empty")
TRIED = [
    *((case, case, BF16, "own") for case in COMPUTED),
    ("float32", "cross_causal", {"layout": "fused_qkv"}, "own"),
    ("several tiles", "cross", BF16 | {"window": [90, 20], "head_dim": 80, "layout": "fused_qkv"}, "long"),
    ("several tiles, causal", "cross_causal", {"dtype": "float16", "offsets_dtype": "int32"}, "long"),
]

# Shared memory that its kernels ask for, against what the GPU has, where the tiles are largest.
FITS = """
import json, sys
import torch
from compiled import SHARED_LIMIT, compiling_for
from gem.kernels.jagged_attention_v1 import attention_v1_backward, attention_v1_forward

arch, found = int(sys.argv[1]), []
offsets = torch.tensor([0, 40, 100])
for head_dim in (128, 256):
    q, k, v, d_out = (torch.zeros(100, 2, head_dim, dtype=torch.bfloat16) for _ in range(4))
    with compiling_for(arch) as kernels:
        out, lse = attention_v1_forward(q, k, v, offsets, offsets, 60, 256, 0, 0.1)
        attention_v1_backward(d_out, q, k, v, out, lse, offsets, offsets, 60, 256, 0, 0.1)
    found += [(f"{kernel.name} d{head_dim}", kernel.shared, SHARED_LIMIT[arch]) for kernel in kernels]
print(json.dumps(found))
"""


def run(code: str, argument: str, interpreted: bool):
    """What ``code`` prints as JSON, run with Triton's interpreter or its compiler."""
    pytest.importorskip("triton")
    path = os.pathsep.join([str(HERE), *(p or os.getcwd() for p in sys.path)])
    env = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1" if interpreted else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, argument]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def problems() -> dict[str, list[str]]:
    return run(RIGHT, json.dumps(TRIED), interpreted=True)


@pytest.mark.parametrize("label", [label for label, *_ in TRIED])
def test_v1_computes_the_same(problems, label):
    assert problems[label] == []


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_v1_fits_into_shared_memory(arch):
    kernels = run(FITS, str(arch), interpreted=False)
    assert len(kernels) == 6
    assert [(name, shared) for name, shared, limit in kernels if shared > limit] == []


def refused(params: SubjectParams, which: Lengths | None = None, subject="jagged_attention") -> str:
    inputs = build_inputs(subject, params, which or lengths([5, 3]), "cpu")
    with pytest.raises(Unsupported) as caught:
        peers.load(V1)(inputs, V1)
    return str(caught.value)


@pytest.mark.parametrize("case", ["gdpa", "gdpa_pma", "block", "dense_bias", "position_bias"])
def test_v1_says_which_cases_it_does_not_compute(case):
    subject, params, which = CASES[case]
    reason = refused(params, which, subject)
    if subject == "jagged_attention":
        assert reason == f"jfa_v1 takes no {params.bias} bias"
    else:
        assert reason == f"jfa_v1 computes jagged_attention, not {subject}"


@pytest.mark.parametrize(
    ("change", "which", "reason"),
    [
        ({"dtype": "float64"}, None, "jfa_v1 takes float32, float16, bfloat16, not float64"),
        ({"head_dim": 257}, None, "jfa_v1 takes a head_dim up to 256, not 257"),
        ({"head_dim": 1}, lengths(np.ones(32768)), "jfa_v1 takes up to 65535 heads times samples, not 65536"),
    ],
)
def test_v1_says_what_its_kernels_do_not_take(change, which, reason):
    pytest.importorskip("triton")
    assert refused(JaggedAttentionParams(**SMALL | change), which) == reason


def test_v1_says_on_a_cpu_that_it_needs_a_gpu(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("gem.kernels.device.INTERPRETED", False)
    assert refused(JaggedAttentionParams(**SMALL)).startswith("jfa_v1 runs on CUDA only; ")


def test_v1_says_that_triton_is_missing(monkeypatch):
    monkeypatch.delattr("gem.kernels.jagged_attention_v1", raising=False)
    monkeypatch.setitem(sys.modules, "gem.kernels.jagged_attention_v1", None)
    assert refused(JaggedAttentionParams(**SMALL)).startswith("jfa_v1 needs triton (")
