"""The parameters of cases in which one model is trained by several ranks. No torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gem.harness.params import Params

Count = Annotated[int, Field(ge=1)]
AsMany = Count | Literal["ranks"]


class ShardingParams(Params):
    """A model trained by `ranks` processes (gloo, CPU) by a plan, as `[plan]` of `gem train` says it.

    `scaling` "weak": `batch` samples a rank, "strong": `batch` samples of all ranks together. Where there are fewer
    ranks than a dimension of the plan asks for, it has as many as there are; "ranks": as many as there are. `gpus`:
    ranks a host. `model` and `data` are laid over the preset's sizes and the synthetic data's, as `gem train` takes
    them; they are checked when the case runs.
    """

    ranks: Count = 2
    scaling: Literal["weak", "strong"] = "strong"
    batch: Count = 32
    zones: Count = 2
    gpus: Count = 2
    replicate: AsMany = 1
    expert: AsMany = 1
    tables: Literal["v1", "v2", "v3"] = "v1"
    table_replicas: AsMany = 1
    cuts: dict[str, Literal["table", "row", "column"]] = Field(default_factory=dict)
    gather: Literal["full", "fp8"] = "full"
    dtype: Literal["float64", "float32"] = "float64"
    preset: str = "tiny"
    model: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _parts_agree(self) -> "ShardingParams":
        if self.scaling == "strong" and self.batch < self.ranks:
            raise ValueError(f"batch = {self.batch} of all ranks; accepted: ranks = {self.ranks} or more")
        if self.tables == "v1" and self.table_replicas != 1:
            raise ValueError(f'table_replicas = {self.table_replicas} with tables = "v1"; accepted: 1, or v2, v3')
        told = sorted(set(self.data) & {"samples", "chunk", "seed"})
        if told:
            raise ValueError(f"data.{told[0]}: it follows from the other params; accepted: sizes")
        return self

    @property
    def samples(self) -> int:
        """Of a step, all ranks together."""
        return self.batch * (self.ranks if self.scaling == "weak" else 1)

    def share(self, rank: int) -> tuple[int, int]:
        """(from, up to and without) of a step's samples that a rank learns from: as alike as they divide."""
        return self.samples * rank // self.ranks, self.samples * (rank + 1) // self.ranks

    def plan(self) -> dict[str, Any]:
        """`[plan]` of this many ranks."""

        def most(wanted: AsMany, there: int) -> int:
            return there if wanted == "ranks" else min(wanted, there)

        def divides(wanted: int, there: int) -> int:
            return max(n for n in range(1, min(wanted, there) + 1) if there % n == 0)

        gpus = divides(self.gpus, self.ranks)
        replicate = most(self.replicate, self.ranks)
        return {
            "zones": divides(self.zones, self.ranks // gpus), "gpus": gpus, "replicate": replicate,
            "expert": most(self.expert, self.ranks // replicate), "tables": self.tables,
            "table_replicas": most(self.table_replicas, self.ranks), "cuts": self.cuts, "gather": self.gather,
        }  # fmt: skip
