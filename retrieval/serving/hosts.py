"""The names under which the service answers, and the web pages elsewhere that may ask it.

A page of evil.example can make its own name resolve to 127.0.0.1 after it has loaded (DNS rebinding). To the browser its requests then
stay within one origin, so that CORS does not apply; the ``Host`` header still says evil.example, and is what tells them apart. A page
cannot do that with an IP address, which is never resolved.

Source: RFC 9110, sections 7.4 (rejecting misdirected requests) and 15.5.20; RFC 6454 for origins.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from quiver.encoder.errors import InputError
from quiver.retrieval.serving.problems import RequestError

ANY = "*"
"""Allows every host, or every origin."""

# The header: a name or an IPv4 address, or an IPv6 address in brackets; and perhaps a port.
_HEADER = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?::[0-9]*)?")
_NAME = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*\.?")
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[^\s:/?#@\[\]*]+)(?::(?P<port>[0-9]{1,5}))?")
# Browsers leave these ports out.
_PORTS = {"http": "80", "https": "443"}
_LOCAL = ("localhost", "127.0.0.1", "::1")


class AllowedHosts:
    """Decides by the ``Host`` header whether a request is for this service; its port does not matter, since ports are forwarded.

    Args:
        names: Names and addresses as `host_name` gives them.
        addresses: Whether every IP address is allowed too.
    """

    def __init__(self, names: Iterable[str], *, addresses: bool = False) -> None:
        self._names = frozenset(names)
        self._suffixes = tuple(name.removeprefix(ANY) for name in self._names if name.startswith("*."))
        self._addresses = addresses

    def check(self, header: str | None) -> None:
        """Refuse a request for another host. One without the header is no browser's: HTTP/1.1 demands it.

        Raises:
            RequestError: 421: the host is not one of this service.
        """
        if header is None or ANY in self._names:
            return
        match = _HEADER.fullmatch(header.strip().lower())
        if match is None:
            raise RequestError(421, "wrong_host", "the Host header of the request is not a host")
        given = match["address"] or match["name"]
        host = _plain_address(given)
        allowed = self._addresses
        if host is None:
            host, allowed = given.removesuffix("."), given.removesuffix(".").endswith(self._suffixes)
        if not (allowed or host in self._names):
            raise RequestError(421, "wrong_host", f"this service does not answer as {host!r}; start it with --allow-host {host}")


def own_hosts(host: str, bound: str, allowed: Iterable[str] = ()) -> AllowedHosts:
    """The hosts of a service that listens on an address.

    On a loopback address these are the names of that, and ``host``. On another one, which other machines can reach, also the name of this
    machine, and every IP address: load balancers and orchestrators ask by one that the service does not know, such as a pod's.

    Args:
        host: What it was told to listen on.
        bound: The IP address that this was.
        allowed: Further ones, as `host_name` gives them.
    """
    names = {*_LOCAL, bound, host.lower().removesuffix("."), *allowed}
    if ip_address(bound.partition("%")[0]).is_loopback:
        return AllowedHosts(names)
    machine = socket.gethostname().lower()
    return AllowedHosts({*names, machine, machine.partition(".")[0]}, addresses=True)


def host_name(text: str) -> str:
    """A host to allow, in the form in which it is compared.

    Raises:
        InputError: It is none.

    Example:
        >>> host_name("Search.Example.com"), host_name("*.example.com"), host_name("[::1]")
        ('search.example.com', '*.example.com', '::1')
    """
    lower = text.strip().lower()
    address = _plain_address(lower[1:-1] if lower.startswith("[") and lower.endswith("]") else lower)
    if address is not None or lower == ANY:
        return address or lower
    if not _NAME.fullmatch(lower):
        raise InputError(f"--allow-host {text!r}: expected a host without scheme and port, such as search.example.com, *.example.com, or *")
    return lower.removesuffix(".")


def web_origin(text: str) -> str:
    """An origin to allow, as browsers send it.

    Raises:
        InputError: It is none.

    Example:
        >>> web_origin("https://Example.com:443"), web_origin("http://localhost:3000"), web_origin("*")
        ('https://example.com', 'http://localhost:3000', '*')
    """
    lower = text.strip().lower()
    if lower == ANY:
        return lower
    match = _ORIGIN.fullmatch(lower)
    if match is None:
        raise InputError(
            f"--allow-origin {text!r}: expected scheme://host or scheme://host:port without a path, such as https://example.com, or *"
        )
    return lower.removesuffix(f":{match['port']}") if match["port"] == _PORTS.get(match["scheme"]) else lower


def _plain_address(text: str) -> str | None:
    """An IP address in its shortest form; None for what is none."""
    try:
        return str(ip_address(text))
    except ValueError:
        return None
