"""Limits on what nodes may claim when they join: a key proves which node sends a claim, not that it is true."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedcover.data import Device
from fedcover.errors import InputError


@dataclass(frozen=True)
class ClientLimit:
    """What the operator allows one client to claim; None for no limit of its own."""

    capacity: float | None = None
    examples: int | None = None


@dataclass(frozen=True)
class ClaimLimits:
    """What the operator allows nodes to claim.

    >>> ClaimLimits(clients={3: ClientLimit(capacity=0.5)}).limited(Device(3, 10, capacity=1.0)).capacity
    0.5
    """

    capacity: float = 1.0
    """The largest capacity; a node that claims more is cut to it."""
    least_capacity: float = 0.01
    """The smallest capacity; a node that claims less is left out."""
    clients: Mapping[int, ClientLimit] = field(default_factory=dict)
    """Limits of single clients by number."""

    def limited(self, device: Device) -> Device:
        """Return a device with no more capacity than it may claim.

        Raises:
            InputError: If it claims too little capacity, or more examples than its operator knows of; or none where
                there is a limit, since it would then get the run's budget, which may be more.
        """
        own = self.clients.get(device.number, ClientLimit())
        if own.examples is not None and device.examples > own.examples:
            raise InputError(
                f"client {device.number} claims {device.examples} examples, and claims.clients.{device.number} allows"
                f" {own.examples}; check its data, or raise that limit"
            )
        most = min(self.capacity, own.capacity or 1.0)
        if device.capacity is None:
            if most < 1:
                raise InputError(
                    f"client {device.number} reports no capacity, and the run's claims limit it to {most:g}; start it"
                    f" with --capacity"
                )
            return device
        if device.capacity < self.least_capacity:
            raise InputError(
                f"client {device.number} claims a capacity of {device.capacity:g}, below claims.least_capacity,"
                f" {self.least_capacity:g}; start it with a larger --capacity"
            )
        return replace(device, capacity=min(device.capacity, most))
