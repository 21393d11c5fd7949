"""Building samples, read plainly: the rules one sample at a time, without numpy, for the tests to compare with."""

import math
from typing import Any

import numpy as np

from gem.data.build import BuildConfig, Interactions, build_samples

Row = tuple[str, str, int, float]  # user, item, time, rating


def log_of(rows: list[Row]) -> Interactions:
    users, items, times, ratings = zip(*rows, strict=True)
    return Interactions.of(users, items, times, {"rating": np.array(ratings)})


def plain_samples(config: BuildConfig, log: Interactions) -> list[dict[str, Any]]:
    """All samples of `config` on `log`, in order of time, as plain values."""
    _, batches, _ = build_samples(log, config=config)
    found = []
    for batch in batches:
        assert len(batch) <= config.batch
        for i in range(len(batch)):
            history, audience = batch.sequences["history"], batch.sequences["audience"]
            h, a = (slice(int(e.offsets[i]), int(e.offsets[i + 1])) for e in (history, audience))
            assert history.times is not None
            found.append(
                dict(
                    key=int(batch.keys[i]),
                    user=int(batch.ids["user"][i]),
                    item=int(batch.ids["item"][i]),
                    floats=batch.floats[i].tolist(),
                    history=[x[h].tolist() for x in (history.ids["item"], history.ids["signal"], history.times)],
                    audience=[x[a].tolist() for x in (audience.ids["user"], audience.ids["signal"])],
                    labels={name: None if x[i].isnan() else float(x[i]) for name, x in batch.labels.items()},
                )
            )
    return found


class Oracle:
    """The rules, read plainly: quadratic, one sample at a time, without numpy."""

    def __init__(self, rows: list[Row], config: BuildConfig) -> None:
        self.config = config
        seen, kept = set(), []
        for key, row in enumerate(rows):
            if row not in seen or config.duplicates == "keep":
                kept.append((key, *row))
            seen.add(row)
        self.repeats = len(rows) - len(seen)
        self.rows = sorted(kept, key=lambda row: row[3])  # Python's sort is stable
        n = len(self.rows)
        starts = []
        for share in (config.split[0], config.split[0] + config.split[1]):
            k = round(share * n)
            starts.append(self.rows[k][3] if k < n else math.inf)
        self.part = ["train" if r[3] < starts[0] else "valid" if r[3] < starts[1] else "test" for r in self.rows]
        self.ids: list[dict[str, int]] = [{}, {}]
        for row, part in zip(self.rows, self.part, strict=True):
            for known, value in zip(self.ids, row[1:3], strict=True):
                if part == "train" and value not in known:
                    known[value] = len(known) + 1

    def signal(self, rating: float) -> int:
        return sum(rating >= edge for edge in (2, 3, 4, 5))

    def sample(self, at: int) -> dict[str, Any]:
        key, user, item, time, rating = self.rows[at]
        mine = [r for r in self.rows if r[1] == user and r[3] < time]
        theirs = [r for r in self.rows if r[2] == item and r[3] < time]
        users, items = self.ids
        history, audience = mine[-self.config.history :], theirs[-self.config.audience :]
        ctr = float(rating >= 4)
        hour = time % 86400 / 86400 * 2 * math.pi
        return dict(
            key=key,
            user=users.get(user, 0),
            item=items.get(item, 0),
            floats=[
                *(math.log1p(time - past[-1][3]) if past else 0 for past in (mine, theirs)),
                math.sin(hour),
                math.cos(hour),
            ],
            history=[
                [items.get(r[2], 0) for r in history], [self.signal(r[4]) for r in history], [r[3] for r in history],
            ],
            audience=[[users.get(r[1], 0) for r in audience], [self.signal(r[4]) for r in audience]],
            labels=dict(ctr=ctr, cvr=float(rating >= 5) if ctr else None),
        )  # fmt: skip

    def cut(self, column: int, longest: int) -> int:
        past = [sum(r[column] == row[column] and r[3] < row[3] for r in self.rows) for row in self.rows]
        return sum(max(0, n - longest) for n in past)
