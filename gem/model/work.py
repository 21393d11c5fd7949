"""Useful FLOPs of a step, module by module: each module says what it needs for the work of one batch.

Matrix products only, 2 FLOPs a multiplication and addition; norms, activations, lookups and optimizers earn nothing,
nor does padding. Forward; training is three times that (a product for each operand's gradient), also for attention:
the products that its backward repeats are recompute.
"""

from dataclasses import dataclass

import numpy as np

from gem.data.samples import Samples
from gem.efficiency import attention_pairs, block_pairs

TRAINING = 3.0  # FLOPs of forward and backward over those of the forward


@dataclass(frozen=True, eq=False)
class Work:
    """What decides the FLOPs of a batch."""

    samples: int
    lengths: dict[str, np.ndarray]  # by sequence, int64 [B]

    @classmethod
    def of(cls, samples: Samples) -> "Work":
        """Of a batch; on a GPU this waits for its offsets."""
        lengths = {name: events.lengths.cpu().numpy() for name, events in samples.sequences.items()}
        return cls(len(samples), lengths)

    def events(self, sequence: str) -> int:
        """Events of all samples."""
        return int(self.lengths[sequence].sum())

    def self_pairs(self, sequence: str, block: int | None, window: int | None) -> int:
        """Pairs of self attention in blocks, or causal to ``window`` events before."""
        lengths = self.lengths[sequence]
        if block is not None:
            return block_pairs(lengths, block)
        return attention_pairs(lengths, lengths, True, (-1 if window is None else window, -1))

    def cross_pairs(self, queries: str, keys: str) -> int:
        """Pairs of every event of one sequence with every event of another."""
        return attention_pairs(self.lengths[queries], self.lengths[keys])


def linear(rows: int, fan_in: int, fan_out: int) -> float:
    """FLOPs of a linear layer on that many rows."""
    return 2.0 * rows * fan_in * fan_out


def attend(pairs: int, heads: int, head_dim: int) -> float:
    """FLOPs of attention: two products of head_dim a pair and head."""
    return 4.0 * pairs * heads * head_dim
