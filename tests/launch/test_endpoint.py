"""What `--rdzv-endpoint` may say, and what this host knows of it."""

from __future__ import annotations

import socket

import pytest

from ckptrun.errors import UsageError
from ckptrun.launch.endpoint import (
    Endpoint,
    addresses,
    await_answer,
    interface_of,
    is_here,
    own_address,
    parse_endpoint,
    port_is_free,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host1:29500", "host1", 29500),
        (" host1 ", "host1", 29400),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[fe80::1]:29500", "fe80::1", 29500),
        ("[fe80::1]", "fe80::1", 29400),
        ("fe80::1", "fe80::1", 29400),
    ],
)
def test_what_is_understood(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == Endpoint(host, port)
    assert parse_endpoint(str(parse_endpoint(text))) == Endpoint(host, port)


@pytest.mark.parametrize(
    "text", ["", ":29500", "host:", "host:0", "host:65536", "host:http", "[::1", "[::1]29500"]
)
def test_what_is_not(text: str) -> None:
    with pytest.raises(UsageError, match="it takes HOST:PORT") as caught:
        parse_endpoint(text)
    assert "host1:29500" in (caught.value.hint or "")


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match=r"the host 'nowhere\.invalid' is not known here"):
        addresses(Endpoint("nowhere.invalid", 29500))


def test_which_addresses_are_this_hosts_own() -> None:
    assert addresses(Endpoint("127.0.0.1", 1)) == ["127.0.0.1"]
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")  # of a net that is nobody's


def test_the_address_that_others_can_reach() -> None:
    assert own_address(Endpoint("127.0.0.1", 29500), "127.0.0.1") == "127.0.0.1"
    # Its own name leads a host to a loopback address, which is no use to others: they know it by that name.
    assert own_address(Endpoint("host1", 29500), "127.0.1.1") == "host1"


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("no address") is None


def test_a_port_is_free_or_not() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert not port_is_free(port)
        assert await_answer(
            Endpoint("localhost", port), "127.0.0.1", timeout_s=5, left=lambda _: True, say=pytest.fail
        )
    assert port_is_free(port)


def test_waiting_for_somebody_to_serve_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("host1", server.getsockname()[1])
    said: list[str] = []
    assert not await_answer(endpoint, "127.0.0.1", timeout_s=60, left=lambda _: True, say=said.append)
    assert said == []
    with pytest.raises(UsageError, match=f"nobody serves the rendezvous at {endpoint}: Connection refused"):
        await_answer(endpoint, "127.0.0.1", timeout_s=0.01, left=lambda _: False, say=said.append)
    assert said in ([], [f"waiting up to 0 s for {endpoint} to serve the rendezvous: Connection refused"])
