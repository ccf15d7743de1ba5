"""Where do several hosts meet, and which address of this host can the others reach?

Decision: whether the endpoint is this host is asked of the kernel, which lets a socket bind only to an address that is
its own. Turned down: comparing host names, as torch does, which misses second network cards, aliases and containers.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptrun.errors import UsageError

DEFAULT_PORT = 29400  # torchrun's
_TRY_EVERY_S = 0.5
_SAID_AFTER_S = 5.0
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Endpoint:
    """``host`` is a name or an address, without the brackets of IPv6."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """``HOST:PORT``, or ``HOST`` with torchrun's port.

    Raises:
        UsageError: it is neither, or its port is 0, which no other host could know.
    """
    host, port = text.strip(), str(DEFAULT_PORT)
    if host.startswith("["):
        host, closed, rest = host[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise _unreadable(text)
        port = rest[1:] or port
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise _unreadable(text)
    return Endpoint(host, int(port))


def _unreadable(text: str) -> UsageError:
    return UsageError(
        f"--rdzv-endpoint is {text!r}; it takes HOST:PORT with a port from 1 to 65535",
        hint=f"Name one of the hosts, the same in each command, such as host1:29500; no port means {DEFAULT_PORT}.",
    )


def addresses(endpoint: Endpoint) -> list[str]:
    """The addresses of the endpoint's host, as this host knows them.

    Raises:
        UsageError: the name is not known here.
    """
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"--rdzv-endpoint {endpoint}: the host {endpoint.host!r} is not known here ({error.strerror})",
            hint="Write the name or address of one of the hosts, as all of them can reach it.",
        ) from None
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_here(address: str) -> bool:
    """Whether ``address`` is one of this host's own."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


def port_is_free(port: int) -> bool:
    """Whether a server on this host could listen on ``port`` now.

    Raises:
        UsageError: it may not.
    """
    try:
        socket.create_server(("", port), reuse_port=False).close()
    except PermissionError as error:
        raise UsageError(
            f"port {port} of --rdzv-endpoint cannot be used here: {error.strerror}",
            hint="Choose one above 1023.",
        ) from None
    except OSError:
        return False
    return True


def own_address(endpoint: Endpoint, address: str) -> str:
    """The address of this host that the others can reach: that of the way to the endpoint.

    Args:
        address: one of the endpoint's.
    """
    own = _way_to(address, endpoint.port)
    if _is_loopback(own) and not _is_loopback(endpoint.host):
        # The endpoint is this host, whose own name leads to 127.0.1.1 here and to its true address elsewhere.
        return endpoint.host
    return own


def _way_to(address: str, port: int) -> str:
    sock = socket.socket(_family(address), socket.SOCK_DGRAM)
    try:
        sock.connect((address, port))  # sends nothing
        return str(sock.getsockname()[0])
    except OSError:
        return address
    finally:
        sock.close()


def refusal(endpoint: Endpoint, address: str, *, timeout_s: float = 5.0) -> str | None:
    """Why nothing can be reached at the endpoint now; None where something listens there."""
    try:
        socket.create_connection((address, endpoint.port), timeout=timeout_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def await_answer(
    endpoint: Endpoint,
    address: str,
    *,
    timeout_s: float,
    left: Callable[[float], bool],
    say: Callable[[str], None],
) -> bool:
    """Wait until something listens at the endpoint, which another host serves.

    Args:
        left: waits for so many seconds, and says whether there is no more reason to wait.
        say: is told once what is waited for.

    Returns:
        False where ``left`` said so first.

    Raises:
        UsageError: nobody did.
    """
    began, said = time.monotonic(), False
    while True:
        why = refusal(endpoint, address, timeout_s=min(5.0, timeout_s))
        if why is None:
            return True
        waited_s = time.monotonic() - began
        if waited_s >= timeout_s:
            raise UsageError(
                f"nobody serves the rendezvous at {endpoint}: {why}, for {timeout_s:.0f} s",
                hint=f"Is the same command started on {endpoint.host}, and may this host reach its port "
                f"{endpoint.port}? --rdzv-endpoint names one of the hosts that take part.",
            )
        if not said and waited_s >= min(_SAID_AFTER_S, timeout_s / 2):
            said = True
            say(f"waiting up to {timeout_s:.0f} s for {endpoint} to serve the rendezvous: {why}")
        if left(min(_TRY_EVERY_S, max(0.0, timeout_s - waited_s))):
            return False


def interface_of(address: str) -> str | None:
    """The name of the network interface that has ``address`` (IPv4); None where it cannot be found."""
    found = interface_addresses().get(address)
    return found or ("lo" if _is_loopback(address) else None)


def interface_addresses() -> dict[str, str]:
    """The first IPv4 address of each of this host's network interfaces, with the interface's name."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = array.array("b", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            found.setdefault(socket.inet_ntoa(request.tobytes()[20:24]), name)
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")
