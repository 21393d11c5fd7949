"""Peers that only a GPU runs, tried without one: what they prepare, call with which arguments, and refuse.

Packages are stood in for by modules with the same function, written here from their kernels' arithmetic in terms of the
oracle; cuDNN by another backend of SDPA. The harness checks the real ones on a GPU.
"""

import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peer_cases import CASES, CROSS, PMA, SELF, SMALL, lengths, verdict_of
from torch.nn.attention import SDPBackend

from gem import reference
from gem.harness import names, peers
from gem.harness.needs import Facts, check_needs
from gem.harness.params import BlockAttentionParams, GdpaParams, JaggedAttentionParams
from gem.harness.peer_cudnn import HIDDEN, CudnnPadded
from gem.harness.peer_gdpa import MKL_ACTIVATIONS, Hstu, MklGdpa
from gem.harness.peer_varlen import Varlen
from gem.harness.subjects import build_inputs
from gem.harness.worker import Unsupported

# ---- cuDNN on the padded batch


@pytest.fixture
def cudnn_is_math(monkeypatch):
    """Everything but cuDNN itself: its peer on the CPU, through SDPA's plain backend."""
    monkeypatch.setattr(CudnnPadded, "devices", ("cuda", "cpu"))
    monkeypatch.setattr(CudnnPadded, "backend", SDPBackend.MATH)


def half(case: str, dtype: str = "bfloat16"):
    subject, params, which = CASES[case]
    return build_inputs(subject, params.model_copy(update={"dtype": dtype}), which, "cpu")


CUDNN_REFUSES = {
    "dense_bias": "cuDNN attention takes no dense bias",
    "position_bias": "takes no position bias",
    "empty": "no queries or no keys",
}


@pytest.mark.usefixtures("cudnn_is_math")
@pytest.mark.parametrize("case", CASES)
def test_cudnn_is_given_a_batch_that_computes_the_case(case):
    inputs = half(case)
    if case in CUDNN_REFUSES:
        with pytest.raises(Unsupported, match=CUDNN_REFUSES[case]):
            CudnnPadded(inputs, "cudnn_padded")
        return
    contestant = CudnnPadded(inputs, "cudnn_padded")
    verdict = verdict_of(contestant, inputs)
    assert verdict.right, verdict.problems


@pytest.mark.usefixtures("cudnn_is_math")
def test_cudnn_rotates_blocks_of_any_size():
    """Rotated keys lie as their queries do: there is no room between them for an aligned mask."""
    params = BlockAttentionParams(**SMALL, block=10, dtype="bfloat16")
    inputs = build_inputs("block_attention", params, SELF, "cpu")
    verdict = verdict_of(CudnnPadded(inputs, "cudnn_padded"), inputs)
    assert verdict.right, verdict.problems


@pytest.mark.usefixtures("cudnn_is_math")
@pytest.mark.parametrize("case", ["self", "cross", "cross_causal", "causal", "blind", "block"])
def test_cudnn_masks_are_finite_aligned_additive_and_in_the_inputs_dtype(case, monkeypatch):
    seen: list[Any] = []
    real = F.scaled_dot_product_attention

    def spy(q, k, v, **how):
        seen.append((k, how["attn_mask"], how["is_causal"]))
        return real(q, k, v, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    CudnnPadded(half(case, "float16"), "cudnn_padded")
    k, mask, is_causal = seen[0]
    assert is_causal is (case == "causal")
    if is_causal:
        assert mask is None and k.shape[2] == 70  # no mask: nothing to align, and queries stay as many as keys
        return
    assert mask.dtype == torch.float16 and not mask.requires_grad
    assert set(mask.unique().tolist()) == {0.0, HIDDEN}
    assert mask.shape[-1] == k.shape[2] and k.shape[2] % 8 == 0


def test_cudnn_takes_half_precision_alone(monkeypatch):
    monkeypatch.setattr(CudnnPadded, "devices", ("cpu",))
    with pytest.raises(Unsupported, match="takes float16 and bfloat16, not float32"):
        CudnnPadded(half("self", "float32"), "cudnn_padded")


def refusing(monkeypatch, refuses, error):
    """SDPA that raises ``error`` where ``refuses(mask)``."""
    real = F.scaled_dot_product_attention

    def sdpa(q, k, v, **how):
        if refuses(how["attn_mask"]):
            error()
        return real(q, k, v, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)


def no_plans():
    raise RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.")


@pytest.mark.usefixtures("cudnn_is_math")
def test_cudnn_gets_a_mask_row_for_every_query_where_it_takes_no_broadcast(monkeypatch):
    refusing(monkeypatch, lambda mask: mask.shape[2] == 1, no_plans)
    inputs = half("cross")
    verdict = verdict_of(CudnnPadded(inputs, "cudnn_padded"), inputs)
    assert verdict.right, verdict.problems


@pytest.mark.usefixtures("cudnn_is_math")
def test_what_cudnn_says_against_every_mask_is_the_rows_reason(monkeypatch):
    refusing(monkeypatch, lambda mask: True, no_plans)
    with pytest.raises(Unsupported, match=r"cuDNN attention refuses this case: .*No execution plans"):
        CudnnPadded(half("cross"), "cudnn_padded")


@pytest.mark.usefixtures("cudnn_is_math")
def test_why_torch_has_no_kernel_is_told_of_cudnn_alone(monkeypatch):
    def no_kernel():
        for text in (
            "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:900.)",
            "Memory efficient attention has been runtime disabled. (Triggered internally at sdp_utils.h:500.)",
            "cuDNN attention kernel not used because: (Triggered internally at sdp_utils.cpp:910.)",
            "head_dim should be no more than 128 (Triggered internally at sdp_utils.cpp:400.)",
            "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:905.)",
            "Flash attention has been runtime disabled. (Triggered internally at sdp_utils.h:501.)",
        ):
            warnings.warn(text, UserWarning, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    refusing(monkeypatch, lambda mask: True, no_kernel)
    with pytest.raises(Unsupported) as caught:
        CudnnPadded(half("self"), "cudnn_padded")
    assert str(caught.value) == "cuDNN attention refuses this case: head_dim should be no more than 128"


@pytest.mark.usefixtures("cudnn_is_math")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("CUDA error: illegal access")])
def test_what_is_no_refusal_of_cudnns_is_raised_as_it_is(monkeypatch, error):
    def fail():
        raise error

    refusing(monkeypatch, lambda mask: True, fail)
    with pytest.raises(type(error), match=str(error)):
        CudnnPadded(half("self"), "cudnn_padded")


# ---- kernels that compute GDPA

# What the names of ads_model_kernel_library's activations compute, in gem's names.
THEIRS = {
    "raw": "identity",
    "gelu": "gelu",
    "gelu_approx": "gelu_tanh",
    "fast_gelu": "gelu_tanh",
    "relu": "relu",
    "relu_square": "relu_squared",
    "silu": "silu",
    "fast_silu": "silu",
}


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(Varlen, "devices", ("cuda", "cpu"))


def pretend(monkeypatch, module: str, **content: Any) -> None:
    """An importable ``module`` and the packages above it."""
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        made = types.ModuleType(".".join(parts[:n]))
        made.__path__ = []
        monkeypatch.setitem(sys.modules, made.__name__, made)
    vars(sys.modules[module]).update(content)


@pytest.fixture
def mkl(monkeypatch, on_cpu) -> list[dict[str, Any]]:
    """qk_scale * act(q k^T) v as their kernel has it, in float32; returns the arguments of the calls."""
    calls: list[dict[str, Any]] = []

    def attend(**given):
        calls.append(given)
        q, k, v = (given[name] for name in ("query", "key", "value"))
        shared = given["broadcast_q"]
        # What the kernel relies on without a word: int32, contiguous rows, the true maxima, an output for each row.
        for name in ("query_offset", "key_offset", "output_offset"):
            assert given[name].dtype == torch.int32
        assert all(x.is_contiguous() for x in (q, k, v))
        q_lens, k_lens = (given[name].diff() for name in ("query_offset", "key_offset"))
        assert given["max_seq_len_q"] == int(q_lens.max()) and given["max_seq_len_kv"] == int(k_lens.max())
        assert int(given["output_offset"][-1]) == (len(k_lens) if shared else 1) * len(q)
        return reference.gdpa(
            q, k, v, None if shared else given["query_offset"], given["key_offset"],
            activation=THEIRS[given["activation"]], out_scale=given["qk_scale"], broadcast_q=shared,
            compute_dtype=torch.float32,
        ).to(q.dtype)  # fmt: skip

    pretend(monkeypatch, MklGdpa.module, generalized_dot_product_attention=attend)
    return calls


SCALES: dict[str, Any] = {"qk_scale": 0.3, "out_scale": 0.7}


@pytest.mark.parametrize("activation", MKL_ACTIVATIONS)
@pytest.mark.parametrize("which", [SELF, CROSS, PMA], ids=["self", "cross", "pma"])
def test_mkl_gdpa_computes_the_same(mkl, which, activation):
    params = GdpaParams(**SMALL, **SCALES, activation=activation, dtype="bfloat16", layout="strided")
    inputs = build_inputs("gdpa", params, which, "cpu")
    contestant = peers.load("mkl_gdpa")(inputs, "mkl_gdpa")
    assert contestant.computes == "same" and not mkl  # building it calls nothing
    verdict = verdict_of(contestant, inputs)
    assert verdict.right, verdict.problems
    assert set(mkl[0]) == {
        "query", "key", "value", "query_offset", "key_offset", "output_offset", "max_seq_len_q", "max_seq_len_kv",
        "qk_scale", "broadcast_q", "activation",
    }  # fmt: skip
    # The scale of the scores is in q before the timed call, or passes the activation; shared queries stay as few.
    assert mkl[0]["query"] is contestant.leaves["q"]
    passed = {"relu": 0.3, "relu_squared": 0.09, "identity": 0.3}
    assert mkl[0]["qk_scale"] == pytest.approx(0.7 * passed.get(activation, 1.0))
    assert len(mkl[0]["query"]) == (4 if which is PMA else which.tokens_q)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_mkl_gdpa_is_right_for_a_negative_scale(mkl, activation):
    params = GdpaParams(**SMALL, qk_scale=-0.25, activation=activation, dtype="bfloat16")
    inputs = build_inputs("gdpa", params, SELF, "cpu")
    verdict = verdict_of(MklGdpa(inputs, "mkl_gdpa"), inputs)
    assert verdict.right, verdict.problems


@pytest.mark.parametrize(
    ("subject", "params", "reason"),
    [
        ("gdpa", GdpaParams(**SMALL, activation="gelu_taylor", dtype="bfloat16"), "has no gelu_taylor; it has gelu, "),
        ("gdpa", GdpaParams(**SMALL, causal=True, dtype="bfloat16"), "neither causal masks nor windows"),
        ("gdpa", GdpaParams(**SMALL, window=(8, 8), dtype="bfloat16"), "neither causal masks nor windows"),
        ("gdpa", GdpaParams(**SMALL), "takes float16 and bfloat16, not float32"),
        ("jagged_attention", JaggedAttentionParams(**SMALL, dtype="bfloat16"), "computes gdpa, not jagged_attention"),
    ],
)
def test_mkl_gdpa_refuses_what_it_does_not_compute(mkl, subject, params, reason):
    with pytest.raises(Unsupported, match=reason):
        MklGdpa(build_inputs(subject, params, SELF, "cpu"), "mkl_gdpa")


SILU = GdpaParams(**SMALL, **SCALES, activation="silu", causal=True)


@pytest.fixture
def hstu(monkeypatch, on_cpu) -> list[dict[str, Any]]:
    """silu(alpha q k^T) v / N, causal, as their kernel has it, in float32; returns the arguments of the calls."""
    calls: list[dict[str, Any]] = []

    def attend(**given):
        calls.append(given)
        q, k, v, offsets = (given[name] for name in ("q", "k", "v", "seq_offsets"))
        assert given["N"] >= int(offsets.diff().max())  # rows behind N would be left out
        return reference.gdpa(
            q, k, v, offsets, activation="silu", qk_scale=given["alpha"], out_scale=1 / given["N"], causal=True,
            compute_dtype=torch.float32,
        ).to(q.dtype)  # fmt: skip

    pretend(monkeypatch, Hstu.module, triton_hstu_mha=attend)
    return calls


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_hstu_computes_the_same(hstu, dtype):
    inputs = build_inputs("gdpa", SILU.model_copy(update={"dtype": dtype}), SELF, "cpu")
    contestant = peers.load("hstu")(inputs, "hstu")
    assert contestant.computes == "same" and not hstu
    verdict = verdict_of(contestant, inputs)
    assert verdict.right, verdict.problems
    assert set(hstu[0]) == {"N", "alpha", "q", "k", "v", "seq_offsets", "sort_by_length"}
    assert (hstu[0]["N"], hstu[0]["alpha"], hstu[0]["v"]) == (70, 0.3, contestant.leaves["v"])


@pytest.mark.parametrize(
    ("change", "which", "reason"),
    [
        ({"activation": "gelu"}, SELF, "has no gelu; it has silu"),
        ({"causal": False}, SELF, "is causal"),
        ({"window": (8, 0)}, SELF, "without a window"),
        ({"dtype": "float16"}, SELF, "takes bfloat16 and float32, not float16"),
        ({"head_dim": 24}, SELF, "power of two from 16, not 24"),
        ({}, CROSS, "is self attention"),
        ({}, PMA, "is self attention"),
        ({}, lengths([0, 0]), "takes no empty batch"),
    ],
)
def test_hstu_refuses_what_it_does_not_compute(hstu, change, which, reason):
    with pytest.raises(Unsupported, match=reason):
        Hstu(build_inputs("gdpa", SILU.model_copy(update=change), which, "cpu"), "hstu")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("name", "causal", "package"), [("mkl_gdpa", False, "ads_mkl"), ("hstu", True, "generative")])
def test_a_peer_without_its_package_says_what_belongs_on_the_path(name, causal, package, monkeypatch):
    monkeypatch.setitem(sys.modules, {"mkl_gdpa": "ads_mkl", "hstu": "generative_recommenders"}[name], None)
    params = SILU.model_copy(update={"causal": causal, "dtype": "bfloat16"})
    with pytest.raises(Unsupported, match=rf"is not installed \(.*{package}.*\); .* PYTHONPATH"):
        peers.load(name)(build_inputs("gdpa", params, SELF, "cpu"), name)


@pytest.mark.parametrize("name", ["mkl_gdpa", "hstu"])
def test_kernels_of_gdpa_say_on_a_cpu_that_they_need_a_gpu(name):
    params = SILU.model_copy(update={"causal": name == "hstu", "dtype": "bfloat16"})
    with pytest.raises(Unsupported, match="runs on CUDA only"):
        peers.load(name)(build_inputs("gdpa", params, SELF, "cpu"), name)


@pytest.mark.parametrize("name", ["mkl_gdpa", "hstu"])
def test_what_is_asked_of_the_machine_is_the_module_that_the_peer_imports(name, tmp_path, monkeypatch):
    """A declaration is refused before any worker starts, by a look at the folders; both must mean the same package."""
    facts = Facts(device="cuda", capabilities=(90,))
    needs = names.PEERS[name].needs
    packages = ("ads_mkl", "generative_recommenders")  # they may be here
    without = [path for path in sys.path if not any(Path(path, package).exists() for package in packages)]
    monkeypatch.setattr(sys, "path", without)
    assert "is not installed" in str(check_needs(needs, facts))
    module = {"mkl_gdpa": MklGdpa, "hstu": Hstu}[name].module
    file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert check_needs(needs, facts) is None


def test_offsets_are_those_of_the_filled_rows(mkl):
    inputs = build_inputs("gdpa", GdpaParams(**SMALL, activation="silu", dtype="bfloat16"), CROSS, "cpu")
    MklGdpa(inputs, "mkl_gdpa").forward()
    np.testing.assert_array_equal(mkl[0]["query_offset"].numpy(), CROSS.offsets_q())
    np.testing.assert_array_equal(mkl[0]["key_offset"].numpy(), CROSS.offsets_k())
    assert (len(mkl[0]["query"]), len(mkl[0]["key"])) == (CROSS.tokens_q, CROSS.tokens_k)
