"""The budgets of a fleet: each device's declared capacity, or else the run's code.

``cost_model`` turns seconds into a share of the model. The fleet's size is known only once devices have connected. A
code with identical items is repeated to that size; otherwise the code must have one item per cohort slot.
"""

from collections.abc import Hashable, Sequence

from fedcover.budgets import Budget, Budgets, by_client
from fedcover.data import Device
from fedcover.errors import InputError

Items = Sequence[Hashable]
"""The items of a code, before they are converted to budgets."""


def check_fleet(items: Items, by: str, cohort: int, least: int) -> None:
    """Raise InputError if a run's code does not fit the number of clients that it waits for.

    Args:
        items: The items of the code.
        by: ``"slot"`` if items belong to slots of the cohort, ``"client"`` if they belong to clients.
        cohort: The configured size of a cohort.
        least: The number of clients that the run waits for.

    >>> check_fleet("1" * 10, "slot", cohort=10, least=3)
    """
    if _identical(items):
        return
    count, slots = len(items), min(cohort, least)
    if by == "slot" and count != slots:
        raise InputError(
            f"the code has {count} slots, and a cohort of the {least} clients that the run waits for has {slots}; make"
            f" them equal (budgets.code, cohort, flower.clients), or use budgets.by=client"
        )
    if by == "client" and count > least:
        raise InputError(
            f"the code has {count} budgets, and the run waits for {least} clients; give at most one each (budgets.code,"
            f" flower.clients)"
        )


def least_fleet(items: Items, by: str) -> int:
    """Return the least number of devices that a run's code fits: one for each slot, unless its items are identical.

    >>> least_fleet("112", "slot"), least_fleet("111", "slot"), least_fleet("112", "client")
    (3, 1, 1)
    """
    return len(items) if by == "slot" and not _identical(items) else 1


def cohort_of_fleet(items: Items, by: str, cohort: int, devices: Sequence[Device]) -> int:
    """Return the number of clients in a round.

    It is at most the number of devices, and at most the number of slots of the code if the code applies and its items
    differ.

    >>> four = [Device(i, 10) for i in range(4)]
    >>> cohort_of_fleet("123", "slot", 10, four), cohort_of_fleet("111", "slot", 10, four)
    (3, 4)
    >>> cohort_of_fleet("123", "slot", 10, [*four, Device(4, 10, capacity=0.5)])
    5
    """
    most = min(cohort, len(devices))
    return most if by == "client" or _identical(items) or _any_capacity(devices) else min(most, len(items))


def num_budgets_of_fleet(items: Items, by: str, cohort: int, devices: Sequence[Device]) -> int:
    """Return the number of budgets that ``budgets_of_fleet`` returns, before the code's items are converted.

    >>> num_budgets_of_fleet("12345", "client", 10, [Device(i, 10) for i in range(4)])
    4
    """
    if _any_capacity(devices):
        return len(devices)
    return cohort if by == "slot" else min(len(items), len(devices))


def budgets_of_fleet(devices: Sequence[Device], code: Sequence[Budget], by: str, items: Items, cohort: int) -> Budgets:
    """Return the budgets of devices: their declared capacities, or else those of the code.

    If any device declares its capacity, budgets are by client, and the others get the code's items in turn.

    Args:
        devices: The devices that have connected.
        code: The budgets of the code.
        by: ``"slot"`` or ``"client"``, as in ``check_fleet``.
        items: The items of the code.
        cohort: The number of clients in a round.

    >>> devices = [Device(0, 10), Device(1, 10, capacity=0.5)]
    >>> [budget.keep for budget in budgets_of_fleet(devices, [Budget()], "slot", "1", 2).spec]
    [1.0, 0.5]
    """
    if _any_capacity(devices):
        ordered = sorted(devices, key=lambda device: device.number)
        return by_client(
            [
                code[index % len(code)] if device.capacity is None else Budget(device.capacity)
                for index, device in enumerate(ordered)
            ]
        )
    if by == "slot":
        return Budgets([code[0]] * cohort if _identical(items) else code, by)
    return by_client(code[: len(devices)])


def _any_capacity(devices: Sequence[Device]) -> bool:
    return any(device.capacity is not None for device in devices)


def _identical(items: Items) -> bool:
    return len(set(items)) == 1
