"""What softmax adds to a walk over keys: which keys a job sees, row maxima and sums, log-sum-exp.

Causal and windows are aligned bottom-right (gem.kernels.masks): query i of a sample stands at key position
i + k_len - q_len and sees the keys from ``left`` before to ``right`` behind it. LEFT, RIGHT: whether those edges exist.

Legend: M queries of a consumer, N keys of a tile, S_L layout of scores, O_L of sums of values.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def seen(
    row, q_len, k_len, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr
):  # fmt: skip
    """(first key that one of ROWS queries from ``row`` sees, tiles of N keys from there to the last: at least one)."""
    low = row * 0
    high = k_len
    if LEFT:
        low = gl.minimum(gl.maximum(row + k_len - q_len - left, 0), k_len)
    if RIGHT:
        high = gl.minimum(gl.minimum(row + ROWS, q_len) + k_len - q_len + right, k_len)
    return low, gl.maximum((high - low + N - 1) // N, 1)


@gluon.jit
def softmax(
    s, top, total, scale, i, j, q_len, k_len, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """Scores [M, N] of queries from ``i`` and keys from ``j`` taken into rows' maxima and sums [M], all in base 2.

    (weights [M, N], ``top``, ``total``, and by what earlier sums shrink [M]). ``scale`` >= 0: a maximum is found before
    it is scaled.
    """
    shift = k_len - q_len
    whole = j + N <= k_len
    if LEFT:
        whole = whole & (j >= gl.minimum(i + M, q_len) - 1 + shift - left)
    if RIGHT:
        whole = whole & (j + N - 1 <= i + shift + right)
    if not whole:
        s = _edged(s, i + shift, j, k_len, left, right, LEFT, RIGHT, M, N, S_L)
    higher = gl.maximum(top, gl.max(s, 1) * scale)
    # A row that saw nothing yet has the maximum -inf, and -inf - -inf is no number.
    origin = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(s * scale - origin[:, None])
    shrink = gl.exp2(top - origin)
    total = total * shrink + gl.sum(weights, 1)
    return weights, higher, total, shrink


@gluon.jit
def _edged(
    s, own, j, k_len, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    S_L: gl.constexpr,
):  # fmt: skip
    """-inf where a key is not seen; ``own``: key position of the first query."""
    m = gl.arange(0, M, layout=gl.SliceLayout(1, S_L))[:, None] + (own - j)
    # Not known to be the same every time: the compiler would keep all of a thread's columns through the whole walk.
    n = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.arange(0, N, layout=gl.SliceLayout(0, S_L))], gl.int32, False, 1
    )[None, :]
    last = k_len - 1 - j
    if RIGHT:
        last = gl.minimum(m + right, last)
    seen = n <= last
    if LEFT:
        seen = seen & (n >= m - left)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def finished(
    acc, top, total, lse, head, out_rows, start, at, last, M: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr
):
    """``acc`` over the rows' sums; and their log-sum-exp, in base 2, to ``lse`` [H, T].

    Rows from ``at`` of a sample of ``last`` rows that begins at ``start``.
    """
    none = total == 0.0  # nothing seen. NaN is not 0 and stays.
    factor = gl.where(none, 0.0, 1.0 / total)
    i = at + gl.arange(0, M, layout=gl.SliceLayout(1, S_L))
    place = lse + head.to(gl.int64) * out_rows + start
    gl.store(place + i, gl.where(none, float("inf"), top + gl.log2(total)), mask=i < last)
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, O_L), assert_trivial=True)[:, None]
