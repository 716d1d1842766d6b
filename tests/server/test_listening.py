"""Where the server listens: TLS with and without certificates of clients, a unix socket, a prefix at a proxy."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from outrider.async_llm import AsyncLLM
from outrider.commands.listening import listening, tls_options
from outrider.server.app import build_app
from outrider.server.engine_host import EngineHost
from outrider.server.http_protocol import BoundedHttp
from outrider.server.service import Service
from outrider.server.settings import ServerConfig
from tests.server.rig import MODEL, PATIENCE


def no_engine() -> AsyncLLM:
    raise ValueError("these tests need none")


@contextmanager
def served(**settings: Any) -> Iterator[str]:
    """The address of a server without an engine, run as the command runs it."""
    config = ServerConfig(port=0, **settings)
    app = build_app(Service(EngineHost(no_engine), config, (MODEL,)))
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedHttp, log_level="error", lifespan="on",
                                           **tls_options(config)))
    with listening(config) as (own, address):
        thread = threading.Thread(target=server.run, kwargs={"sockets": [own]})
        thread.start()
        try:
            end = time.monotonic() + PATIENCE
            while not server.started:
                assert time.monotonic() < end and thread.is_alive()
                time.sleep(0.01)
            yield address
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Paths of a certificate that signed itself and of its key, by file name; `secret.pem` is the key with a
    passphrase, and `other.pem` the key of another certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    folder = tmp_path_factory.mktemp("tls")
    for name, key in (("cert.pem", "key.pem"), ("cert2.pem", "other.pem")):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / key),
                "-out", str(folder / name))
    openssl("pkcs8", "-topk8", "-in", str(folder / "key.pem"), "-passout", "pass:secret", "-out",
            str(folder / "secret.pem"))
    (folder / "both.pem").write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return lambda name: str(folder / name)


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=PATIENCE)


def trusting(path: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=path)


def test_tls_with_a_certificate_and_its_key(certificate: Callable[[str], str]) -> None:
    with served(ssl_certfile=certificate("cert.pem"), ssl_keyfile=certificate("key.pem")) as url:
        assert url.startswith("https://")
        answer = httpx.get(f"{url}/version", verify=trusting(certificate("cert.pem")), timeout=PATIENCE)
        assert answer.status_code == 200 and answer.json()["version"]
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/version", verify=trusting(certificate("cert2.pem")), timeout=PATIENCE)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http{url.removeprefix('https')}/version", timeout=PATIENCE)


def test_clients_need_a_certificate_where_the_server_has_one_to_check_it_with(
    certificate: Callable[[str], str]
) -> None:
    with served(ssl_certfile=certificate("both.pem"), ssl_ca_certs=certificate("cert2.pem")) as url:
        context = trusting(certificate("cert.pem"))
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/version", verify=context, timeout=PATIENCE)
        context = trusting(certificate("cert.pem"))
        context.load_cert_chain(certificate("cert2.pem"), certificate("other.pem"))
        assert httpx.get(f"{url}/version", verify=context, timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize(("names", "said"), [
    ({"ssl_certfile": "none.pem"}, "none.pem is not a file"),
    ({"ssl_certfile": "cert.pem"}, "--ssl-certfile and --ssl-keyfile cannot be used"),
    ({"ssl_certfile": "cert.pem", "ssl_keyfile": "other.pem"}, "--ssl-certfile and --ssl-keyfile cannot be used"),
    ({"ssl_certfile": "cert.pem", "ssl_keyfile": "secret.pem"}, "has a passphrase"),
    ({"ssl_certfile": "both.pem", "ssl_ca_certs": "key.pem"}, "--ssl-ca-certs cannot be used"),
])
def test_files_of_tls_are_checked_before_the_start(certificate: Callable[[str], str], names: dict[str, str],
                                                   said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tls_options(ServerConfig(**{name: certificate(file) for name, file in names.items()}))  # type: ignore[arg-type]


def test_a_unix_socket_is_served_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "own.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()  # as a server leaves it that was killed
    with served(uds=str(path)) as address:
        assert address == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any",
                          timeout=PATIENCE) as client:
            assert client.get("/version").status_code == 200
        with pytest.raises(ValueError, match="Address already in use"), listening(ServerConfig(uds=str(path))):
            pass
        assert path.is_socket(), "a socket that is in use stays"
    assert not path.exists()


@pytest.mark.parametrize("name", ["file", "none/own.sock", 200 * "a"])
def test_a_path_that_cannot_be_a_socket_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="cannot listen at --uds"), listening(ServerConfig(uds=str(tmp_path / name))):
        pass
    assert (tmp_path / "file").read_text() == "kept"


def test_routes_have_the_prefix_of_a_proxy_or_not() -> None:
    with served(root_path="/llm/v2", api_key=("key",)) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert client.get("/llm/v2/ping").status_code == client.get("/ping").status_code == 503  # open, without engine
        for path in ("/version", "/llm/v2/version"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"Authorization": "Bearer key"}).status_code == 200
        wrong = client.post("/llm/v2/v1/messages", json={}).json()
        assert wrong["type"] == "error", "errors have the form of the route's API"
        schema = client.get("/llm/v2/openapi.json", headers={"Authorization": "Bearer key"}).json()
        assert schema["servers"] == [{"url": "/llm/v2"}]
        assert client.get("/llm/v2x/ping").status_code == 401


@pytest.mark.parametrize(("settings", "said"), [
    ({"root_path": "llm"}, "root_path must begin with a slash"),
    ({"root_path": "/llm/"}, "root_path must begin with a slash"),
    ({"ssl_keyfile": "key.pem"}, "ssl_keyfile needs ssl_certfile"),
    ({"ssl_ca_certs": "ca.pem"}, "ssl_ca_certs needs ssl_certfile"),
])
def test_settings_that_cannot_work_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServerConfig(**settings)  # type: ignore[arg-type]
