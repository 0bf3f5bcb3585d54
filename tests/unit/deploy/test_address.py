"""Addresses: parsing, and ports that are in use."""

import socket

import pytest

from fedcover.deploy import address
from fedcover.deploy.address import check_port_free, free_ports, parse_address
from fedcover.errors import InputError


def test_an_address_may_be_ipv6() -> None:
    assert parse_address("[::1]:70") == ("::1", 70)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:70000", "host:-1", "host:٣"])
def test_what_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not an address"):
        parse_address(text)


def test_free_ports_are_none_that_are_in_use_or_given_to_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(free_ports(50)) < 32_768  # where the ports of connections begin
    first = free_ports(1)[0]
    monkeypatch.setattr(address, "UNUSED", range(first, first + 3))
    with socket.create_server(("127.0.0.1", first)):
        assert sorted(free_ports(2)) == [first + 1, first + 2]
        with pytest.raises(InputError, match="has no free port from"):
            free_ports(3)


def test_a_port_in_use_is_refused() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    check_port_free("127.0.0.1", ports[0])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InputError, match=f"127.0.0.1:{port}.*--port"):
            check_port_free("127.0.0.1", port)
