"""The names that a server answers to: a web page cannot use a server without keys by DNS rebinding."""

from __future__ import annotations

import socket

import pytest

from outrider.commands.serve_replicas import behind_front
from outrider.replicas.replica import Replica
from outrider.server.host_names import HostNames
from outrider.server.settings import ServerConfig
from tests.server.rig import MODEL, Served, served_fixture

EVIL = {"host": "page.example", "origin": "http://page.example"}
LOCAL = ["localhost", "localhost:8000", "LOCALHOST.:8000", "a.localhost", "127.0.0.1:8000", "[::1]:8000", "[::1]",
         "192.168.7.1:8000", "10.0.0.9", "host.docker.internal:8000"]
PRIVATE = ["gpu-box:8000", "outrider", "outrider.default.svc", "outrider.default.svc.cluster.local:80", "box.local"]
FOREIGN = ["page.example", "page.example:8000", "localhost.page.example", "127.0.0.1.page.example",
           "[::1].page.example", "page.example.", "xlocalhost.org", "127.0.0.1@page.example", "local.example",
           "1.2.3.4.5", "\xe9.example"]

served = served_fixture(admin=True)


def names_of(**settings: object) -> HostNames:
    found = HostNames.from_config(ServerConfig(**settings))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_server_of_this_machine_has_local_names(host: str) -> None:
    names = names_of(host=host)
    assert all(map(names.allows, LOCAL))
    assert not any(map(names.allows, [*FOREIGN, *PRIVATE]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.7.1", "gpu.example.org"])
def test_a_server_of_a_network_has_the_names_of_its_neighbours_too(host: str) -> None:
    names = names_of(host=host)
    assert all(map(names.allows, [*LOCAL, *PRIVATE]))
    assert not any(map(names.allows, FOREIGN))
    assert names.allows("GPU.example.org:8000") == (host == "gpu.example.org")


def test_names_are_given() -> None:
    names = names_of(allowed_hosts=("llm.example.org", "*.Example.com"), api_key=("a",))
    assert all(map(names.allows, [*LOCAL, "LLM.example.org:443", "a.example.com", "a.b.example.com."]))
    others = ["example.org", "a.llm.example.org", "example.com", "aexample.com", "example.net", "neighbour"]
    assert any(map(names.allows, others)) is False


@pytest.mark.parametrize("settings", [{"api_key": ("a",)}, {"uds": "/tmp/x"}, {"ssl_certfile": "x"},
                                      {"allowed_hosts": ("*",)}])
def test_where_a_page_can_do_nothing_every_name_is_served(settings: dict[str, object]) -> None:
    assert HostNames.from_config(ServerConfig(**settings)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llm.example.org:80", "http://llm.example.org", "a b", "", "*.", "*a.example"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=(name,))


def test_replicas_leave_the_names_to_the_front() -> None:
    config = behind_front(ServerConfig(replicas=2, allowed_hosts=("a.example",)), Replica(0, "/tmp/0.sock"))
    assert HostNames.from_config(config) is None


@pytest.mark.parametrize(("method", "path"), [
    ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/"), ("GET", "/health"), ("POST", "/sleep"),
    ("POST", "/reset_prefix_cache"), ("POST", "/v1/completions"), ("GET", "/no/such/route")])
def test_a_page_that_rebinds_its_name_gets_nothing(served: Served, method: str, path: str) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1} if path == "/v1/completions" else None
    refused = served.http.request(method, path, headers=EVIL, json=body)
    error = refused.json()["error"]
    assert refused.status_code == 403 and error["type"] == "PermissionDeniedError" and refused.headers["x-request-id"]
    assert "'page.example'" in error["message"] and "--allowed-hosts" in error["message"]
    assert not served.http.get("/is_sleeping").json()["is_sleeping"]


def test_programs_are_served_as_before(served: Served) -> None:
    port = served.url.rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "10.1.2.3"):
        assert served.http.get("/health", headers={"host": host}).status_code == 200
        own = {"host": host, "origin": f"http://{host}"}
        assert served.http.post("/reset_prefix_cache", headers=own).status_code == 200


def status_of(served: Served, head: bytes) -> int:
    """The status of an answer to a request as it is."""
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as own:
        own.sendall(head)
        return int(own.recv(100).split()[1])


def test_heads_that_no_browser_sends(served: Served) -> None:
    assert status_of(served, b"GET /health HTTP/1.0\r\n\r\n") == 200
    assert status_of(served, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: page.example\r\n\r\n") == 403
    assert status_of(served, b"GET http://localhost/health HTTP/1.1\r\nHost: page.example\r\n\r\n") == 403
    assert status_of(served, b"GET /health HTTP/1.1\r\nHost: \xff\x1b[31m\r\n\r\n") in (400, 403)
