"""The model: what a sample's logit may depend on, what each loss learns from, and FLOPs against torch's own count."""

import pytest
import torch
from model_data import Dense, random_samples, small_schema
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gem.data.samples import Events, Samples, merge
from gem.data.schema import Schema
from gem.errors import RequestError
from gem.model import GemModel, ModelConfig
from gem.model.config import PRESETS, preset
from gem.model.layout import Packed
from gem.model.work import TRAINING, Work
from gem.train import local
from gem.train.window import Window

HISTORY, AUDIENCE = [70, 0, 5, 130, 1, 64], [3, 9, 0, 1, 0, 20]


def model_of(seed: int = 0, **sizes) -> GemModel:
    torch.manual_seed(seed)
    model = GemModel(small_schema(), ModelConfig.model_validate(sizes))
    with torch.no_grad():  # the gate starts at 0, which would hide what it does
        for layer in model.tower:
            torch.nn.init.normal_(layer.gate.weight, std=0.2)  # type: ignore[union-attr,arg-type]
    return model


def changed(samples: Samples, sequence: str, feature: str, sample: int) -> Samples:
    """The samples with one sample's events of a feature replaced."""
    e = samples.sequences[sequence]
    ids = e.ids[feature].clone()
    low, high = (int(e.offsets[sample + i]) for i in (0, 1))
    ids[low:high] = (ids[low:high] + 1) % 5
    events = Events(e.offsets, e.ids | {feature: ids}, e.times)
    return Samples(samples.keys, samples.ids, samples.floats, samples.sequences | {sequence: events}, samples.labels)


@pytest.mark.parametrize(
    "sizes", [{}, {"self_attention": "window", "window": 16}, {"keys": None}, {"times": 0}, {"asking": False}]
)
def test_a_sample_stands_alone(sizes):
    """Its logits are the same in any company and any order."""
    model, samples = model_of(**sizes).double(), random_samples(HISTORY, AUDIENCE)
    samples = samples.apply(lambda x: x.double() if x.is_floating_point() else x)
    with torch.no_grad():
        together = model(samples)
        order = [4, 0, 5, 2, 1, 3]
        shuffled = model(merge([samples.take(i, i + 1) for i in order]))
    for task, logits in together.items():
        torch.testing.assert_close(shuffled[task], logits[order], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "sequence, feature, sample", [("history", "item", 0), ("history", "signal", 3), ("audience", "user", 5)]
)
def test_every_input_counts_for_its_sample_alone(sequence, feature, sample):
    model, samples = model_of(), random_samples(HISTORY, AUDIENCE)
    with torch.no_grad():
        before, after = model(samples)["ctr"], model(changed(samples, sequence, feature, sample))["ctr"]
    moved = (before - after).abs() > 1e-7
    assert moved.nonzero().flatten().tolist() == [sample]


@pytest.mark.parametrize("name", ["user", "item", "floats", "times"])
def test_non_sequence_features_and_times_count(name):
    model, samples = model_of(), random_samples(HISTORY, AUDIENCE)
    ids, floats, sequences = dict(samples.ids), samples.floats, dict(samples.sequences)
    if name == "floats":
        floats = floats + 1
    elif name == "times":
        e = sequences["history"]
        assert e.times is not None
        sequences["history"] = Events(e.offsets, e.ids, e.times // 1000)
    else:
        ids[name] = (ids[name] + 1) % 50
    with torch.no_grad():
        before = model(samples)["cvr"]
        after = model(Samples(samples.keys, ids, floats, sequences, samples.labels))["cvr"]
    several = torch.tensor(HISTORY) > 1 if name == "times" else torch.ones(6, dtype=torch.bool)
    assert bool(((before - after).abs() > 1e-7)[several].all())


def test_the_tower_is_told_of_the_features():
    """Features to sequences, the second direction: without the gate the first layer's summaries ignore the item."""
    model, samples = model_of(layers=1, asking=False), random_samples(HISTORY, AUDIENCE)
    other = Samples(
        samples.keys, samples.ids | {"item": (samples.ids["item"] + 7) % 100}, samples.floats, samples.sequences,
        samples.labels,
    )  # fmt: skip
    summaries: list[Tensor] = []
    model.tower[0].register_forward_hook(lambda module, inputs, output: summaries.append(output[1].detach()))
    with torch.no_grad():
        for one in (samples, other):
            model(one)
        torch.nn.init.zeros_(model.tower[0].gate.weight)  # type: ignore[union-attr,arg-type]
        for one in (samples, other):
            model(one)
    assert not torch.equal(summaries[0][0], summaries[1][0])
    assert torch.equal(summaries[2], summaries[3])


def test_losses_are_of_defined_labels_alone():
    model, samples = model_of(), random_samples(HISTORY, AUDIENCE)
    found = model.losses(samples)
    for task, label in samples.labels.items():
        defined = ~label.isnan()
        p = found.logits[task][defined].double().sigmoid()
        by_hand = -(label[defined] * p.log() + (1 - label[defined]) * (1 - p).log()).sum()
        torch.testing.assert_close(found.sums[task].double(), by_hand.double(), rtol=1e-5, atol=1e-5)
        assert int(found.counts[task]) == int(defined.sum())
    # A sample that was not clicked must not move the CVR head.
    found.sums["cvr"].backward()
    gradient = model.heads["of_cvr"].layers[0].weight.grad.clone()  # type: ignore[union-attr,index]
    clicked = [i for i in range(6) if samples.labels["ctr"][i] == 1]
    model.zero_grad()
    model.losses(merge([samples.take(i, i + 1) for i in clicked])).sums["cvr"].backward()
    torch.testing.assert_close(model.heads["of_cvr"].layers[0].weight.grad, gradient, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr,index]


def test_no_label_at_all_is_no_nan():
    model, samples = model_of(), random_samples(HISTORY, AUDIENCE)
    labels = {"ctr": torch.zeros(6), "cvr": torch.full((6,), torch.nan)}
    loss = model.losses(Samples(samples.keys, samples.ids, samples.floats, samples.sequences, labels)).mean()
    loss.backward()
    assert bool(loss.isfinite())
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_every_parameter_learns():
    model, samples = model_of(), random_samples(HISTORY, AUDIENCE)
    model.losses(samples).mean().backward()
    still = [n for n, p in model.named_parameters() if p.grad is None or not bool((p.grad != 0).any())]
    assert still == []


def test_empty_histories_and_audiences():
    model, samples = model_of(), random_samples([0, 0], [0, 0])
    loss = model.losses(samples).mean()
    loss.backward()
    assert bool(loss.isfinite())


def test_sums_over_events_in_the_backward_of_spread():
    layout = Packed(random_samples(HISTORY, AUDIENCE).sequences["history"])
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layout.spread, (x,))
    rows = torch.randn(270, 3).bfloat16()  # summed in fp32: 270 values in bf16 would stop growing
    y = torch.zeros(6, 3, dtype=torch.bfloat16, requires_grad=True)
    layout.spread(y).backward(rows)
    assert y.grad is not None
    torch.testing.assert_close(y.grad[3].double(), rows[75:205].double().sum(0), rtol=8e-3, atol=1e-2)


def test_names_that_dicts_of_modules_have_for_themselves():
    """keys, items and the like are methods of torch's dicts, and are plausible names of tables and tasks."""
    text = small_schema().model_dump_json()
    for name, other in {"item": "items", "user": "keys", "cvr": "pop", "audience": "values"}.items():
        text = text.replace(f'"{name}"', f'"{other}"')
    schema = Schema.model_validate_json(text)
    model = GemModel(schema, ModelConfig(keys="values"))
    samples = random_samples(HISTORY, AUDIENCE)
    history, audience = samples.sequences["history"], samples.sequences["audience"]
    renamed = Samples(
        samples.keys, {"keys": samples.ids["user"], "items": samples.ids["item"]}, samples.floats,
        {
            "history": Events(
                history.offsets, {"items": history.ids["item"], "signal": history.ids["signal"]}, history.times
            ),
            "values": Events(audience.offsets, {"keys": audience.ids["user"]}),
        },
        {"ctr": samples.labels["ctr"], "pop": samples.labels["cvr"]},
    )  # fmt: skip
    assert set(model(renamed)) == {"ctr", "pop"}
    assert {"events.values", "head.pop"} <= set(model.parts())


def test_presets_and_names():
    for name in PRESETS:
        assert preset(name).layers >= 1
    with pytest.raises(RequestError, match="accepted: tiny, small"):
        preset("huge")
    with pytest.raises(RequestError, match="the data has history, audience"):
        GemModel(small_schema(), ModelConfig(history="clicks"))


# -- FLOPs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"block": 16},
        {"block": 16, "asking": False},
        {"block": 16, "layers": 1, "heads": 3, "head_dim": 16, "feed_forward": 0.0, "pooled_keys": 0},
        {"history": None, "keys": None, "interactions": ["cross", "products"], "experts": 3},
    ],
)
def test_flops_are_those_that_torch_counts_on_dense_input(sizes):
    schema = small_schema()
    model = GemModel(schema, ModelConfig.model_validate(sizes), layout=Dense)
    samples = random_samples([64] * 4, [8] * 4)
    # The math backend's products are counted; a fused kernel on a CPU would not be.
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), counter:
        model(samples)
    assert model.flops(Work.of(samples)) == counter.get_total_flops()


@pytest.mark.parametrize("sizes", [{"block": 16}, {"block": 16, "layers": 1, "experts": 3}])
def test_training_takes_as_many_flops_as_torch_counts_forward_and_backward(sizes):
    """But for gradients of what nothing comes before: events of a table, which a lookup gives."""
    model = GemModel(small_schema(), ModelConfig.model_validate(sizes), layout=Dense)
    samples = random_samples([64] * 4, [8] * 4)
    counter = FlopCounterMode(display=False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), counter:
        model.losses(samples).mean().backward()
    counted = counter.get_total_flops()
    assert TRAINING * model.flops(Work.of(samples)) == pytest.approx(counted, rel=2e-3)
    window = Window(["ctr", "cvr"], model, torch.device("cpu"))
    window.begin(samples)
    window.begin(samples)
    assert window.flops == pytest.approx(2 * counted, rel=2e-3) and window.samples == 2 * len(samples)


@pytest.mark.parametrize("window", [0, 3, 64, None])
def test_pairs_of_a_window_are_those_that_it_shows(window):
    samples = random_samples(HISTORY, AUDIENCE)
    seen = sum(
        window is None or i - j <= window for length in HISTORY for i in range(length) for j in range(i + 1)
    )  # fmt: skip
    assert Work.of(samples).self_pairs("history", None, window) == seen
    model = model_of(self_attention="window", window=window or 1, layers=1)
    other = model_of(self_attention="window", window=(window or 1) + 7, layers=1)
    assert (model.flops(Work.of(samples)) < other.flops(Work.of(samples))) is ((window or 1) < max(HISTORY))


def test_the_peak_is_what_a_product_takes(monkeypatch):
    """With a clock that goes by FLOPs, a tera of them a second."""

    def seconds(run, clear, device, repeats):
        counter = FlopCounterMode(display=False)
        with counter:
            run()
        return counter.get_total_flops() / 1e12

    monkeypatch.setattr(local, "_median_seconds", seconds)
    assert local.measure_peak(torch.device("cpu"), "fp32") == pytest.approx(1e12)


def test_flops_add_up_over_samples_and_ignore_padding():
    model = model_of()
    samples = random_samples(HISTORY, AUDIENCE)
    alone = sum(model.flops(Work.of(samples.take(i, i + 1))) for i in range(6))
    assert model.flops(Work.of(samples)) == pytest.approx(alone, rel=1e-12)
