"""The ops as torch sees them: opcheck, gradcheck, compile without a recompile per batch, nested tensors, odd memory."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Calls unpack tuples of tensors; their lengths are not in the types.

import pytest
import torch
from attention_laws import offsets, rows, run
from torch._dynamo.testing import CompileCounter

import gem
import gem.library  # registers torch.ops.gem

OPS = torch.ops.gem
NEST = torch.nested.nested_tensor_from_jagged


def batch(lens_q, lens_k, heads=2, dim=16, dtype=torch.float32, tail=0, seed=0):
    q = rows(sum(lens_q) + tail, heads, dim, dtype, seed)
    k, v = (rows(sum(lens_k) + tail, heads, dim, dtype, seed + i) for i in (1, 2))
    return q, k, v, offsets(lens_q), offsets(lens_k)


def flat_calls():
    q, k, v, qo, ko = batch([5, 0, 3, 9], [4, 6, 0, 2], tail=2)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    table, edges = torch.randn(9, 2).requires_grad_(), torch.arange(8)
    dense = torch.randn(4, 2, 9, 6).requires_grad_()
    times = torch.arange(q.shape[0]), torch.arange(k.shape[0])
    cos = torch.rand(9, 8)
    none = (None,) * 7
    every_bias = (dense, table, edges, table, edges, *times)
    yield "jagged", OPS.jagged_attention, (q, k, v, qo, ko, None, None, True, -1, -1, 0.25, *none, "torch", False)
    yield "biases", OPS.jagged_attention, (q, k, v, qo, ko, 9, 6, False, -1, -1, 0.2, *every_bias, "torch", True)
    yield "gdpa", OPS.gdpa, (q, k, v, qo, ko, None, None, "gelu", 1.0, 1.0, True, 3, -1, "torch", False)
    yield "shared", OPS.gdpa, (q, k, v, None, ko, None, None, "silu", 0.5, 2.0, False, -1, -1, "torch", False)
    yield "block", OPS.block_attention, (q, q, q, qo, 4, cos, cos, 0.3, None, "torch", False)


@pytest.mark.parametrize(("op", "args"), [pytest.param(op, args, id=name) for name, op, args in flat_calls()])
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


def test_gradcheck_in_float64():
    q, k, v, qo, ko = batch([3, 0, 2], [2, 1, 3], heads=1, dim=4, dtype=torch.float64, tail=1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = torch.randn(1, 3, 3, dtype=torch.float64, requires_grad=True)
    table = torch.randn(5, 1, dtype=torch.float64, requires_grad=True)
    calls = {
        "causal": (lambda *x: gem.jagged_attention(*x, qo, ko, causal=True), leaves),
        "bias": (lambda a, b, c, d: gem.jagged_attention(a, b, c, qo, ko, bias=d), [*leaves, bias]),
        "table": (
            lambda a, b, c, d: gem.jagged_attention(a, b, c, qo, ko, bias=gem.PositionBias.clipped(d)),
            [*leaves, table],
        ),
        "gdpa": (lambda *x: gem.gdpa(*x, qo, ko, activation="gelu_taylor", window=(1, 1)), leaves),
        "shared": (lambda *x: gem.gdpa(*x, None, ko, broadcast_q=True, activation="silu"), leaves),
        "block": (lambda *x: gem.block_attention(*x, qo, block=2), [leaves[0], leaves[0], leaves[0]]),
    }
    for name, (fn, inputs) in calls.items():
        assert torch.autograd.gradcheck(fn, inputs), name


def three_ops(q, k, v, qo, ko):
    a = gem.jagged_attention(q, k, v, qo, ko, causal=True)
    b = gem.gdpa(q, k, v, qo, ko, window=(5, 5), qk_scale=0.2)
    c = gem.gdpa(q[:3], k, v, None, ko, broadcast_q=True, qk_scale=0.2)
    d = gem.block_attention(a, b, a + 1, qo, block=8)
    return d.square().sum() + c.square().sum()


BATCHES = [([5, 9, 3], [4, 0, 6]), ([30, 1, 2], [7, 7, 7]), ([8] * 5, [3] * 5), ([4, 40], [50, 2]), ([6] * 9, [1] * 9)]


def test_compiled_whole_and_not_again_for_every_batch():
    """The first change of a size makes it dynamic (torch's own policy); after that any batch runs the same graph."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(three_ops, fullgraph=True, backend=counter)
    counts = []
    for lens in BATCHES:
        inputs = batch(*lens)
        torch.testing.assert_close(compiled(*inputs), three_ops(*inputs))
        counts.append(counter.frame_count)
    assert counts[-1] == counts[2] <= 3, counts


def test_compiled_backward_equals_eager():
    torch._dynamo.reset()
    compiled = torch.compile(three_ops, fullgraph=True, backend="aot_eager")
    for lens in BATCHES[:3]:
        q, k, v, qo, ko = batch(*lens)
        cuts = (qo, ko)
        got, expected = (run(lambda *x, f=f, c=cuts: f(*x, *c), (q, k, v)) for f in (compiled, three_ops))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_a_promised_length_does_not_recompile_either():
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(q, k, v, qo, ko, longest):
        return gem.jagged_attention(q, k, v, qo, ko, max_q_len=longest)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for lens in BATCHES:
        compiled(*batch(*lens), max(lens[0]))
    assert counter.frame_count <= 3


def test_nested_tensors_in_and_out_with_gradients():
    q, k, v, qo, ko = batch([5, 0, 3], [4, 6, 0])
    nest = torch.nested.nested_tensor_from_jagged
    ops = {
        "jagged": lambda q, k, v, *o: gem.jagged_attention(q, k, v, *o, causal=True),
        "gdpa": lambda q, k, v, *o: gem.gdpa(q, k, v, *o, activation="silu"),
    }
    for name, op in ops.items():

        def through_nested(q, k, v, op=op):
            out = op(nest(q, qo), nest(k, ko), nest(v, ko))
            assert out.is_nested and torch.equal(out.offsets(), qo)
            return out.values()

        for a, b in zip(run(through_nested, (q, k, v)), run(lambda *x, op=op: op(*x, qo, ko), (q, k, v)), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    shared = gem.gdpa(q[:2], nest(k, ko), nest(v, ko), broadcast_q=True)
    torch.testing.assert_close(shared, gem.gdpa(q[:2], k, v, None, ko, broadcast_q=True))
    compiled = torch.compile(lambda *x: gem.jagged_attention(*x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(nest(q, qo), nest(k, ko), nest(v, ko)).values(), gem.jagged_attention(q, k, v, qo, ko)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k.values(), v), "nested and plain tensors are mixed"),
        (
            lambda q, k, v: (q, k, torch.nested.nested_tensor_from_jagged(v.values(), offsets([6, 4, 0]))),
            "same lengths",
        ),
        (lambda q, k, v: (q.transpose(1, 2), k, v), r"transpose\(1, 2\) moves it"),
        (lambda q, k, v: (q.values()[:, 0], k, v), "nested and plain tensors are mixed"),
    ],
)
def test_nested_tensors_that_do_not_fit_are_refused(change, message):
    q, k, v, qo, ko = batch([5, 0, 3], [4, 6, 0])
    nest = torch.nested.nested_tensor_from_jagged
    with pytest.raises(ValueError, match=message):
        gem.jagged_attention(*change(nest(q, qo), nest(k, ko), nest(v, ko)))
    with pytest.raises(ValueError, match="carry their own offsets"):
        gem.jagged_attention(nest(q, qo), nest(k, ko), nest(v, ko), qo, ko)


def test_rows_past_2_to_the_31_elements():
    """Nine rows 2^28 elements apart: the last ones lie past 2^31. The gap is never touched, so it costs no memory."""
    apart, heads, dim = 2**28, 2, 16
    storage = torch.empty(8 * apart + heads * dim, dtype=torch.bfloat16)
    far = storage.as_strided((9, heads, dim), (apart, dim, 1))
    far.copy_(rows(9, heads, dim, torch.bfloat16, 0))
    near = far.clone()
    cuts = offsets([4, 5])
    for op in (gem.jagged_attention, gem.gdpa, gem.block_attention):
        assert torch.equal(op(far, far, far, cuts), op(near, near, near, cuts)), op


def test_slices_of_one_fused_projection():
    """q, k, v as slices of [T, 3, H, D], strides (3 H D, D, 1): the layout that broke a public kernel's gradients."""
    fused = rows(12, 6, 16, torch.float32, 0).view(12, 3, 2, 16)
    cuts = offsets([5, 0, 7])

    def op(x):
        return gem.jagged_attention(*x.unbind(1), cuts, causal=True)

    def packed(x):
        return gem.jagged_attention(*(part.contiguous() for part in x.unbind(1)), cuts, causal=True)

    for a, b in zip(run(op, [fused]), run(packed, [fused]), strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_are_refused_not_wrong():
    q, k, v, qo, ko = batch([3], [2])
    q.requires_grad_()
    (dq,) = torch.autograd.grad(gem.gdpa(q, k, v, qo, ko).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(dq.sum(), q)


def test_memory_grows_with_the_samples_not_with_the_longest():
    """One sample of 2000 rows among 300 of one row: padding would take 300 * 2000 rows of q, k, v and 1.2 G scores."""
    q, k, v, qo, ko = batch([2000] + [1] * 300, [2000] + [1] * 300, heads=1, dim=16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        gem.jagged_attention(q, k, v, qo, ko)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert allocated < 16 * 2**20, f"{allocated / 2**20:.1f} MB"


def test_a_bias_of_minus_infinity_hides_and_its_padding_is_not_read():
    """Whole rows at -inf give 0; behind a sample's end the bias may hold anything. Short samples share a group."""
    q, k, v, qo, ko = batch([5, 3, 0, 7, 300], [6, 2, 4, 5, 310], heads=1)
    lens = [(5, 6), (3, 2), (0, 4), (7, 5), (300, 310)]
    bias = torch.full((5, 1, 300, 310), torch.nan)
    for b, (lq, lk) in enumerate(lens):
        bias[b, :, :lq, :lk] = torch.randn(lq, lk)
        bias[b, :, :1, :lk] = -torch.inf  # the first query of each sample

    def run_with(impl):
        return run(lambda *x: gem.jagged_attention(*x[:3], qo, ko, bias=x[3], impl=impl), (q, k, v, bias))

    got, right = run_with("torch"), run_with("reference")
    for name, a, b in zip(("out", "dq", "dk", "dv", "d_bias"), got, right, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0, msg=name)
    firsts = qo[:-1][qo.diff() > 0]
    assert (got[0][firsts] == 0).all() and all(torch.isfinite(x).all() for x in got)


def test_times_in_milliseconds_do_not_wrap():
    q, k, v, qo, ko = batch([3], [4], heads=1)
    table = torch.randn(40, 1)
    late, early = torch.full((3,), 1_700_000_000_000), torch.tensor([0, 1, 1_600_000_000_000, 1_699_999_999_999])
    bias = gem.TimeBias.log2(table, late, early)
    got, right = (gem.jagged_attention(q, k, v, qo, ko, bias=bias, impl=impl) for impl in ("torch", "reference"))
    torch.testing.assert_close(got, right)


def forward_mode_calls():
    q, k, v, qo, ko = batch([3], [3])
    yield "q", lambda x: gem.gdpa(x, k, v, qo, ko), q
    yield "dense bias", lambda x: gem.jagged_attention(q, k, v, qo, ko, bias=x), torch.zeros(3, 3)
    table = torch.zeros(5, 2)
    yield "table", lambda x: gem.jagged_attention(q, k, v, qo, ko, bias=gem.PositionBias.clipped(x)), table
    yield "rope", lambda x: gem.block_attention(q, k, v, qo, rope=(x, x)), torch.zeros(3, 8)


@pytest.mark.parametrize(("op", "x"), [pytest.param(op, x, id=name) for name, op, x in forward_mode_calls()])
def test_forward_mode_is_refused_not_dropped(op, x):
    with pytest.raises(ValueError, match="no forward-mode derivative"):
        torch.func.jvp(op, (x,), (torch.ones_like(x),))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("op", [gem.jagged_attention, gem.gdpa])
def test_a_trace_holds_the_op_and_not_the_lengths_it_was_made_with(op):
    q, k, v, edges, _ = batch([5, 7], [5, 7])
    other = offsets([2, 10])
    with torch.no_grad():
        traced = torch.jit.trace(lambda *x: op(*x, impl="torch"), (q, k, v, edges), check_trace=False)
        assert torch.equal(traced(q, k, v, other), op(q, k, v, other, impl="torch"))


@pytest.mark.parametrize("name", ["jagged_attention", "gdpa", "block_attention"])
def test_an_output_may_be_changed_in_place(name):
    q, k, v, edges, _ = batch([5, 7], [5, 7])
    op = getattr(gem, name)

    def gradient(after):
        leaf = q.clone().requires_grad_()
        out = op(leaf, k, v, edges, impl="torch")
        return torch.autograd.grad(after(out).square().sum(), leaf)[0]

    assert torch.equal(gradient(lambda out: out.mul_(2.0).add_(1.0)), gradient(lambda out: out * 2.0 + 1.0))


def test_a_bucket_of_many_pairs_is_summed_precisely():
    """360,000 pairs in three buckets: summed in float32, one after the other, they are off by 1.3e-5."""
    (q, k, v, edges, _), table = batch([600], [600]), torch.zeros(3, 2)
    d_out = rows(600, 2, 16, torch.float32, 9)
    grads = []
    for dtype in (torch.float32, torch.float64):
        leaf = table.to(dtype).requires_grad_()
        out = gem.jagged_attention(
            *(x.to(dtype) for x in (q, k, v)), edges, bias=gem.PositionBias.clipped(leaf), impl="torch"
        )
        grads.append(torch.autograd.grad(out, leaf, d_out.to(dtype))[0])
    assert (grads[0] - grads[1]).abs().max() < 5e-6
