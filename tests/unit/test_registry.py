"""Registries of factories by name."""

import pytest

import fedcover as fc
from fedcover.registry import Registry


def test_names_are_found_however_they_are_written() -> None:
    registry = Registry[int]("number")
    registry.register("Forty-Two")(lambda: 42)
    assert [registry.find(name)[0] for name in ("forty_two", "FORTYTWO", "Forty-Two")] == ["Forty-Two"] * 3
    assert list(registry) == ["Forty-Two"]
    with pytest.raises(fc.InputError, match=r"there is no number 'fortytwe'.*did you mean 'Forty-Two'"):
        registry.find("fortytwe")
    with pytest.raises(fc.InputError, match="the number 'forty_two' is already registered"):
        registry.register("forty_two")(lambda: 1)
