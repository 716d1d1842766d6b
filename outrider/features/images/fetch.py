"""Reads the bytes of an image from its URL in a client's message: a data URL, or a host or folder that the operator
allows.

Nothing is fetched unless the operator names hosts. A name is resolved once. All its addresses must be global, and the
connection goes to one of these addresses, so that a name server cannot change its answer after the check. Redirects are
checked like the first URL. All refused fetches get one error text, so that a client cannot explore the server's
network. No URL is logged, because a data URL is the picture itself."""

from __future__ import annotations

import asyncio
import binascii
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from outrider.features.images.http_body import HttpAnswer, read_answer
from outrider.features.images.limits import MAX_BYTES, ImageRefused

Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]  # a name's addresses
Connect: TypeAlias = Callable[[str, int, str | None], Awaitable[Stream]]  # an address, a port, the name of TLS or None

PORTS = {"http": 80, "https": 443}
MAX_REDIRECTS = 3
MAX_SECONDS = 5.0
MAX_URL = 4096  # characters of a URL that is fetched
REDIRECTS = (301, 302, 303, 307, 308)
SLICE = 1 << 18  # characters of base64 that are decoded at once; a multiple of 4
# Addresses that carry an IPv4 address: a gateway would pass them on to it.
CARRIERS = tuple(map(ipaddress.IPv6Network, ("::/96", "64:ff9b::/96", "2002::/16", "2001::/32")))
NOT_FETCHED = ("the URL of an image was not read: send the image as a data URL (data:image/png;base64,...), or ask the "
               "operator of this server to allow its host")
NOT_BASE64 = "an image is not valid base64: write its URL as data:image/png;base64, and standard base64 behind it"


@dataclass(frozen=True)
class MediaSources:
    """The sources of images that are allowed beside data URLs; by default none. domains: allowed host names;
    `*.example.org` allows all names below that one. folder: file URLs may name the files below it."""

    domains: tuple[str, ...] = ()
    folder: str | None = None
    max_bytes: int = MAX_BYTES

    def allows_host(self, host: str) -> bool:
        return any(host == domain.lower() or (domain.startswith("*.") and host.endswith(domain[1:].lower()))
                   for domain in self.domains)


def read_data_url(url: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Decode a data URL. The base64 must be strict: no spaces, no other alphabet, right padding."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().startswith("data:image/") or not head.lower().endswith(";base64"):
        raise ImageRefused(NOT_BASE64)
    return read_base64(text, max_bytes)


def read_base64(text: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Decode strict base64, a slice at a time, so that other threads can run meanwhile."""
    if len(text) // 4 * 3 - 2 > max_bytes:
        raise ImageRefused(f"an image has more than {max_bytes} bytes (image_max_bytes): compress it, or make it "
                           "smaller")
    end = text.find("=")
    if not text or len(text) % 4 or 0 <= end < len(text) - 2:
        raise ImageRefused(NOT_BASE64)
    try:
        return b"".join([binascii.a2b_base64(text[start : start + SLICE], strict_mode=True)
                         for start in range(0, len(text), SLICE)])
    except ValueError:  # also of characters outside ASCII
        raise ImageRefused(NOT_BASE64) from None


def read_file(url: str, sources: MediaSources) -> bytes:
    """Read the file of a file URL, if it is below the folder that the operator allows. Symbolic links are resolved
    first."""
    try:
        parts = urlsplit(url)
        if sources.folder is None or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ImageRefused(NOT_FETCHED)
        root = Path(sources.folder).resolve(strict=True)
        path = Path(unquote(parts.path, errors="strict")).resolve(strict=True)
        if not path.is_relative_to(root):
            raise ImageRefused(NOT_FETCHED)
        # Without waiting for the writer of a pipe, and without following a link that has just been put there.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ImageRefused(NOT_FETCHED)
            data = file.read(sources.max_bytes + 1)
    except (OSError, ValueError, RuntimeError):  # no such file, a bad URL, a circle of links
        raise ImageRefused(NOT_FETCHED) from None
    if len(data) > sources.max_bytes:
        raise ImageRefused(NOT_FETCHED)
    return data


async def fetch(url: str, sources: MediaSources, resolve: Resolve | None = None,
                connect: Connect | None = None) -> bytes:
    """Fetch an http or https URL from an allowed host, within MAX_SECONDS. resolve and connect: replace the network in
    tests."""
    fetching = _Fetching(sources, resolve or resolve_name, connect or connect_to)
    try:
        async with asyncio.timeout(MAX_SECONDS):
            return await fetching.follow(url)
    except (OSError, ValueError, TimeoutError, EOFError, asyncio.LimitOverrunError):
        raise ImageRefused(NOT_FETCHED) from None


def is_global(address: str) -> bool:
    """Whether an address belongs to the public internet. All others could reach the server's own network."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address) and (found.ipv4_mapped or found.scope_id or found.is_site_local
                                                     or any(found in network for network in CARRIERS)):
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_private or found.is_loopback
                                    or found.is_link_local or found.is_unspecified)


async def resolve_name(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def connect_to(address: str, port: int, name: str | None) -> Stream:
    tls = None if name is None else await asyncio.to_thread(_tls)
    return await asyncio.open_connection(address, port, ssl=tls, server_hostname=name)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class _Fetching:
    def __init__(self, sources: MediaSources, resolve: Resolve, connect: Connect) -> None:
        self._sources, self._resolve, self._connect = sources, resolve, connect

    async def follow(self, url: str) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            answer = await self._get(self._checked(url))
            if answer.status == 200:
                return answer.body
            if answer.status not in REDIRECTS or not answer.location:
                raise ValueError("the answer is not a picture")
            url = urljoin(url, answer.location)
        raise ValueError("too many redirects")

    def _checked(self, url: str) -> SplitResult:
        """Parse a URL and raise ValueError unless it names an allowed host."""
        # Parsers disagree about spaces, control characters and backslashes.
        if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or set(url) & set(" \\\"<>^`{|}"):
            raise ValueError("the URL is too long, or has characters that parsers read differently")
        parts = urlsplit(url)
        if parts.scheme not in PORTS or "@" in parts.netloc or not self._sources.allows_host(_host(parts)):
            raise ValueError("the URL is not of an allowed host")
        if parts.port not in (None, *PORTS.values()):
            raise ValueError("the port is neither 80 nor 443")
        return parts

    async def _get(self, parts: SplitResult) -> HttpAnswer:
        host, port = _host(parts), parts.port or PORTS[parts.scheme]
        addresses = list(dict.fromkeys(await self._resolve(host, port)))
        if not addresses or not all(map(is_global, addresses)):
            raise ValueError("an address that is not global")
        reader, writer = await self._dial(addresses, port, host if parts.scheme == "https" else None)
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            lines = (f"GET {target} HTTP/1.1", f"Host: {parts.netloc}", "Accept: image/*", "Accept-Encoding: identity",
                     "User-Agent: outrider", "Connection: close", "", "")
            writer.write("\r\n".join(lines).encode("ascii"))
            return await read_answer(reader, self._sources.max_bytes)
        finally:
            writer.close()

    async def _dial(self, addresses: Sequence[str], port: int, name: str | None) -> Stream:
        """Connect to the first of the checked addresses that answers."""
        for address in addresses[:-1]:
            try:
                return await self._connect(address, port, name)
            except OSError:
                continue
        return await self._connect(addresses[-1], port, name)


def _host(parts: SplitResult) -> str:
    return (parts.hostname or "").removesuffix(".")
