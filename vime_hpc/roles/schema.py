"""What the buffer of a run holds: decided by its configuration before the first sample, and for the whole run."""

from __future__ import annotations

from vime_hpc.buffer.columns import OPTIONAL_BY_NAME
from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError


def buffer_schema(config: RunConfig) -> BufferSchema:
    """The schema every segment of the run's buffer has, whatever its samples have.

    Raises:
        ConfigError: buffer.columns names what is no optional column.
    """
    unknown = [name for name in config.buffer.columns if name not in OPTIONAL_BY_NAME]
    if unknown:
        raise ConfigError(
            f"buffer.columns: {', '.join(map(repr, unknown))} is no optional column of the buffer; known: "
            f"{', '.join(OPTIONAL_BY_NAME)} (docs/buffer-format.md)"
        )
    return BufferSchema(
        optional=tuple(config.buffer.columns), sampling_temperature=config.rollout.temperature
    )
