"""Where images may come from: data URLs, and by the operator's leave files and hosts; nothing else, whatever a URL
says. No test uses a network: names are resolved and connections made by the tests' own functions."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.features.images import fetch as fetching
from outrider.features.images.fetch import NOT_FETCHED, MediaSources, fetch, is_global, read_data_url, read_file
from outrider.features.images.limits import ImageRefused
from tests.images.made_images import data_url, png

PUBLIC = "93.184.215.14"
ALLOWED = MediaSources(("good.example", "*.pics.example"), max_bytes=1000)


class Network:
    """Answers of name servers, and of whatever listens at an address, in turns. The last one is given again."""

    def __init__(self, names: Sequence[Sequence[str]] = ((PUBLIC,),), answers: Sequence[bytes] = (b"",)) -> None:
        self._names, self._answers = list(names), list(answers)
        self.resolved: list[tuple[str, int]] = []
        self.dialled: list[tuple[str, int, str | None]] = []
        self.sent: list[bytes] = []

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append((host, port))
        return self._names.pop(0) if len(self._names) > 1 else self._names[0]

    async def connect(self, address: str, port: int, name: str | None) -> fetching.Stream:
        self.dialled.append((address, port, name))
        reader = asyncio.StreamReader()
        reader.feed_data(self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])
        reader.feed_eof()
        return reader, self  # type: ignore[return-value]

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        pass

    def fetch(self, url: str, sources: MediaSources = ALLOWED) -> bytes:
        return asyncio.run(fetch(url, sources, self.resolve, self.connect))

    def refuses(self, url: str, sources: MediaSources = ALLOWED) -> None:
        with pytest.raises(ImageRefused) as refused:
            self.fetch(url, sources)
        assert str(refused.value) == NOT_FETCHED and refused.value.__cause__ is None


def answer(body: bytes = b"pixels", head: str = "", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def redirect(to: str) -> bytes:
    return answer(b"", f"Location: {to}\r\n", "302 Found")


def test_an_allowed_host() -> None:
    network = Network(answers=[answer()])
    assert network.fetch("https://good.example/a/b.png?c=d") == b"pixels"
    assert network.resolved == [("good.example", 443)] and network.dialled == [(PUBLIC, 443, "good.example")]
    lines = network.sent[0].decode().split("\r\n")
    assert lines[0] == "GET /a/b.png?c=d HTTP/1.1" and "Host: good.example" in lines
    network = Network(answers=[answer()])
    assert network.fetch("http://A.Pics.Example./") == b"pixels"
    assert network.dialled == [(PUBLIC, 80, None)]


@pytest.mark.parametrize("answered", [
    answer(b"pixels", "Content-Length: 6\r\n"), answer(b"pixels and more", "content-length: 6\r\n"),
    answer(b"3\r\npix\r\n3;x=y\r\nels\r\n0\r\n\r\n", "Transfer-Encoding: chunked\r\n"),
    answer(b"pixels", "Content-Encoding: identity\r\n"), redirect("/other") + b"", redirect("//b.pics.example/x"),
])
def test_bodies(answered: bytes) -> None:
    assert Network(answers=[answered, answer()]).fetch("https://good.example/") == b"pixels"


# Addresses of URLs whose hosts are not allowed, or whose forms parsers understand differently.
HOSTILE_URLS = [
    "http://127.0.0.1/", "http://localhost/", "http://[::1]/", "http://0.0.0.0/", "http://0/", "http://127.1/",
    "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://169.254.169.254/latest/meta-data/",
    "http://metadata.google.internal/", "http://10.0.0.1/", "http://192.168.1.1/", "http://[::ffff:127.0.0.1]/",
    "http://[fe80::1%25eth0]/", "http://other.example/", "http://good.example.evil.example/",
    "http://evilgood.example/", "http://pics.example/", "http://evilpics.example/", "http://good.example@127.0.0.1/",
    "http://user:word@good.example/", "http://127.0.0.1#@good.example/", "http://127.0.0.1\\@good.example/",
    "http://good.example\\.evil.example/", "http://good.example:22/", "http://good.example:8000/",
    "http://good.example:99999/", "http://good.example:/x y", "http://good.example/\r\nHost: x", "http:///x",
    "http://good.example%00.evil.example/", "http://good.example%2eevil/", "ftp://good.example/a.png",
    "gopher://good.example/", "file:///etc/passwd", "javascript:1", "//good.example/", "good.example/a.png", "",
    "http://ɢood.example/", "http://good。example/", "http://good.example\t/", " http://good.example/",
    "http:good.example", "http://good.example/" + "a" * 5000, "unix:///var/run/docker.sock", "http://[good.example]/",
    "http://good..example/",
]
# Addresses that an allowed name may have, none of which belongs to the internet.
HOSTILE_ADDRESSES = [
    "127.0.0.1", "127.255.255.254", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0",
    "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1", "::7f00:1", "fec0::1", "nonsense", "",
]


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_a_hostile_url_reaches_nothing(url: str) -> None:
    network = Network(answers=[answer()])
    network.refuses(url)
    assert network.resolved == [] and network.dialled == []


@pytest.mark.parametrize("address", HOSTILE_ADDRESSES)
def test_a_name_with_an_address_that_is_not_global(address: str) -> None:
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        network = Network([addresses], [answer()])
        network.refuses("https://good.example/")
        assert network.dialled == []


def test_no_host_is_allowed_unless_one_is_named() -> None:
    network = Network(answers=[answer()])
    network.refuses("https://good.example/", MediaSources())
    assert network.resolved == []


def test_global_addresses() -> None:
    assert all(map(is_global, ["8.8.8.8", PUBLIC, "2606:4700::1111", "2a00:1450:4001::200e"]))


def test_a_name_server_that_changes_its_answer() -> None:
    """The first answer is checked and dialled; the second, of this server's own network, is never asked for."""
    network = Network([[PUBLIC], ["127.0.0.1"]], [answer()])
    assert network.fetch("http://good.example/") == b"pixels"
    assert network.dialled == [(PUBLIC, 80, None)] and len(network.resolved) == 1
    network = Network([[PUBLIC], ["127.0.0.1"]], [redirect("/again"), answer()])
    network.refuses("http://good.example/")  # a redirect is a new request, whose address is checked again
    assert network.dialled == [(PUBLIC, 80, None)]


@pytest.mark.parametrize("to", ["http://127.0.0.1/", "http://other.example/", "file:///etc/passwd",
                                "http://good.example:22/", "http://a:b@good.example/", "", "gopher://good.example/"])
def test_a_redirect_is_checked_like_the_first_url(to: str) -> None:
    network = Network(answers=[redirect(to), answer()])
    network.refuses("http://good.example/")
    assert len(network.dialled) == 1


def test_three_redirects_and_no_more() -> None:
    assert Network(answers=[*[redirect("/x")] * 3, answer()]).fetch("http://good.example/") == b"pixels"
    network = Network(answers=[redirect("/x")])
    network.refuses("http://good.example/")
    assert len(network.dialled) == 4


@pytest.mark.parametrize("answered", [
    b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\n", answer(status="404 Not Found"), answer(status="204 None"),
    answer(b"x", "Content-Encoding: gzip\r\n"), answer(b"x", "Transfer-Encoding: gzip, chunked\r\n"),
    answer(b"x", "Content-Length: 1001\r\n"), answer(b"x", "Content-Length: -1\r\n"),
    answer(b"x", "Content-Length: 2\r\n"),
    answer(b"x" * 1001), answer(b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked\r\n"),
    answer(b"-1\r\n", "Transfer-Encoding: chunked\r\n"), answer(b"zz\r\n", "Transfer-Encoding: chunked\r\n"),
    answer(b"1\r\nxx", "Transfer-Encoding: chunked\r\n"), answer(head="a: b\r\n" * 101),
    b"HTTP/1.1 200 OK\r\n" + b"a" * (1 << 17), redirect("/")[:-2],
])
def test_an_answer_that_is_no_picture(answered: bytes) -> None:
    Network(answers=[answered]).refuses("http://good.example/")


def test_all_together_may_take_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_SECONDS", 0.05)

    class Slow(Network):
        async def connect(self, address: str, port: int, name: str | None) -> fetching.Stream:
            return asyncio.StreamReader(), self  # type: ignore[return-value]  # which never says a word

    Slow().refuses("http://good.example/")


def test_another_address_of_the_name_is_dialled_if_one_does_not_answer() -> None:
    class Half(Network):
        async def connect(self, address: str, port: int, name: str | None) -> fetching.Stream:
            if address == "8.8.8.8":
                raise ConnectionRefusedError
            return await super().connect(address, port, name)

    network = Half([["8.8.8.8", PUBLIC]], [answer()])
    assert network.fetch("http://good.example/") == b"pixels" and network.dialled == [(PUBLIC, 80, None)]


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    network = Network(answers=[answer()])
    assert network.fetch("http://good.example/") == b"pixels" and network.dialled[0][0] == PUBLIC


def test_data_urls() -> None:
    data = png()
    assert read_data_url(data_url(data)) == data
    assert read_data_url(data_url(data).replace("data:image/png;base64", "data:IMAGE/jpeg;BASE64")) == data
    large = os.urandom(3 << 18)
    assert read_data_url(data_url(large)) == large


@pytest.mark.parametrize("url", [
    "data:image/png;base64,", "data:image/png;base64", "data:,", "data:image/png,abcd", "data:text/html;base64,aaaa",
    "data:image/png;base64,aaa", "data:image/png;base64,aa=a", "data:image/png;base64,aaaa\n",
    "data:image/png;base64,aa aa", "data:image/png;base64,aa-_", "data:image/png;base64,====",
    "data:image/png;base64,a===", "data:image/png;base64,é",
    "data:image/png;base64,aaa=aaaa", "data:image/png;base64,aaaa=", "data:image/png;base64,%61%61%61%61",
    "data:image/png;base64," + "a" * (1 << 18) + "=" + "a" * 3,
])
def test_base64_is_strict(url: str) -> None:
    with pytest.raises(ImageRefused, match="valid base64"):
        read_data_url(url)


def test_data_urls_have_a_limit() -> None:
    text = base64.b64encode(bytes(1001)).decode()
    with pytest.raises(ImageRefused, match="more than 900 bytes"):
        read_data_url("data:image/png;base64," + text, 900)
    assert len(read_data_url("data:image/png;base64," + text, 1001)) == 1001


def refuses_file(url: str, sources: MediaSources) -> None:
    with pytest.raises(ImageRefused) as refused:
        read_file(url, sources)
    assert str(refused.value) == NOT_FETCHED


def test_files_below_the_folder_alone(tmp_path: Path) -> None:
    folder, outside = tmp_path / "pictures", tmp_path / "secret"
    folder.mkdir()
    outside.write_bytes(b"secret")
    (folder / "a b.png").write_bytes(b"pixels")
    (folder / "inside").symlink_to(folder / "a b.png")
    (folder / "out").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "large").write_bytes(bytes(1001))
    os.mkfifo(folder / "pipe")
    sources = MediaSources(folder=str(folder), max_bytes=1000)
    for url in (f"file://{folder}/a%20b.png", f"file://localhost{folder}/a%20b.png", f"file://{folder}/inside",
                f"file://{folder}/../pictures/a%20b.png"):
        assert read_file(url, sources) == b"pixels"
    for path in ("out", "up/secret", "../secret", "%2e%2e/secret", "circle", "large", "pipe", "none", "", "a%00",
                 "%ff"):
        refuses_file(f"file://{folder}/{path}", sources)
    for url in (f"file://host{folder}/inside", f"file://{folder}/inside?x", "file:///etc/passwd", "file:relative",
                "file://", f"file://{tmp_path}/pictures2/x", "file:///dev/zero", "file:///proc/self/environ"):
        refuses_file(url, sources)
    refuses_file(f"file://{folder}/inside", MediaSources())
