"""The socket at which `outrider serve` listens: an address or a unix socket, with or without TLS. A port in use, a
missing file and a key that does not fit the certificate are refused before the model is loaded."""

from __future__ import annotations

import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from outrider.server.settings import ServerConfig


@contextmanager
def listening(config: ServerConfig) -> Iterator[tuple[socket.socket, str]]:
    """A context with the socket, and its address as text. The file of a unix socket is removed at the end."""
    if config.uds is not None:
        path = Path(config.uds)
        with closing(_unix_socket(path)) as own:
            try:
                yield own, f"unix:{path}"
            finally:
                path.unlink(missing_ok=True)
    else:
        with closing(_network_socket(config)) as own:
            scheme = "http" if config.ssl_certfile is None else "https"
            yield own, "{}://{}:{}".format(scheme, *own.getsockname()[:2])


def _network_socket(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((config.host, config.port))
        own.listen()  # until then another server could bind the port too
    except (OSError, UnicodeError) as error:  # the second: a host that cannot be a name
        own.close()
        reason = getattr(error, "strerror", None) or "it is no name of a host"
        raise ValueError(f"cannot listen at {config.host}:{config.port}: {reason}; choose another with --port or "
                         "--host") from None
    return own


def _unix_socket(path: Path) -> socket.socket:
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        own.bind(str(path))
        own.listen()
    except OSError as error:
        own.close()
        raise ValueError(f"cannot listen at --uds {path}: {error.strerror or error}; choose another path") from None
    return own


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a server that ended without removing it. Any other file stays, and raises an error."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return  # binding says that the path is taken
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def tls_options(config: ServerConfig) -> dict[str, Any]:
    """uvicorn's options for TLS; none without a certificate. Raises ValueError for files that uvicorn could not use."""
    if config.ssl_certfile is None:
        return {}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    names = "--ssl-certfile and --ssl-keyfile"
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _refuse_passphrase)
        if config.ssl_ca_certs is not None:
            names = "--ssl-ca-certs"
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # ssl.SSLError is one, too
        missing = [f"{path} is not a file" for path in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
                   if path is not None and not Path(path).is_file()]
        raise ValueError(f"{names} cannot be used: {', '.join(missing) or error.strerror or error}") from None
    return {"ssl_certfile": config.ssl_certfile, "ssl_keyfile": config.ssl_keyfile, "ssl_ca_certs": config.ssl_ca_certs,
            "ssl_cert_reqs": ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED}


def _refuse_passphrase() -> str:
    raise ValueError("--ssl-keyfile has a passphrase, which cannot be asked for: give a key without one")
