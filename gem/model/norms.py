"""Root mean square norms, the same in eager and compiled code, in fp32 and under autocast.

Legend: E width of a token, D head_dim.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6  # named: the default is that of the type, 0.008 in bf16


class RMSNorm(nn.Module):
    """x over its root mean square in the last dimension, times a learnt scale.

    torch.nn.RMSNorm with the weight in x's type: with an fp32 weight beside bf16 tokens, as autocast leaves them, torch
    takes no fused kernel (it warns so) but seven passes over fp32 copies.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), EPS)


def head_norm(x: Tensor) -> Tensor:
    """x […, D] over its root mean square in the last dimension: QK-norm."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)
