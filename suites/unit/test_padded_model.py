"""The padded baseline: its attention against the definitions, its model against the packed one, no trace of padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_data import random_samples, small_schema
from torch import Tensor

from gem import reference
from gem.baselines.padded import Padded, pad, pad_events
from gem.data.samples import Events, Samples
from gem.model import GemModel, ModelConfig
from gem.model.layout import rope_tables

LENGTHS, KEY_LENGTHS = [70, 0, 5, 130, 1, 64], [3, 9, 0, 1, 0, 20]
OFFSETS, KEY_OFFSETS = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (LENGTHS, KEY_LENGTHS))
HEADS, HEAD_DIM = 2, 8
ROPE = rope_tables(max(LENGTHS), HEAD_DIM)  # fewer positions than the padded room, which is rounded up


def events_of(lengths: list[int]) -> Events:
    ids = torch.randint(1, 1000, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return Events(torch.tensor([0, *lengths]).cumsum(0), {"item": ids}, ids.cumsum(0))


def rows(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64).requires_grad_()


def padded(layout: Padded, x_THD: Tensor) -> Tensor:
    """Rows to [B, L, H, D]; numbers that mean nothing in the padding, as a model's projections leave there."""
    out = torch.full((*layout.real_BL.shape, HEADS, HEAD_DIM), 7.0, dtype=x_THD.dtype)
    return out.masked_scatter(layout.real_BL[:, :, None, None], x_THD)


def assert_agree(got: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    """Rows and all gradients, for an arbitrary gradient of the result."""
    torch.testing.assert_close(got, wanted)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9), dtype=wanted.dtype)
    grads = [torch.autograd.grad((out * weight).sum(), leaves) for out in (got, wanted)]
    torch.testing.assert_close(grads[0], grads[1])


@given(st.lists(st.integers(0, 600), max_size=6))
def test_padding_keeps_every_event_in_its_place(lengths):
    events = events_of(lengths)
    out = pad_events(events)
    room, longest = out.ids["item"].shape[1], max(lengths, default=0)
    step = 64 if longest >= 64 else 8
    assert room == max(step, -(-longest // step) * step)
    assert out.times is not None and events.times is not None
    for b, length in enumerate(lengths):
        low = int(events.offsets[b])
        for got, source in ((out.ids["item"], events.ids["item"]), (out.times, events.times)):
            assert got[b, :length].tolist() == source[low : low + length].tolist()
            assert not got[b, length:].any()


@pytest.mark.parametrize("block", [4, 64, 100])
def test_block_attention(block):
    layout, leaves = Padded(events_of(LENGTHS)), [rows(sum(LENGTHS), seed) for seed in range(3)]
    q, k, v = (padded(layout, x) for x in leaves)
    got = layout.blocks(q, k, v, ROPE, block)[layout.real_BL]
    assert_agree(got, reference.block_attention(*leaves, offsets=OFFSETS, block=block, rope=ROPE), leaves)


@pytest.mark.parametrize("left", [0, 5, 64, 100, 129, 400])
def test_window_attention(left):
    """A sample of 330 events has three chunks and more: only from the third on does a chunk that is too short show."""
    lengths = [70, 0, 330, 1, 130]
    layout, leaves = Padded(events_of(lengths)), [rows(sum(lengths), seed) for seed in range(3)]
    q, k, v = (padded(layout, x) for x in leaves)
    rope, offsets = rope_tables(max(lengths), HEAD_DIM), torch.tensor([0, *lengths]).cumsum(0)
    got = layout.window(q, k, v, rope, left)[layout.real_BL]
    q, k = (torch.cat([reference.rotate(one, *rope) for one in x.split(lengths)]) for x in leaves[:2])
    assert_agree(got, reference.jagged_attention(q, k, leaves[2], offsets, causal=True, window=(left, 0)), leaves)


@pytest.mark.parametrize("activation", ["gelu_taylor", "silu"])
def test_cross_attention(activation):
    layout, keys = Padded(events_of(LENGTHS)), Padded(events_of(KEY_LENGTHS))
    leaves = [rows(sum(LENGTHS), 0), rows(sum(KEY_LENGTHS), 1), rows(sum(KEY_LENGTHS), 2)]
    q, k, v = padded(layout, leaves[0]), *(padded(keys, x) for x in leaves[1:])
    got = layout.cross(q, k, v, keys, activation, 0.3)[layout.real_BL]
    wanted = reference.gdpa(*leaves, q_offsets=OFFSETS, k_offsets=KEY_OFFSETS, activation=activation, qk_scale=0.3)
    assert_agree(got, wanted, leaves)


def test_pooling():
    layout, leaves = Padded(events_of(LENGTHS)), [rows(3, 0), *(rows(sum(LENGTHS), seed) for seed in (1, 2))]
    k, v = (padded(layout, x) for x in leaves[1:])
    got = layout.pooled(leaves[0], k, v, "gelu_taylor", 0.3)
    wanted = reference.gdpa(
        *leaves, q_offsets=None, k_offsets=OFFSETS, activation="gelu_taylor", qk_scale=0.3, broadcast_q=True
    )
    assert_agree(got.flatten(0, 1), wanted, leaves)


def models(**sizes) -> tuple[GemModel, GemModel]:
    """The packed model and the padded one, with the same parameters."""
    config = ModelConfig.model_validate(sizes)
    torch.manual_seed(0)
    packed = GemModel(small_schema(), config)
    with torch.no_grad():  # the gate starts at 0, which would hide what it does
        for layer in packed.tower:
            torch.nn.init.normal_(layer.gate.weight, std=0.2)  # type: ignore[union-attr,arg-type]
    out = GemModel(small_schema(), config, layout=Padded)
    out.load_state_dict(packed.state_dict())
    return packed, out


def grads_of(model: GemModel, samples: Samples) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model.losses(samples).mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "sizes", [{}, {"self_attention": "window", "window": 16}, {"keys": None}, {"pooled_keys": 0, "times": 0}]
)
def test_the_padded_model_is_the_packed_one(sizes):
    """Loss and the gradient of every parameter, to fp32 rounding."""
    packed, model = models(**sizes)
    samples = random_samples(LENGTHS, KEY_LENGTHS)
    loss, grads = grads_of(packed, samples)
    got_loss, got_grads = grads_of(model, pad(samples))
    torch.testing.assert_close(got_loss, loss, rtol=1e-6, atol=1e-6)
    assert grads.keys() == got_grads.keys()
    for name, grad in grads.items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(
            got_grads[name], grad, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_batches_padded_by_the_loader_and_in_the_step_are_the_same():
    _, model = models()
    samples = random_samples(LENGTHS, KEY_LENGTHS)
    with torch.no_grad():
        torch.testing.assert_close(model(pad(samples).to("cpu")), model(samples), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [{}, {"self_attention": "window", "window": 16}])
def test_what_stands_in_the_padding_does_not_matter(sizes):
    """Neither to a logit nor to a gradient, bit by bit."""
    _, model = models(**sizes)
    samples = random_samples(LENGTHS, KEY_LENGTHS)
    loss, grads = grads_of(model, pad(samples))
    grads = {name: grad.clone() for name, grad in grads.items()}
    other = pad(samples)
    for events in other.sequences.values():
        real = Padded(events).real_BL
        for ids in events.ids.values():
            ids[~real] = 4
    model.zero_grad()
    got_loss, got_grads = grads_of(model, other)
    assert got_loss == loss
    for name, grad in grads.items():
        assert torch.equal(got_grads[name], grad), name


@pytest.mark.parametrize("history, audience", [([0, 0], [0, 0]), ([0, 3], [0, 0]), ([512], [64])])
def test_batches_of_little(history, audience):
    packed, model = models()
    samples = random_samples(history, audience)
    with torch.no_grad():
        torch.testing.assert_close(model(pad(samples)), packed(samples), rtol=1e-5, atol=1e-5)


def test_more_events_than_the_schema_allows_are_refused():
    _, model = models()
    with pytest.raises(ValueError, match=r"room for 640 events, more than the rows of rope = 512"):
        model(pad(random_samples([600], [1])))
