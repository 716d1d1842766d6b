"""HostNames: the host names that a server without keys answers to. They prevent access by web pages through DNS
rebinding.

The owner of a web page can point the page's domain at an address that only a visitor can reach, such as 127.0.0.1. The
visitor's browser then takes this server for the page's site and sends requests with the page's domain as `Host`. So the
server answers only to names that such a page cannot have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address

from outrider.server.settings import ServerConfig

# localhost, and what containers call the machine that they run on.
LOCAL_NAMES = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
# Zones that exist inside one network or cluster only, beside names without a dot. Who can give such a name reaches a
# server that listens there anyhow.
PRIVATE_ZONES = (".local", ".internal", ".svc")
HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::\d*)?")
PLAIN_NAME = re.compile(r"[\w-]+", re.ASCII)


class HostNames:
    def __init__(self, names: Iterable[str], *, allows_private: bool = False) -> None:
        """names: for example example.org, or *.example.org for all names below it. allows_private: also serve names
        without a dot and names of private zones, which containers and pods use."""
        given = {name.lower() for name in names}
        self._names = LOCAL_NAMES | {name for name in given if not name.startswith("*.")}
        self._zones = (".localhost", *(name.removeprefix("*") for name in given - self._names),
                       *(PRIVATE_ZONES if allows_private else ()))
        self._allows_private = allows_private

    @classmethod
    def from_config(cls, config: ServerConfig) -> HostNames | None:
        """The served names; None if every name is served. By default every name is served if a web page cannot exploit
        it: with API keys, with a TLS certificate (which a page's name does not match), and at a unix socket (which
        browsers cannot open)."""
        is_safe = bool(config.api_key) or config.ssl_certfile is not None or config.uds is not None
        if "*" in config.allowed_hosts or (is_safe and not config.allowed_hosts):
            return None
        return cls([config.host, *config.allowed_hosts], allows_private=not _is_loopback(config.host))

    def allows(self, host: str) -> bool:
        """Whether the value of a `Host` header is served. An IP address always is, because a web page's domain cannot
        be one."""
        name = host_of(host)
        if name in self._names or name.endswith(self._zones) or (self._allows_private and PLAIN_NAME.fullmatch(name)):
            return True
        return _is_address(name)


def host_of(host: str) -> str:
    """Return the name or address in the value of a `Host` header, without port and brackets."""
    found = HOST.fullmatch(host.strip().lower())
    return host if found is None else (found[1] or found[2]).removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return ip_address(host).is_loopback if _is_address(host) else host.lower() in LOCAL_NAMES
