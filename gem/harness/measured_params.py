"""The parameters of measured subjects, which are no op: load balance of readers, whole training runs. No torch."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from gem.harness import names
from gem.harness.params import Finite, Params, as_tuple
from gem.harness.sharding_params import ShardingParams

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
BalanceStrategy = Literal["none", "random", "bbs", "lpt", "samples", "budget", "global"]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class RaceParams(Params):
    """What every race takes: its contestants agree on losses first, then each runs at its own best batch size.

    Losses of `check_steps` batches of `check_batch` samples must be within `tolerance` of the project's own, relative.
    `batches`: sizes to try, ascending, until memory ends the search. A turn is `turn_steps` training steps.
    """

    batches: Annotated[tuple[Count, ...], BeforeValidator(as_tuple), Field(min_length=1)]
    check_batch: Count = 32
    check_steps: Count = 3
    tolerance: Annotated[Finite, Field(gt=0)] = 1e-3
    turn_steps: Count = 4
    seed: int = 0

    @model_validator(mode="after")
    def _ascending(self) -> "RaceParams":
        if list(self.batches) != sorted(set(self.batches)):
            raise ValueError(f"batches = {list(self.batches)}; accepted: sizes in ascending order, each once")
        return self


class E2eParams(RaceParams):
    """Training end to end (gem.train) beside the padded model, on synthetic samples without end.

    Every contestant's optimizer step is of the same `step_samples` samples, in pieces of the size of `batches` that is
    best for it, whose gradients are accumulated. `pieces` "samples": so many samples to a piece; "rows": so many times
    1,024 rows of histories, padding included. Padded contestants' pieces are of samples of like length. `model` and
    `data` are laid over the preset's sizes and the synthetic data's, as `gem train` takes them. `compile` names the
    contestants whose model torch.compile gets. Figures of a step are of `row_steps` in a row. `stage` is ZeRO's.
    """

    step_samples: Count = 1024
    pieces: Literal["samples", "rows"] = "samples"
    preset: str = "tiny"
    model: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
    lr: Annotated[Finite, Field(gt=0)] = 1e-4
    stage: Literal[0, 1, 2, 3] = 2
    workers: Annotated[int, Field(ge=0)] = 0
    row_steps: Count = 16

    @model_validator(mode="after")
    def _parts_agree(self) -> "E2eParams":
        odd = sorted(set(self.compile) - set(MEASURED["e2e"].racers))
        if odd:
            raise ValueError(f"compile: {odd[0]!r}; accepted: {', '.join(MEASURED['e2e'].racers)}")
        if self.pieces == "samples" and self.batches[-1] > self.step_samples:
            raise ValueError(f"batches of {self.batches[-1]}; accepted: up to step_samples = {self.step_samples}")
        return self


class ShardedTablesParams(RaceParams):
    """Embedding tables over `ranks` processes (gloo, CPU): V1 of gem.sharding beside TorchRec.

    A table of each of `rows`, `dim` columns wide, all `cut` alike. A sample has 0 to 2 `bag` ids of each, drawn as even
    numbers to the power of `skew`: from 1 on the larger, the fewer rows are asked for the more often. `batches`:
    samples of a rank and step.
    """

    ranks: Count = 2
    rows: Annotated[tuple[Count, ...], BeforeValidator(as_tuple), Field(min_length=1)] = (10_000,)
    dim: Count = 64
    cut: Literal["table", "row", "column"] = "row"
    bag: Count = 8
    skew: Annotated[Finite, Field(ge=1, le=16)] = 2.0
    lr: Annotated[Finite, Field(gt=0)] = 0.05


class ShardedDenseParams(RaceParams):
    """The model over `ranks` processes (gloo, CPU): FSDP of gem.sharding beside DeepSpeed's ZeRO-3.

    `model` and `data` are laid over the preset's sizes and the synthetic data's, as `gem train` takes them. Tables
    rest; with few rows they cost little beside the dense part, to which DeepSpeed counts them. `batches`: samples of a
    rank and step.
    """

    ranks: Count = 2
    preset: str = "tiny"
    model: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    lr: Annotated[Finite, Field(gt=0)] = 1e-3


class BbsParams(Params):
    """How evenly readers load the ranks (gem.data.balance), or how fast one merges samples (gem.data.reader_speed).

    Lengths are lognormal around `median`; `correlation` is that of their logarithms inside a base batch: 0 = drawn
    apart, near 1 = one user's samples together. `cost` is what the strategy balances, `judged` (None: the same) what is
    measured.
    """

    measure: Literal["balance", "merge_rate"] = "balance"
    strategy: BalanceStrategy = "bbs"
    median: Annotated[Finite, Field(ge=1)] = 700.0
    batch: Count = 1024  # samples of a rank and step
    base: Count = 128
    pool: Count = 64  # base batches
    seed: Annotated[int, Field(ge=0)] = 0
    # of balance alone
    correlation: Share = 0.0
    cost: Literal["tokens", "pairs"] = "tokens"
    judged: Literal["tokens", "pairs"] | None = None
    ranks: Count = 64
    steps: Count = 16

    @model_validator(mode="after")
    def _parts_agree(self) -> "BbsParams":
        if self.batch % self.base or self.pool % (self.batch // self.base):
            raise ValueError(
                f"batch = {self.batch}, base = {self.base}, pool = {self.pool}; accepted: whole base batches in a "
                "batch, whole batches in a pool"
            )
        if self.measure == "merge_rate":
            told = sorted(self.model_fields_set & {"correlation", "cost", "judged", "ranks", "steps"})
            if told or self.strategy == "global":
                what = told[0] if told else 'strategy = "global"'
                raise ValueError(f'{what} with measure = "merge_rate"; accepted: what one reader knows of')
        return self


class QualityParams(Params):
    """A training run (gem.train) on synthetic data whose lowest possible NE is known, judged on other samples of it.

    `model` and `data` are laid over the preset's sizes and the synthetic data's, as `gem train` takes them; they are
    checked when the case runs. `task` is the one that the metrics are of.
    """

    task: Literal["ctr", "cvr"] = "ctr"
    preset: str = "tiny"
    model: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    steps: Count = 300
    batch: Count = 256
    lr: Annotated[Finite, Field(gt=0)] = 3e-3
    table_lr: Annotated[Finite, Field(gt=0)] = 0.05
    warmup: Annotated[int, Field(ge=0)] = 40
    precision: Literal["fp32", "bf16"] = "fp32"
    valid_samples: Count = 16_384
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _said_once(self) -> "QualityParams":
        for table, names_of in (("model", {"preset"}), ("data", {"samples"})):
            told = sorted(set(getattr(self, table)) & names_of)
            if told:
                raise ValueError(f"{table}.{told[0]}: it follows from the other params; accepted: sizes")
        return self


class ContentionParams(Params):
    """Work on one GPU, alone and beside copies: by a kernel that holds SMs, and by the copy engine, all in turns.

    `sms`: numbers of SMs held, each copying its part of `gbps` GB/s (what NVLink carries), 0 = held by nobody, which
    shows the noise. `idle`: held and copying nothing. `engine`: also copies by the copy engine, of `gbps` too;
    `unpaced`: and as fast as it goes, which within one GPU is some four times what NVLink carries.
    `gemm` is a product of [M, K] and [K, N], `gdpa` the forward on a fixture's lengths. A turn is `turn_ms` of calls,
    back to back.
    """

    work: Literal["gemm", "gdpa"] = "gemm"
    shape: Annotated[tuple[Count, Count, Count], BeforeValidator(as_tuple)] = (8192, 8192, 8192)  # M, N, K
    fixture: str = "self_long"
    impl: Literal["torch", "triton", "gluon"] = "triton"
    heads: Count = 8
    head_dim: Count = 128
    sms: Annotated[tuple[NotNegative, ...], BeforeValidator(as_tuple), Field(min_length=1)] = (0, 1, 8, 24)
    idle: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = ()
    engine: bool = True
    unpaced: bool = False
    gbps: Annotated[Finite, Field(gt=0)] = 240.0
    turn_ms: Annotated[Finite, Field(gt=0, le=100)] = 10.0
    budget_s: Annotated[Finite, Field(gt=0)] = 3.0
    rounds: Count = 40  # at most
    seed: int = 0

    @model_validator(mode="after")
    def _each_once(self) -> "ContentionParams":
        for name in ("sms", "idle"):
            given = getattr(self, name)
            if list(given) != sorted(set(given)):
                raise ValueError(f"{name} = {list(given)}; accepted: numbers of SMs in ascending order, each once")
        return self


# ---- which code measures what


@dataclass(frozen=True)
class MeasuredSubject:
    """A subject that is no op: its parameters, the kinds of suites it belongs to, and the code (``module:attribute``).

    `target` is a Measured, or None where the subject is a race; then `racers` are the project's own contestants and
    its peers, by name.
    """

    params: type[Params]
    kinds: tuple[str, ...]
    target: str | None = None
    racers: dict[str, str] = field(default_factory=dict)

    @property
    def own(self) -> tuple[str, ...]:
        """The contestants of a race that are the project's own."""
        return tuple(name for name in self.racers if name not in names.PEERS)


MEASURED: dict[str, MeasuredSubject] = {
    "e2e": MeasuredSubject(
        E2eParams,
        ("throughput",),
        racers={
            "gem": "gem.harness.subject_e2e:Gem",
            "torch_padded": "gem.harness.subject_e2e:TorchPadded",
            "deepspeed_padded": "gem.harness.subject_e2e:DeepSpeedPadded",
        },
    ),
    "bbs": MeasuredSubject(BbsParams, ("scaling",), "gem.harness.subject_bbs:Bbs"),
    "sharded_tables": MeasuredSubject(
        ShardedTablesParams,
        ("throughput",),
        racers={
            "gem": "gem.harness.subject_sharded:TablesRacer",
            "torchrec": "gem.harness.subject_sharded:TorchRecRacer",
        },
    ),
    "sharded_dense": MeasuredSubject(
        ShardedDenseParams,
        ("throughput",),
        racers={"gem": "gem.harness.subject_sharded:DenseRacer", "zero3": "gem.harness.subject_sharded:Zero3Racer"},
    ),
    "sharding": MeasuredSubject(ShardingParams, ("scaling",), "gem.harness.subject_sharding:Sharding"),
    "contention": MeasuredSubject(ContentionParams, ("scaling",), "gem.harness.subject_contention:Contention"),
    "quality": MeasuredSubject(QualityParams, ("quality",), "gem.harness.subject_quality:TrainedModel"),
}
