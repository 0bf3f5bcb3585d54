"""The budgets of clients on devices of their own: what they say that they can afford, else what the run's code has.

Who comes decides how many there are, so a code whose items are all alike is for as many as there are; one whose items
differ must have one for each place.
"""

from collections.abc import Hashable, Sequence

from fedcover.budgets import Budget, Budgets, by_client
from fedcover.data import Device
from fedcover.errors import InputError

Items = Sequence[Hashable]
"""What a code has, before it is known what that buys."""


def check_fleet(items: Items, by: str, cohort: int, least: int) -> None:
    """Nothing, or an error if a run that waits for ``least`` clients would have no use for its code; before it waits.

    >>> check_fleet("1" * 10, "slot", cohort=10, least=3)
    """
    if _alike(items):
        return
    many, places = len(items), min(cohort, least)
    if by == "slot" and many != places:
        raise InputError(
            f"the code has {many} slots, and a cohort of the {least} clients that the run waits for has {places}; make"
            f" them equal (budgets.code, cohort, flower.clients), or use budgets.by=client"
        )
    if by == "client" and many > least:
        raise InputError(
            f"the code has {many} budgets, and the run waits for {least} clients; give at most one each (budgets.code,"
            f" flower.clients)"
        )


def cohort_of_fleet(items: Items, by: str, cohort: int, devices: Sequence[Device]) -> int:
    """How many clients a round has: never more than there are, nor than a code that counts has slots, if they differ.

    >>> four = [Device(i, 10) for i in range(4)]
    >>> cohort_of_fleet("123", "slot", 10, four), cohort_of_fleet("111", "slot", 10, four)
    (3, 4)
    >>> cohort_of_fleet("123", "slot", 10, [*four, Device(4, 10, capacity=0.5)])
    5
    """
    most = min(cohort, len(devices))
    return most if by == "client" or _alike(items) or tells(devices) else min(most, len(items))


def many_of_fleet(items: Items, by: str, cohort: int, devices: Sequence[Device]) -> int:
    """How many budgets ``budgets_of_fleet`` gives, before it is known what the code's items buy.

    >>> many_of_fleet("12345", "client", 10, [Device(i, 10) for i in range(4)])
    4
    """
    if tells(devices):
        return len(devices)
    return cohort if by == "slot" else min(len(items), len(devices))


def budgets_of_fleet(devices: Sequence[Device], code: Sequence[Budget], by: str, items: Items, cohort: int) -> Budgets:
    """What members say that they can afford; who does not say it gets what the code has at its place.

    >>> few = [Device(0, 10), Device(1, 10, capacity=0.5)]
    >>> [budget.keep for budget in budgets_of_fleet(few, [Budget()], "slot", "1", 2).spec]
    [1.0, 0.5]
    """
    ordered = sorted(devices, key=lambda device: device.number)
    if tells(devices):
        said = [None if device.capacity is None else Budget(device.capacity) for device in ordered]
        return by_client([own or code[place % len(code)] for place, own in enumerate(said)])
    if by == "slot":
        return Budgets([code[0]] * cohort if _alike(items) else code, by)
    return by_client(code[: len(devices)])


def tells(devices: Sequence[Device]) -> bool:
    """Whether any of them says what it can afford: then budgets are by client, whatever the code is by."""
    return any(device.capacity is not None for device in devices)


def _alike(items: Items) -> bool:
    return len(set(items)) == 1
