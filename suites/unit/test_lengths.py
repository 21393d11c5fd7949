"""Length profiles: exact by seed, laws of the distributions, and clear refusals."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from gem.data.batch import choose
from gem.data.distributions import Lognormal, Sparsity, Uniform, UserCorrelated
from gem.data.lengths import Lengths, Profile, list_profiles, load_profile, with_history
from gem.errors import RequestError

# Published with the H200 figures that were measured on these shapes: (batch, query rows, key rows).
PUBLISHED = {
    "self_long": (32, 67_886, 67_886),
    "self_window256": (32, 67_886, 67_886),
    "cross_short_kv": (1024, 852_486, 135_658),
    "pma_q32": (1024, 32 * 1024, 1_441_025),
    "pma_q64": (1024, 64 * 1024, 1_441_025),
    "dense_4k": (16, 65_536, 65_536),
}

# sha256 (first 16 digits) of q and k as little-endian int64: a fixture that changes makes old results incomparable.
DRAWN = {
    "all_empty": "10cc3c382b13ad92",
    "all_k_empty": "01d769a783f28203",
    "all_q_empty": "fd5b9f4fdee6dd92",
    "batch_0": "96a296d224f285c6",
    "batch_0_cross": "96a296d224f285c6",
    "block_s070": "cc9ceb4771ef1afa",
    "cpu_cross_short_kv": "4c6f40d289399610",
    "cpu_dense_512": "e09554a2b1629fc2",
    "cpu_pma_q32": "5a35e98f580a8a83",
    "cpu_pma_q64": "5261b8370513299e",
    "cpu_self_longtail": "7603a5c826f38490",
    "cpu_self_s050": "efcc0f9be7f0ec46",
    "cpu_self_short": "67900f45bb174acb",
    "cpu_self_window64": "7603a5c826f38490",
    "cpu_user_correlated": "e9bb3eb4bd75118d",
    "cross_short_kv": "1d49b134c825d6b9",
    "dense_4k": "b353072cdc09dbc3",
    "empty_middle": "339108ab2c52ba7e",
    "giant_among_empties": "5578c710b9c8f837",
    "k_empty_q_present": "eade9e32d2b6c87c",
    "longtail": "8ab94e419b7f8480",
    "more_q_than_k": "4e56a1b84a5306ed",
    "one_long": "6527b3df54f4f73a",
    "past_2_31": "7166fedc1172adc6",
    "pma_empty_histories": "640ba15b37ac8edb",
    "pma_q32": "3ac046bd48280862",
    "pma_q64": "0f3b06e30be05f03",
    "q_empty_k_present": "34c5ee921b71ab39",
    "rows_after_last_offset": "0c9b4f2877615022",
    "rows_after_last_offset_cross": "a7814ff45f39cc45",
    "self_long": "be9acfece80c6772",
    "self_window256": "be9acfece80c6772",
    "single_token": "18a8d5f570046950",
    "uniform_s050": "f4554fea181b0d1c",
    "uniform_s050_kv256": "5c169fd2eb40b08f",
    "uniform_s070": "11c7823fe655ca13",
    "uniform_s070_kv256": "7e368f2f32e180f2",
    "uniform_s100": "ecfb162448d9e62a",
    "uniform_s100_kv256": "17aafb5608d1da6c",
    "user_correlated": "07aeb9ae16b9caa7",
}


def digest(lengths: Lengths) -> str:
    data = lengths.q.astype("<i8").tobytes() + lengths.k.astype("<i8").tobytes()
    return hashlib.sha256(data + bytes([lengths.tail_q, lengths.tail_k])).hexdigest()[:16]


def write(directory, text: str, name: str = "mine.toml"):
    path = directory / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name):
    lengths = load_profile(name).draw()
    assert (lengths.batch, lengths.tokens_q, lengths.tokens_k) == PUBLISHED[name]


def test_shipped_profiles_draw_the_same_lengths_for_ever():
    assert {name: digest(load_profile(name).draw()) for name in list_profiles()} == DRAWN


def test_drawing_ignores_torch_defaults():
    before = digest(load_profile("cpu_user_correlated").draw())
    torch.manual_seed(99)
    torch.set_default_dtype(torch.float64)
    try:
        assert digest(load_profile("cpu_user_correlated").draw()) == before
    finally:
        torch.set_default_dtype(torch.float32)


def test_listing_and_loading_import_no_torch():
    load = "from gem.data.lengths import *; [load_profile(n) for n in list_profiles()]"
    code = f"import sys; {load}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", [n for n in list_profiles() if n.startswith("cpu_")])
def test_cpu_profiles_cost_tens_of_milliseconds(name):
    lengths = load_profile(name).draw()
    flops = 4 * 4 * 64 * int((lengths.q * lengths.k).sum())  # 4 H D pairs at H 4, D 64
    assert 0.010 < flops / 150e9 < 0.100  # seconds at the 150 GFLOP/s of two cores


# ---- laws of the distributions


@pytest.mark.parametrize("sparsity", [0.2, 0.5, 0.7, 1.0])
def test_sparsity_is_the_mean_filled_share(sparsity):
    lengths = Sparsity(kind="sparsity", max=1000, sparsity=sparsity, seed=1).draw(20_000)
    # Uniform in [low, high): standard error of the mean is below 289 / sqrt(20000) = 2.04; the exclusive end costs 0.5.
    assert abs(lengths.mean() - 1000 * sparsity) < 10
    low = {0.2: 0, 0.5: 0, 0.7: 399, 1.0: 1000}[sparsity]  # int((2 * 0.7 - 1) * 1000) is 399 in floating point
    assert lengths.min() >= low and lengths.min() < low + 5
    assert lengths.max() == {0.2: 399, 0.5: 999, 0.7: 999, 1.0: 1000}[sparsity]


def test_sparsity_zero_is_empty():
    assert Sparsity(kind="sparsity", max=10, sparsity=0.0, seed=1).draw(3).tolist() == [0, 0, 0]


def test_uniform_includes_both_ends():
    assert set(Uniform(kind="uniform", min=16, max=25, seed=3).draw(2000)) == set(range(16, 26))


def test_lognormal_has_its_median_and_sigma_and_clamps():
    lengths = Lognormal(kind="lognormal", median=5000, sigma=0.7, min=4000, max=10**9, seed=3).draw(50_000)
    assert lengths.min() == 4000
    wide = Lognormal(kind="lognormal", median=5000, sigma=0.7, min=1, max=10**9, seed=3).draw(50_000)
    assert np.array_equal(np.maximum(wide, 4000), lengths)
    logs = np.log(wide)
    assert abs(logs.mean() - np.log(5000)) < 0.02  # 6 standard errors of 0.7 / sqrt(50000)
    assert abs(logs.std() - 0.7) < 0.02


def test_user_correlated_has_the_stated_intra_class_correlation():
    distribution = UserCorrelated(
        kind="user_correlated", group=32, median=10_000, sigma_between=0.9, sigma_within=0.4, min=1, max=10**9, seed=5
    )
    logs = np.log(distribution.draw(32 * 2000)).reshape(2000, 32)
    # One-way random-effects estimate of the intra-class correlation (Fisher): from mean squares between and within.
    between = 32 * logs.mean(axis=1).var(ddof=1)
    within = logs.var(axis=1, ddof=1).mean()
    estimate = (between - within) / (between + 31 * within)
    assert distribution.correlation == pytest.approx(0.81 / 0.97)
    assert abs(estimate - distribution.correlation) < 0.02
    assert "correlation 0.84" in distribution.describe()


def test_user_correlated_last_group_may_be_short():
    distribution = load_profile("cpu_user_correlated").q
    assert distribution is not None
    assert distribution.draw(17).shape == (17,)
    assert distribution.draw(0).shape == (0,)


# ---- drawing fewer, more, and real histories


def test_draw_fewer_takes_declared_samples_in_order():
    profile = load_profile("cross_short_kv")
    whole, part = profile.draw(), profile.draw(100)
    index = choose(1024, 100)
    assert (np.diff(index) > 0).all()
    assert np.array_equal(part.q, whole.q[index]) and np.array_equal(part.k, whole.k[index])
    assert np.array_equal(profile.draw(100).q, part.q)
    assert not np.array_equal(profile.draw(100, seed=1).q, part.q)
    assert "100 of 1024" in part.source and "\n" not in part.source


def test_choose_is_a_frozen_stream():
    assert choose(10, 4, seed=0).tolist() == [2, 4, 8, 9]  # RandomState(0).permutation(10) = [2 8 4 9 1 6 7 3 0 5]


def test_draw_more_draws_anew_and_explicit_lengths_repeat():
    assert load_profile("self_long").draw(64).batch == 64
    assert load_profile("empty_middle").draw(7).q.tolist() == [0, 151, 0, 105, 0, 0, 151]
    assert load_profile("batch_0").draw(2).q.tolist() == [0, 0]


@pytest.mark.parametrize("batch", [-1, 2.5, True, "8"])
def test_draw_refuses_a_bad_batch(batch):
    with pytest.raises(RequestError, match=r"batch .*accepted: a whole number"):
        load_profile("self_long").draw(batch)


def test_with_history_replaces_the_history_side():
    real = [5, 0, 700]
    self_ = with_history(load_profile("self_long"), real, "mine", "mine.csv")
    assert self_.q.tolist() == self_.k.tolist() == real and self_.name == "mine"
    cross = with_history(load_profile("cross_short_kv"), real, "mine", "mine.csv")
    assert cross.q.tolist() == real and cross.k.min() >= 16 and cross.k.max() <= 256 and cross.batch == 3
    pma = with_history(load_profile("pma_q64"), real, "mine", "mine.csv")
    assert pma.k.tolist() == real and pma.q.tolist() == [64, 64, 64] and pma.queries == 64
    assert np.array_equal(pma.history, real) and np.array_equal(cross.history, real)
    tail = with_history(load_profile("rows_after_last_offset"), real, "mine", "mine.csv")
    assert (tail.tail_q, tail.tail_k) == (37, 37)
    assert "mine.csv" in tail.source and "rows_after_last_offset" in tail.source
    with pytest.raises(RequestError, match="mine: -1 at sample 1"):
        with_history(load_profile("self_long"), [4, -1], "mine", "mine.csv")


# ---- the lengths themselves


def test_offsets_and_stats():
    lengths = Lengths("x", np.array([3, 0, 5, 8]), np.array([1, 1, 0, 2]), "cross", source="here")
    assert lengths.offsets_q().tolist() == [0, 3, 3, 8, 16] and lengths.offsets_q().dtype == np.int64
    assert lengths.offsets_k().tolist() == [0, 1, 2, 2, 4]
    assert (lengths.batch, lengths.tokens_q, lengths.tokens_k, lengths.max_q, lengths.max_k) == (4, 16, 4, 8, 2)
    assert lengths.sparsity == 0.5
    q = lengths.stats()["q"]
    assert (q["total"], q["mean"], q["p50"], q["p90"], q["max"]) == (16, 4.0, 3, 8, 8)
    assert q["histogram"] == {"edges": [0, 1, 2, 4, 8, 16], "counts": [1, 0, 1, 1, 1]}
    with pytest.raises(ValueError, match="read-only"):
        lengths.q[0] = 1


@pytest.mark.parametrize("name", list_profiles())
def test_histogram_counts_every_sample(name):
    lengths = load_profile(name).draw()
    for side in ("q", "k"):
        assert sum(lengths.stats()[side]["histogram"]["counts"]) == lengths.batch


@pytest.mark.parametrize(
    ("q", "k", "pattern", "queries", "message"),
    [
        ([1, 2], [1], "cross", None, "2 q lengths and 1 k lengths"),
        ([1, 2], [1, 3], "self", None, "q and k differ"),
        ([1, 2], [1, 3], "pma", 1, "queries 1"),
        ([1], [1], "self", 1, "only for pattern pma"),
        ([-1], [1], "cross", None, "q: -1 at sample 0"),
        ([1.5], [1], "cross", None, "q: dtype float64"),
        ([[1]], [1], "cross", None, "q: shape"),
        ([1], [1], "both", None, "pattern 'both'"),
    ],
)
def test_lengths_refuse_what_is_no_batch(q, k, pattern, queries, message):
    with pytest.raises(RequestError, match=message):
        Lengths("x", q, k, pattern, queries)


# ---- broken profiles: one line with file, field, value, accepted

GOOD = 'description = "d"\npattern = "self"\nbatch = 4\n[q]\nkind = "uniform"\nmin = 1\nmax = 8\nseed = 0\n'


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("batch = 4", "batch = -1", ["batch = -1", "accepted"]),
        ("batch = 4", 'batch = "4"', ["batch = '4'", "valid integer"]),
        ("batch = 4", "batch = true", ["batch = True", "valid integer"]),
        ("batch = 4", "", ["batch is missing"]),
        ("batch = 4", "batch = 4\nbatches = 5", ["unknown field batches = 5", "tail_q"]),
        ('pattern = "self"', 'pattern = "selfish"', ["pattern = 'selfish'", "'cross'", "'pma'"]),
        ('pattern = "self"', 'pattern = "cross"', ["[k] is missing", "[q] and [k]"]),
        ('pattern = "self"', 'pattern = "pma"', ["[q] is given", "pma"]),
        ('pattern = "self"', "", ["field pattern is missing"]),
        ("seed = 0", "seed = 0.5", ["q.seed = 0.5", "valid integer"]),
        ("seed = 0", "seed = 0\nmean = 3", ["unknown field q.mean = 3", "accepted fields: min, max, kind, seed"]),
        ("min = 1", 'min = "1"', ["q.min = '1'", "valid integer"]),
        ("seed = 0", "sed = 0", ["accepted fields: min, max, kind, seed"]),
        ("min = 1", "min = 9", ["q: min 9 is above max 8"]),
        ("min = 1", "min = -3", ["q.min = -3", "greater than or equal to 0"]),
        ('kind = "uniform"', 'kind = "unifrom"', ["q.kind = 'unifrom'", "lognormal", "user_correlated"]),
        ('kind = "uniform"', "", ["q.kind is missing"]),
        ("[q]", "[q", [":4:", "not TOML"]),
        ('description = "d"', 'description = "d"\nname = "other"', ["name = 'other'", "'mine'"]),
        ('description = "d"', 'description = "d"\ntail_q = 3', ["tail_q 3 and tail_k 0 differ"]),
        ('description = "d"', 'description = "d"\nqueries = 3', ["queries belongs to pattern pma"]),
    ],
)
def test_broken_profile(tmp_path, old, new, parts):
    assert load_profile(write(tmp_path, GOOD)).draw().batch == 4
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(RequestError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    for part in parts:
        assert part in message


def test_explicit_lengths_must_be_as_many_as_the_batch(tmp_path):
    sides = '[q]\nkind = "explicit"\nvalues = [1, 2]\n[k]\nkind = "explicit"\nvalues = [1]\n'
    text = f'description = "d"\npattern = "cross"\n{sides}'
    with pytest.raises(RequestError, match=r"\[k\] has 1 explicit lengths, the batch 2"):
        load_profile(write(tmp_path, text))


def test_profile_that_is_not_there(tmp_path):
    with pytest.raises(RequestError, match="'self_lon' does not exist; accepted: self_long"):
        load_profile("self_lon")
    with pytest.raises(RequestError, match=r"no\.toml: No such file"):
        load_profile(tmp_path / "no.toml")
    with pytest.raises(RequestError, match="Is a directory"):
        load_profile(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'a = 1\nb = "\xe9"\n')
    with pytest.raises(RequestError, match=r"latin\.toml:2: byte 0xe9 is not UTF-8"):
        load_profile(tmp_path / "latin.toml")


def test_profile_is_a_declaration():
    assert isinstance(load_profile("longtail"), Profile)
    assert {"q_empty_k_present", "k_empty_q_present", "batch_0", "all_empty", "giant_among_empties"} <= set(
        list_profiles()
    )
