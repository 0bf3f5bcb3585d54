"""Fixtures of tests of federations."""

from typing import Any

import pytest

from fedcover.params import HostCopy


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> list[HostCopy]:
    """Return a list to which every reading of numbers of a device is added."""
    read: list[HostCopy] = []
    tolist = HostCopy.tolist

    def counted(copy: HostCopy) -> Any:
        read.append(copy)
        return tolist(copy)

    monkeypatch.setattr(HostCopy, "tolist", counted)
    return read
