"""What YAML may say to the parts of this package. A key that is not here is refused by name."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AttentionOptions(BaseModel):
    """``attention.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows_at_once: int = Field(32, ge=1, description="rows padded to one length together; fewer take less memory")


class PolicyOptions(BaseModel):
    """``scheduler.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens_per_arrival: float = Field(
        0.5, gt=0, allow_inf_nan=False, description="tokens that a job grows by for each one that arrived before it"
    )
