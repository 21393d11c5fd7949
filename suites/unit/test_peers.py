"""The public kernels: each is called so that it computes what it is said to compute, padded or packed, masked or not.

Each is held against the float64 oracle in this process; that a peer may crash is test_runner's subject.
"""

import numpy as np
import pytest
import torch
from peer_cases import CASES, CROSS, SELF, SMALL, verdict_of
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gem import reference
from gem.errors import RequestError
from gem.harness import names, peers
from gem.harness.environment import cxx_compiler
from gem.harness.params import JaggedAttentionParams
from gem.harness.peer_flex import Flex, document_mask
from gem.harness.peer_padded import visible_keys
from gem.harness.peers import Segments
from gem.harness.subjects import build_inputs
from gem.harness.worker import Unsupported

# What a peer does not take, said before it runs.
REFUSALS = {
    ("sdpa_padded", "position_bias"): "takes no position bias",
    ("sdpa_padded", "empty"): "no queries or no keys",
    ("nested", "causal"): "no causal mask on the CPU",
    ("nested", "cross_causal"): "no causal mask on the CPU",
    ("nested", "blind"): "no causal mask on the CPU",
    ("nested", "cross_window"): "no window",
    ("nested", "dense_bias"): "takes no dense bias",
    ("nested", "position_bias"): "takes no position bias",
    ("nested", "gdpa_window"): "no window",
    ("nested", "empty"): "empty batch",
    ("flex", "dense_bias"): "takes no dense bias",
    ("flex", "position_bias"): "takes no position bias",
    ("flex", "empty"): "empty batch",
}


PAIRS = [
    (name, case)
    for name in ("sdpa_padded", "padded", "nested", "flex")
    for case, (subject, _, _) in CASES.items()
    if subject in names.PEERS[name].subjects
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_peer_computes_what_it_says(name, case, monkeypatch):
    subject, params, which = CASES[case]
    if name == "flex":  # its unfused form: compiling takes seconds a case and is tested once below
        monkeypatch.setattr(torch, "compile", lambda fn, **how: fn)
    inputs = build_inputs(subject, params, which, "cpu")
    if (name, case) in REFUSALS:
        with pytest.raises(Unsupported, match=REFUSALS[name, case]):
            peers.load(name)(inputs, name)
        return
    contestant = peers.load(name)(inputs, name)
    assert contestant.computes == ("softmax" if subject == "gdpa" and name != "padded" else "same")
    directions = ("forward",) if contestant.no_backward else ("forward", "backward")
    verdict = verdict_of(contestant, inputs, directions)
    assert verdict.right, verdict.problems


@pytest.mark.filterwarnings("ignore")
def test_flex_compiles_and_is_right():
    if cxx_compiler()[0] is None:
        pytest.skip(cxx_compiler()[1])
    inputs = build_inputs("jagged_attention", JaggedAttentionParams(heads=2, head_dim=32, causal=True), CROSS, "cpu")
    contestant = Flex(inputs, "flex")
    assert contestant.no_backward == "FlexAttention has no backward on the CPU"
    verdict = verdict_of(contestant, inputs, ("forward",))
    assert verdict.right, verdict.problems


@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (40, 7)), (True, (200, -1)), (False, (0, 0))]
)
def test_block_mask_from_lengths_is_create_block_masks(causal, window):
    """Tile by tile: torch evaluates the mask of every pair, ours comes from the lengths."""
    draw = np.random.RandomState(0)
    q, k = draw.randint(0, 400, 9), draw.randint(0, 300, 9)
    q[3], k[5] = 0, 0
    q[6] = k[6] = 512
    seg = Segments(q, k, causal, window, 1.0)
    ours = document_mask(seg, "cpu")
    theirs = create_block_mask(ours.mask_mod, None, None, int(q.sum()), int(k.sum()), device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for mine, other in (
        (ours.kv_num_blocks, theirs.kv_num_blocks),
        (ours.full_kv_num_blocks, theirs.full_kv_num_blocks),
    ):
        assert mine is not None and other is not None and torch.equal(mine, other)
    # The mask inside the tiles, against the oracle's own definition.
    dense = torch.zeros(int(q.sum()), int(k.sum()), dtype=torch.bool)
    q0 = k0 = 0
    for q_len, k_len in zip(q.tolist(), k.tolist(), strict=True):
        visible = reference._visible(q_len, k_len, causal, window, torch.device("cpu"))
        dense[q0 : q0 + q_len, k0 : k0 + k_len] = visible
        q0, k0 = q0 + q_len, k0 + k_len
    rows, columns = torch.arange(len(dense))[:, None], torch.arange(dense.shape[1])[None]
    zero = torch.tensor(0)
    assert torch.equal(ours.mask_mod(zero, zero, rows, columns), dense)


@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (3, 1)), (True, (2, -1))])
def test_padded_mask_hides_what_the_oracle_hides_and_leaves_no_row_without_a_key(causal, window):
    q, k = np.array([4, 6, 0, 3]), np.array([4, 2, 3, 0])
    q_len, k_len = 6, 5
    visible = visible_keys(Segments(q, k, causal, window, 1.0), q_len, k_len, "cpu")
    assert visible is not None and bool(visible.any(-1).all())
    for s, (rows, keys) in enumerate(zip(q.tolist(), k.tolist(), strict=True)):
        expected = reference._visible(rows, keys, causal, window, torch.device("cpu"))
        mask = visible[s, 0].expand(q_len, k_len)
        seeing = expected.any(-1)
        assert torch.equal(mask[:rows, :keys][seeing], expected[seeing])
        # A row that sees nothing sees one key of padding, whose value is 0.
        assert not bool(mask[:rows, :keys][~seeing].any()) and bool((mask[:rows][~seeing].sum(-1) == 1).all())


@pytest.mark.parametrize("name", ["torch_varlen", "fa3", "fa4", "cudnn_padded"])
def test_cuda_kernels_say_so_on_a_cpu(name):
    inputs = build_inputs("jagged_attention", JaggedAttentionParams(**SMALL), SELF, "cpu")
    with pytest.raises(Unsupported, match="runs on CUDA only"):
        peers.load(name)(inputs, name)


def test_flex_without_a_compiler_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr("gem.harness.peer_flex.cxx_compiler", lambda: (None, "no C++ compiler (g++)"))
    inputs = build_inputs("jagged_attention", JaggedAttentionParams(**SMALL), SELF, "cpu")
    with pytest.raises(Unsupported, match=r"no C\+\+ compiler \(g\+\+\)"):
        Flex(inputs, "flex")


def test_unknown_peer_is_one_line_with_the_accepted_ones():
    with pytest.raises(RequestError) as caught:
        peers.load("sdpa_paded")
    text = str(caught.value)
    assert "'sdpa_paded'" in text and "did you mean 'sdpa_padded'" in text and "\n" not in text
    assert all(name in text for name in peers.REGISTRY)


def test_shared_queries_are_not_multiplied_before_the_timing():
    """GDPA's PMA: a peer must read the few queries that all samples share, as the subject does."""
    subject, params, which = CASES["gdpa_pma"]
    for name in ("sdpa_padded", "padded", "nested"):
        assert peers.load(name)(build_inputs(subject, params, which, "cpu"), name).leaves["q"].shape == (4, 2, 16)


def test_flex_attention_is_what_is_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda fn: compiled.append(fn) or fn)
    Flex(build_inputs("jagged_attention", JaggedAttentionParams(**SMALL), SELF, "cpu"), "flex")
    assert compiled == [flex_attention]
