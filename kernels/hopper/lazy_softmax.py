"""Softmax over tiles of keys by few instructions: a row's reference moves only where it must.

Weights are 2**(score - reference). Any reference gives the same softmax, since floating point is as exact at one size
as at another, if no weight overflows and none that matters vanishes. A row begins with the largest of its first eight
scores and keeps it: no maximum is sought, nothing shrinks. The sums of weights, which are needed anyway, show where
that does not do. Past LIMIT a warp seeks its rows' true maxima and weighs the tile anew. So a reference is at most its
row's maximum, a weight in fp16 is finite, and a sum is 0 only where nothing was seen. (Where |score| < 2**31: beyond,
fp32 has no reference near enough for a subtraction by multiply-add, and softmax no meaning in it either.)

That branch is each warp's own. Gluon branches with whole partitions alone, which would cost a reduction over the warps
for each tile; hence the assembly.

A row's scores lie in four lanes. Each sums its own until the end.

Legend: M queries (64), N keys of a tile, D head_dim, L the layout of scores [M, N] or of sums of values [M, D].
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOWEST = gl.constexpr(-3.4028234663852886e38)  # of fp32: -inf - LOWEST is -inf, where -inf - -inf is no number
_LIMIT = "0f47000000"  # 2**15, half of what fp16 holds
_ONE = "0f3F800000"


# -- what a thread holds -----------------------------------------------------------------------------------------------


@gluon.constexpr_function
def lanes(columns: int) -> gl.DistributedLinearLayout:
    """Of [M, 4, columns / 4]: rows, the four lanes of each, and what such a lane holds of it.

    As wgmma lays out what it gives: a thread has pairs of columns, of one row and of the eighth below in turn.
    """
    more = [[0, 0, 2**i] for i in range(1, _halvings(columns // 4))]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], *more], lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, 4, columns // 4],
    )  # fmt: skip


@gluon.constexpr_function
def _halvings(size: int) -> int:
    return size.bit_length() - 1


@gluon.jit
def _apart(x, COLUMNS: gl.constexpr):
    """[M, columns] by lanes: [M, 4, columns / 4]."""
    x = x.reshape([64, COLUMNS // 8, 4, 2]).permute((0, 2, 1, 3)).reshape([64, 4, COLUMNS // 4])
    return gl.convert_layout(x, lanes(COLUMNS), assert_trivial=True)


@gluon.jit
def _together(x, COLUMNS: gl.constexpr, L: gl.constexpr):
    x = x.reshape([64, 4, COLUMNS // 8, 2]).permute((0, 2, 1, 3)).reshape([64, COLUMNS])
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def _spread(x, like):
    """[M, 4] to all that lanes hold."""
    x, _ = gl.broadcast(gl.expand_dims(x, 2), like)
    return x


@gluon.jit
def _foremost(x, SIZE: gl.constexpr, N: gl.constexpr):
    """[M, 4]: the first of SIZE that lanes hold."""
    for i in gl.static_range(_halvings(SIZE)):
        x, _ = gl.split(x.reshape([64, 4, SIZE // 2 ** (i + 1), 2]))
    return gl.convert_layout(x.reshape([64, 4]), gl.SliceLayout(2, lanes(N)), assert_trivial=True)


# -- weights -----------------------------------------------------------------------------------------------------------


@gluon.jit
def nothing_seen(N: gl.constexpr):
    """(references, sums) of rows without a tile."""
    ROWS: gl.constexpr = gl.SliceLayout(2, lanes(N))
    return gl.full([64, 4], LOWEST, gl.float32, ROWS), gl.zeros([64, 4], gl.float32, ROWS)


@gluon.jit
def weights_of_first(s, here, masked, scale, N: gl.constexpr, L: gl.constexpr):
    """(weights [M, N], references, sums [M, 4]) of rows' first tile.

    Where ``masked``, keys count whose ``here`` [N] is 1. ``scale`` > 0: a maximum is found before it is scaled.
    """
    if masked:
        s = gl.where(here[None, :] == 1.0, s, float("-inf"))
    s = _apart(s, N)
    even, odd = gl.split(s.reshape([64, 4, N // 8, 2]))
    even = _foremost(even, N // 8, N)
    high = gl.max(gl.maximum(even, _foremost(odd, N // 8, N)), 1)
    origin, _ = gl.broadcast(gl.maximum(high * scale, LOWEST)[:, None], even)
    w = gl.exp2(s * scale - _spread(origin, s))
    w, origin, total, _ = _watched(w, s, s, gl.sum(w, 2), origin, scale, 0, N)
    return _together(w, N, L), origin, total


@gluon.jit
def weights_of_next(s, here, origin, total, scale, MASKED: gl.constexpr, N: gl.constexpr, L: gl.constexpr):
    """(weights, references, sums, by what sums of values shrink [M, 4]) with one tile more.

    Keys whose ``here`` [N] is 0 are left out of the sums, where MASKED. They must have come in a tile before, so that
    their weights are no larger than LIMIT.
    """
    s = _apart(s, N)
    w = gl.exp2(s * scale - _spread(origin, s))
    factors, _ = gl.broadcast(here[None, :], gl.zeros([64, N], gl.float32, L))
    factors = _apart(factors, N)
    if MASKED:
        more = gl.sum(w * factors, 2)
    else:
        more = gl.sum(w, 2)
    w, origin, more, shrink = _watched(w, s, factors, more, origin, scale, MASKED, N)
    return _together(w, N, L), origin, total * shrink + more, shrink


@gluon.jit
def _watched(w, s, here, total, origin, scale, MASKED: gl.constexpr, N: gl.constexpr):
    """(weights, references, sums, shrink) of a tile: as they are, or anew where a sum is past LIMIT."""
    SIZE: gl.constexpr = N // 4
    KINDS: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
    scales, _ = gl.broadcast(scale, s)
    given = [w, s, _spread(total, s), _spread(origin, s), scales]
    if MASKED:
        given = [w, s, _spread(total, s), _spread(origin, s), scales, here]
    w, origin, total, shrink = gl.inline_asm_elementwise(
        _watching(2 * SIZE, MASKED), _places(4, 5 + MASKED, 2 * SIZE), given, KINDS, False, 2 * SIZE
    )
    return w, _foremost(origin, SIZE, N), _foremost(total, SIZE, N), _foremost(shrink, SIZE, N)


@gluon.constexpr_function
def _watching(count: int, masked: int) -> str:
    """Assembly for ``count`` scores of a thread, of two rows, a pair of each in turn.

    Gives weights, references, sums and shrink, of which a row's first alone is set but for the weights. Takes weights,
    scores, sums, references, scale and, where ``masked``, factors of what is summed.
    """
    w, new_origin, new_total, shrink = (_operands(i, count) for i in range(4))
    s, total, origin, scale, here = (_operands(i, count) for i in range(5, 10))
    text = [
        ".reg .pred p;",
        ".reg .f32 x, m0, m1;",
        f"setp.gt.f32 p, {total[0]}, {_LIMIT};",
        f"setp.gt.or.f32 p, {total[2]}, {_LIMIT}, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
    ]
    for i in (0, 2):
        text += [f"mov.f32 {new_origin[i]}, {origin[i]};", f"mov.f32 {new_total[i]}, {total[i]};"]
        text += [f"mov.f32 {shrink[i]}, {_ONE};"]
    text += ["@!p bra KEEP;"]
    for m, i in (("m0", 0), ("m1", 2)):
        row = [j for j in range(count) if j & 2 == i]
        text += [f"mov.f32 {m}, {s[i]};"]
        text += [f"max.f32 {m}, {m}, {s[j]};" for j in row[1:]]
        for lane in (1, 2):
            text += [f"shfl.sync.bfly.b32 x, {m}, {lane}, 31, 0xffffffff;", f"max.f32 {m}, {m}, x;"]
        text += [f"mul.f32 {m}, {m}, {scale[i]};", f"max.f32 {new_origin[i]}, {m}, {origin[i]};"]
        text += [f"sub.f32 x, {origin[i]}, {new_origin[i]};", f"ex2.approx.ftz.f32 {shrink[i]}, x;"]
        text += [f"neg.f32 {m}, {new_origin[i]};", f"mov.f32 {new_total[i]}, 0f00000000;"]
        for j in row:
            text += [f"fma.rn.f32 {w[j]}, {s[j]}, {scale[i]}, {m};", f"ex2.approx.ftz.f32 {w[j]}, {w[j]};"]
            factor = here[j] if masked else _ONE
            text += [f"fma.rn.f32 {new_total[i]}, {w[j]}, {factor}, {new_total[i]};"]
    return _block(*text, "KEEP:")


@gluon.jit
def shrunk(acc, shrink, D: gl.constexpr, L: gl.constexpr):
    """``acc`` [M, D] times ``shrink``: nothing to do where that is 1 for a warp's rows."""
    acc = _apart(acc, D)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(2, lanes(D)), assert_trivial=True)
    acc = gl.inline_asm_elementwise(
        _shrinking(D // 2), _places(1, 2, D // 2), [acc, _spread(shrink, acc)], gl.float32, False, D // 2
    )
    return _together(acc, D, L)


@gluon.constexpr_function
def _shrinking(count: int) -> str:
    """Assembly for ``count`` sums of a thread, of two rows, a pair of each in turn: sums of sums and factors."""
    acc, factor = _operands(0, count), _operands(2, count)
    return _block(
        ".reg .pred p;",
        f"setp.neu.f32 p, {factor[0]}, {_ONE};",
        f"setp.neu.or.f32 p, {factor[2]}, {_ONE}, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra KEEP;",
        *(f"mul.f32 {x}, {x}, {by};" for x, by in zip(acc, factor, strict=True)),
        "KEEP:",
    )


@gluon.constexpr_function
def _block(*lines: str) -> str:
    return "\n".join(["{", *lines, "}"])


@gluon.constexpr_function
def _operands(number: int, count: int) -> list[str]:
    """Those of the assembly's ``number``-th tensor."""
    return [f"${number * count + i}" for i in range(count)]


@gluon.constexpr_function
def _places(given: int, taken: int, count: int) -> str:
    """Constraints for ``count`` elements each of tensors given and taken: the first taken are the first given's."""
    own = [str(i) for i in range(count)]
    return ",".join(["=&f"] * (given * count) + own + ["f"] * ((taken - 1) * count))


# -- the end -----------------------------------------------------------------------------------------------------------


@gluon.jit
def averages(acc, origin, total, lse, head, out_rows, start, at, last, N: gl.constexpr, L: gl.constexpr):
    """``acc`` over the rows' sums; and their log-sum-exp, in base 2, to ``lse`` [H, T].

    Rows from ``at`` of a sample of ``last`` rows that begins at ``start``.
    """
    ROWS: gl.constexpr = gl.SliceLayout(2, lanes(N))
    total = gl.sum(total, 1)
    none = total == 0.0  # nothing seen. NaN is not 0 and stays.
    log = gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [total], gl.float32, True, 1)
    log, origin = gl.broadcast(gl.where(none, float("inf"), log)[:, None], origin)
    i = at + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    i, lane = gl.broadcast(i[:, None], gl.arange(0, 4, layout=gl.SliceLayout(0, ROWS))[None, :])
    gl.store(lse + head.to(gl.int64) * out_rows + start + i, origin + log, mask=(i < last) & (lane == 0))
    factor = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [total], gl.float32, True, 1)
    factor = gl.where(none, 0.0, factor)
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, L), assert_trivial=True)[:, None]
