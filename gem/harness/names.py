"""The names that a declaration may use: kinds, implementations, peers and metrics.

They live apart from the code behind them so that checking and listing a thousand declared cases imports no torch.
The code behind them looks itself up by these names; a test keeps the lists equal.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

KINDS = ("correctness", "throughput", "scaling", "quality")
# Kinds that the design names and that have no runner so far: they get an error of their own instead of "unknown kind".
KINDS_WITHOUT_RUNNER = ("claim",)
OP_KINDS = ("correctness", "throughput")  # of the ops; other subjects name theirs in measured.py
IMPLEMENTATIONS = ("reference", "torch", "triton", "gluon")
DIRECTIONS = ("forward", "backward")

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """A metric of a result row: its unit ('' for a plain number), which way is better, digits to show (0: whole)."""

    unit: str
    better: Better
    digits: int = 3


METRICS: dict[str, Metric] = {
    "ms": Metric("ms", "lower"),  # of one call, or one step: the median
    "tflops": Metric("TFLOP/s", "higher"),  # useful FLOPs only: pairs that the mask keeps
    "gbps": Metric("GB/s", "higher"),  # least bytes: each input read once, each output written once
    "roofline": Metric("share", "higher"),  # of the speed that FLOPs and least bytes allow, ceilings of the same run
    "max_error": Metric("", "lower"),  # from the oracle, or between contestants: the largest of those looked at
    "bytes": Metric("B", "lower"),  # of what is stored or kept
    # of training, end to end
    "qps": Metric("1/s", "higher"),  # samples trained a second
    "mfu": Metric("share", "higher"),  # useful model FLOPs of the un-padded batch, over time and peak
    "local_mfu": Metric("share", "higher"),  # each layer alone, weighted by its share of a step's FLOPs
    "e2e_mfu": Metric("share", "higher"),  # of whole training steps
    "scaling_ratio": Metric("share", "higher"),  # e2e_mfu / local_mfu
    "input_wait": Metric("share", "lower"),  # of the step's time, spent waiting for samples
    "peak_memory": Metric("B", "lower"),  # of the device, or of the process where there is none
    # of what is learnt
    "ne": Metric("", "lower", 5),  # normalised entropy: mean log loss / log loss of always predicting the base rate
    "ne_floor": Metric("", "lower", 5),  # of the teacher that drew the labels: no model can do better
    "ne_above_floor": Metric("share", "lower"),  # ne / ne_floor - 1
    "auc": Metric("", "higher", 4),  # area under the ROC curve: a random positive ranks above a random negative
    "calibration": Metric("", "lower"),  # |mean prediction / mean label - 1|: as a distance, it has one better side
    # of load balance
    "max_over_mean": Metric("x", "lower", 5),  # a step's heaviest rank over the ranks' mean, mean over steps
    "share_closed": Metric("share", "higher"),  # of the gap between random batches and the best partition
    "bytes_moved": Metric("B", "lower"),  # between ranks, a step
    "largest_batch": Metric("x", "lower"),  # samples of the largest batch over the mean: what memory must allow for
    "samples_per_s": Metric("1/s", "higher"),  # through the readers, on one core
    # of ranks
    "ranks": Metric("", "higher", 0),  # processes that train one model together
    "work_ratio": Metric("share", "higher"),  # CPU time of one process for a rank's share over the heaviest rank's
    "cpu_ms": Metric("ms", "lower"),  # CPU time of a step, of the rank that needs most
    "flops_per_rank": Metric("FLOP", "lower"),  # useful, of a step, mean of the ranks
    "collectives_ms": Metric("ms", "lower"),  # of a step, with a collective under way or waited for; mean of ranks
    "bytes_sent": Metric("B", "lower"),  # to other ranks in a step, of the rank that sends most
    "bytes_unexplained": Metric("B", "lower"),  # largest difference between what is counted and what the formulas say
    "memory_tables": Metric("B", "lower"),  # weights and optimizer state of tables, of the rank that holds most
    "memory_dense": Metric("B", "lower"),  # dense parameters between steps, of the rank that holds most
    "memory_optimizer": Metric("B", "lower"),  # state of the dense optimizer, of the rank that holds most
    "tables_over_v1": Metric("x", "lower", 4),  # memory_tables over that of tables V1 on the same ranks
    # of contention
    "sm_free_gain": Metric("share", "higher"),  # what work gains when the most SMs held by a copy become the fewest
    "engine_gain": Metric("share", "higher"),  # the same when they become none, the copy engine copying instead
}
RATIO_PREFIX = "ratio_to."
SLOWDOWN_PREFIX = "slowdown."  # followed by what ran beside
SENT_PREFIX = "sent."  # followed by what it was for and the tier: sent.dense_parameters.zone


def metric(name: str) -> Metric | None:
    """The metric called `name`, or None when there is none.

    ``ratio_to.<peer>``, ``slowdown.<neighbour>`` and ``sent.<what>.<tier>`` included.
    """
    if name.startswith(RATIO_PREFIX) and len(name) > len(RATIO_PREFIX):
        return Metric("x", "higher")  # peer's time / subject's time, or subject's rate / peer's rate
    if name.startswith(SLOWDOWN_PREFIX) and len(name) > len(SLOWDOWN_PREFIX):
        return Metric("x", "lower")  # time beside something / time alone
    if re.fullmatch(rf"{re.escape(SENT_PREFIX)}\w+\.(host|zone|cluster)", name):
        return Metric("B", "lower")  # to other ranks in a step, of the rank that sends most of it
    return METRICS.get(name)


@dataclass(frozen=True)
class Peer:
    """A public kernel to compare with: what it is, what it needs (the grammar of needs.py), and for which subjects."""

    what: str
    needs: str | None
    subjects: tuple[str, ...]


_SOFTMAX = ("jagged_attention", "gdpa", "block_attention")
PEERS: dict[str, Peer] = {
    "sdpa_padded": Peer("scaled_dot_product_attention on the batch padded to its longest sample", None, _SOFTMAX),
    "cudnn_padded": Peer("scaled_dot_product_attention through cuDNN alone on the padded batch", "cuda", _SOFTMAX),
    "sdpa_blocks": Peer("scaled_dot_product_attention on the batch cut into its blocks", None, ("block_attention",)),
    "torch_varlen": Peer("torch.nn.attention.varlen.varlen_attn", "cuda", _SOFTMAX),
    "flex": Peer("FlexAttention, compiled, with a document mask over the flattened batch", "compiler", _SOFTMAX),
    "nested": Peer("scaled_dot_product_attention on jagged nested tensors", None, _SOFTMAX),
    "padded": Peer("the same gdpa by plain matmuls on the padded batch", None, ("gdpa",)),
    "fa3": Peer("FlashAttention 3, flash_attn_varlen_func", "cuda:sm90, package:flash_attn_interface", _SOFTMAX),
    "fa4": Peer("FlashAttention 4 (CuTe), flash_attn_varlen_func", "cuda:sm90, package:flash_attn.cute", _SOFTMAX),
    "mkl_gdpa": Peer("ads_model_kernel_library's Triton GDPA", "cuda, package:ads_mkl.ops.oss.gdpa.triton", ("gdpa",)),
    "hstu": Peer(
        "generative-recommenders' Triton HSTU attention", "cuda, package:generative_recommenders.ops.triton", ("gdpa",)
    ),
    "torch_padded": Peer("gem's trainer on padded batches, attention by torch", None, ("e2e",)),
    "deepspeed_padded": Peer("the padded model in DeepSpeed's ZeRO", "package:deepspeed", ("e2e",)),
    "torchrec": Peer("TorchRec's DistributedModelParallel on the same tables", "package:torchrec", ("sharded_tables",)),
    "zero3": Peer("DeepSpeed's ZeRO-3 on the same model", "package:deepspeed", ("sharded_dense",)),
    "jfa_v1": Peer("gem's own first generation of the Triton kernels", "cuda, triton", ("jagged_attention",)),
    "gluon_unsorted": Peer(
        "impl='gluon' by tiles in the batch's order, dealt straight", "cuda:sm90, triton", ("gdpa",)
    ),
    "gluon_drained": Peer("impl='gluon' that ends a job before the next begins", "cuda:sm90, triton", ("gdpa",)),
    "gluon_tanh": Peer("impl='gluon' with gelu_tanh instead of gelu_taylor", "cuda:sm90, triton", ("gdpa",)),
    "gluon_plain": Peer("impl='gluon' without warp specialisation, long keys", "cuda:sm90, triton", ("gdpa",)),
}


def nearest(word: object, accepted: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the accepted name nearest to `word`, or '' when none is near."""
    found = difflib.get_close_matches(str(word), list(accepted), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def accepted_list(accepted: Iterable[str], limit: int = 24) -> str:
    """The accepted names on one line, cut after `limit` of them."""
    names = list(accepted)
    more = f", … ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
