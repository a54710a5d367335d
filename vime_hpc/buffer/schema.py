"""What every segment of one buffer holds: which columns of the table in columns.py, and the shape of its routing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vime_hpc.buffer.columns import OPTIONAL, OPTIONAL_BY_NAME, PAIRS, RAGGED, SCALARS, Column
from vime_hpc.errors import BufferCorruptError, ConfigError
from vime_hpc.types import Status

FORMAT = "vime-hpc rollout segment"
FORMAT_VERSION = 1

STATUS_NAMES: tuple[str, ...] = tuple(status.value for status in Status)
"""Index in this tuple = the code in the `status` column. Only ever appended to."""

ROUTED = "routed_experts"
ROUTED_DIGEST = "routed_experts_xxh3_64"
DIGEST = "sample_xxh3_64"


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """Shape of router replay data: ids are in 0..num_experts-1."""

    num_layers: int
    top_k: int
    num_experts: int

    def __post_init__(self) -> None:
        if min(self.num_layers, self.top_k, self.num_experts) < 1 or self.top_k > self.num_experts:
            raise ConfigError(
                f"routing shape {self}: needs 1 <= top_k <= num_experts and num_layers >= 1"
            )
        if self.num_experts > 65_535:
            raise ConfigError(
                f"routing shape {self}: at most 65535 experts fit uint16 beside the missing mark"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8 up to 256 experts, else uint16.

        The missing mark fills all top_k places of a token and layer; real routing never repeats an expert, so the mark
        cannot be mistaken for expert 255 unless top_k is 1: 256 experts with top_k 1 therefore use uint16.
        """
        return np.dtype("u1" if self.num_experts + (self.top_k == 1) <= 256 else "<u2")

    @property
    def missing(self) -> int:
        """The mark: 255 or 65535, in all top_k places of a token and layer whose routing is unknown."""
        return int(np.iinfo(self.dtype).max)

    def missing_rows(self, experts: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """[rows, layers] bool, True where the routing of that token and layer is marked missing.

        Args:
            experts: [rows, layers * top_k] or [rows, layers, top_k]; any number of layers.
        """
        blocks = experts.reshape(
            len(experts), int(np.prod(experts.shape[1:])) // self.top_k, self.top_k
        )
        return np.asarray((blocks == self.missing).all(axis=2))


@dataclass(frozen=True, slots=True)
class BufferSchema:
    """What every segment of one buffer holds. Fixed when the buffer is created, stored in buffer.json."""

    routing: RoutingShape | None = None
    optional: tuple[str, ...] = ()
    """Names out of OPTIONAL, in OPTIONAL's order; a column dealt out by edges brings the edges with it."""
    sampling_temperature: float = 1.0
    logprob_mode: str = "temperature_scaled"
    """What rollout_logprobs are of: temperature_scaled, or raw (before temperature and filters)."""
    optional_columns: tuple[Column, ...] = field(init=False, compare=False, repr=False)
    scalars: tuple[Column, ...] = field(init=False, compare=False, repr=False)
    """All columns of one value per sample, presence flags of optional columns included, in digest order."""
    ragged: tuple[Column, ...] = field(init=False, compare=False, repr=False)
    """All flat columns but routed_experts, in digest order."""
    scalar_dtype: np.dtype[Any] = field(init=False, compare=False, repr=False)
    """Packed little-endian record of the scalar columns: the first bytes of a sample's digest."""

    def __post_init__(self) -> None:
        known = list(OPTIONAL_BY_NAME)
        unknown = [name for name in self.optional if name not in known]
        if unknown:
            raise ConfigError(f"unknown optional buffer columns {unknown}; known: {known}")
        wanted = {name for pair in PAIRS if not pair.isdisjoint(self.optional) for name in pair}
        wanted |= set(self.optional)
        chosen = tuple(column for column in OPTIONAL if column.name in wanted)
        scalars = _scalars(chosen, self.routing is not None)
        # Once and not as properties: every sample that is packed asks for them.
        for name, value in {
            "optional": tuple(column.name for column in chosen),
            "optional_columns": chosen,
            "scalars": scalars,
            "ragged": RAGGED + tuple(column for column in chosen if column.axis != "sample"),
            "scalar_dtype": np.dtype([(column.name, column.dtype) for column in scalars]),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def offsets_owners(self) -> dict[str, Column]:
        """Every offsets dataset of the flat columns, and the first column it belongs to."""
        owners: dict[str, Column] = {}
        for column in self.ragged:
            owners.setdefault(column.offsets, column)
        return owners

    @property
    def column_names(self) -> tuple[str, ...]:
        names = tuple(column.name for column in self.scalars + self.ragged)
        return names + ((ROUTED,) if self.routing is not None else ())

    def column(self, name: str) -> Column:
        for column in self.scalars + self.ragged:
            if column.name == name:
                return column
        raise ConfigError(
            f"this buffer has no column {name!r}; it has {', '.join(self.column_names)}"
        )

    def to_json(self) -> dict[str, Any]:
        routing = (
            None
            if self.routing is None
            else {
                "num_layers": self.routing.num_layers,
                "top_k": self.routing.top_k,
                "num_experts": self.routing.num_experts,
            }
        )
        return {
            "routing": routing,
            "optional": list(self.optional),
            "sampling_temperature": self.sampling_temperature,
            "logprob_mode": self.logprob_mode,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> BufferSchema:
        try:
            routing = None if data["routing"] is None else RoutingShape(**data["routing"])
            return cls(
                routing,
                tuple(data["optional"]),
                float(data["sampling_temperature"]),
                str(data["logprob_mode"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BufferCorruptError(
                f"{where}: the buffer's schema cannot be read: {error!r}"
            ) from error

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> BufferSchema:
        """The schema as a segment's root attributes state it."""
        routing = None
        if "num_experts" in attributes:
            routing = RoutingShape(
                int(attributes["num_moe_layers"]),
                int(attributes["top_k"]),
                int(attributes["num_experts"]),
            )
        optional = tuple(name for name in str(attributes["optional_columns"]).split(",") if name)
        return cls(
            routing,
            optional,
            float(attributes["sampling_temperature"]),
            str(attributes["logprob_mode"]),
        )


def _scalars(optional: Sequence[Column], routed: bool) -> tuple[Column, ...]:
    flagged = [column.present for column in optional] + [f"{ROUTED}_present"] * routed
    flags = tuple(
        Column(name, "u1", "sample", "bool", "1 = the sample has this column") for name in flagged
    )
    return SCALARS + tuple(column for column in optional if column.axis == "sample") + flags


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """The one byte string a JSON value has here: sorted keys, no spaces, ASCII, NaN refused."""
    return _CANONICAL.encode(value).encode("ascii")
