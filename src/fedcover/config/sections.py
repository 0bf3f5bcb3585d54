"""Sections of the settings with fixed keys: what clients and nodes are trusted with."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedcover.aggregation.screening import Screening
from fedcover.errors import InputError, check_number, check_whole


class StrictSection(BaseModel):
    """A section of the settings with these keys and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ScreeningConfig(StrictSection):
    """Limits on the influence of a client, by comparison with its cohort."""

    when: Literal["deploy", "always", "never"] = Field(
        "deploy", description="deploy: only in runs of `fedcover deploy run`; always: in simulations too"
    )
    change: float = Field(
        Screening.change,
        ge=1,
        description="largest change of a layer per entry, as a multiple of the cohort's median; inf: no limit",
    )
    action: Literal["clip", "reject"] = Field(
        Screening.action, description="clip: scale a larger change down; reject: leave the client out of the round"
    )
    examples: float = Field(
        Screening.examples,
        ge=1,
        description="largest number of examples with which a client counts, as a multiple of the cohort's median",
    )

    def build(self, deployed: bool) -> Screening | None:
        """Return the screening of a run; None if it has none."""
        if self.when == "never" or (self.when == "deploy" and not deployed):
            return None
        return Screening(self.change, self.action, self.examples)


class ClaimsConfig(StrictSection):
    """What nodes may claim when they join a deployment."""

    capacity: float = Field(1.0, gt=0, le=1, description="largest capacity; a node that claims more is cut to it")
    least_capacity: float = Field(
        0.01, gt=0, le=1, description="smallest capacity; a node that claims less is left out"
    )
    clients: dict[str, Any] = Field(
        {},
        description="tables such as [claims.clients.3] with `capacity`, and `examples`, the largest number of examples",
    )

    @field_validator("clients")
    @classmethod
    def _check_clients(cls, clients: dict[str, Any]) -> dict[str, Any]:
        for number, limits in clients.items():
            if not number.isdecimal() or not isinstance(limits, dict) or set(limits) - {"capacity", "examples"}:
                raise InputError("must be tables by client number, each with capacity, examples or both")
            if "capacity" in limits:
                check_number("capacity", limits["capacity"], 0, 1 + 1e-12, "a share of the model in (0, 1]")
            if "examples" in limits:
                check_whole("examples", limits["examples"], 1)
        return clients
