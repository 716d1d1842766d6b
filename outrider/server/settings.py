"""ServerConfig: a frozen dataclass with every setting of the HTTP server and its default. Names are vLLM's where the
settings agree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from outrider.core.fields import INT32, INT64, Count, OneOf, Range, Text, check_fields, shown
from outrider.server.lora_modules import read_modules
from outrider.server.parsers.formats import REASONING_FORMATS, TOOL_FORMATS

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
TRANSFER_BACKENDS = ("gloo", "nccl")  # weights come by gloo under both names: NCCL would need a GPU for each process
RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of chat templates that bodies have fields for


@dataclass(frozen=True)
class ServerConfig:
    host: Text = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000  # 0: a free one, which is printed
    uds: Text | None = None  # path of a unix socket to listen at instead
    replicas: Annotated[int, Range(1, 1024)] = 1  # engines of this machine behind one front
    root_path: str = ""  # prefix of the routes at a proxy
    ssl_certfile: Text | None = None  # none: plain HTTP
    ssl_keyfile: Text | None = None  # none: in ssl_certfile
    ssl_ca_certs: Text | None = None  # none: clients need no certificate
    api_key: tuple[Text, ...] = ()  # none: every request is served
    admin: bool = False  # serve the routes that change the server for all clients
    lora_modules: tuple[Text, ...] = ()  # adapters as name=folder, or as JSON objects
    lora_root: Text | None = None  # the folder below which /v1/load_lora_adapter may load; None: it loads nothing
    weights_root: Text | None = None  # the folder below which /update_weights may read; None: it reads nothing
    weight_transfer_config: dict[str, Any] | None = None  # {"backend": ...}; None: no trainer may send weights
    served_model_name: tuple[Text, ...] = ()  # none: the model's own name
    chat_template: Text | None = None  # a file, a template's name or a template
    default_chat_template_kwargs: dict[str, Any] | None = None  # of requests that do not set them
    allowed_origins: tuple[Text, ...] = ()  # none: no CORS headers are sent
    allowed_hosts: tuple[Text, ...] = ()  # further names of the server, or *; none: host_names.py says which are served
    max_num_queued_reqs: Annotated[int, Range(0, INT32)] = 1024  # samples that may wait beside those that run
    max_body_bytes: Annotated[int, Range(1, INT64)] = 16 << 20
    max_prompts: Count = 256  # in one request to /v1/completions
    image_max_pixels: Annotated[int, Range(1, 1 << 28)] = 1 << 26  # of one image; a request may have twice as many
    image_max_bytes: Annotated[int, Range(1, INT32)] = 20 << 20  # of one image's file; a request may have twice as many
    allowed_media_domains: tuple[Text, ...] = ()  # hosts that images may be fetched from; none: nothing is fetched
    allowed_local_media_path: Text | None = None  # the folder of images that file URLs may name; None: none
    max_stored_responses: Annotated[int, Range(0, INT32)] = 1000  # of /v1/responses, for each key; 0: none is stored
    request_timeout: Annotated[float, Range(0.001, 1e9)] | None = None  # seconds a request may take
    shutdown_timeout: Annotated[float, Range(0, 1e9)] = 30.0  # seconds running requests get after SIGTERM
    stall_timeout: Annotated[float, Range(0.1, 1e9)] = 120.0  # seconds without a step until /health fails
    max_restarts: Annotated[int, Range(0, INT32)] = 3  # restarts of a failed engine within ten minutes
    pooling: Annotated[str, OneOf(("last", "mean"))] = "last"  # pooling of embeddings, unless a request says
    tool_call_parser: Annotated[str, OneOf(sorted(TOOL_FORMATS))] | None = None  # none: requests with tools are refused
    reasoning_parser: Annotated[str, OneOf(sorted(REASONING_FORMATS))] | None = None  # none: reasoning is content
    enable_force_include_usage: bool = False  # streams count tokens in every chunk, unasked
    return_tokens_as_token_ids: bool = False  # of requests that do not say
    strict: bool = False  # refuse fields of bodies that have no effect here
    enable_log_requests: bool = False  # one line for every request that ended
    log_format: Annotated[str, OneOf(LOG_FORMATS)] = "text"
    otlp_traces_endpoint: Text | None = None  # address of an OpenTelemetry collector; None: no traces
    trace_steps_per_second: Annotated[float, Range(0, 1e6)] = 1.0  # at most so many steps become spans; 0: none
    uvicorn_log_level: Annotated[str, OneOf(LOG_LEVELS)] = "warning"

    def __post_init__(self) -> None:
        check_fields("", self)
        read_modules(self.lora_modules)
        if self.lora_root is not None and not (self.admin and self.api_key):
            raise ValueError("lora_root lets clients load adapters: set admin, and api_key to a key that only those "
                             "clients have")
        if self.lora_root is not None and not Path(self.lora_root).is_dir():
            raise ValueError(f"lora_root must be a folder, got {shown(self.lora_root)}")
        if self.weights_root is not None and not (self.admin and self.api_key):
            raise ValueError("weights_root lets clients replace weights: set admin, and api_key to a key that only "
                             "those clients have")
        if self.weights_root is not None and not Path(self.weights_root).is_dir():
            raise ValueError(f"weights_root must be a folder, got {shown(self.weights_root)}")
        self._check_transfer()
        for name in self.served_model_name:
            if name != name.strip() or not name.isprintable():
                raise ValueError(f"served_model_name must be a name without spaces around it, got {shown(name)}")
        for name in (self.default_chat_template_kwargs or {}).keys() & set(RESERVED):
            raise ValueError(f"default_chat_template_kwargs must not set {name}: requests have a field for it")
        for key in self.api_key:
            if not re.fullmatch("[!-~]([ -~]*[!-~])?", key):  # no client could send it in a header
                raise ValueError("api_key must be ASCII, without spaces or line breaks at its ends: choose another key")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ValueError(f"allowed_origins must be * or an origin such as https://example.org, got "
                                 f"{shown(origin)}")
        for name in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", name, re.ASCII):
                raise ValueError("allowed_hosts must be * or names such as llm.example.org or *.example.org, without a "
                                 f"port (IP addresses need no entry), got {shown(name)}")
        if not re.fullmatch(r"(/[\w.~-]+)*", self.root_path, re.ASCII):
            raise ValueError("root_path must begin with a slash and not end with one, such as /llm, got "
                             f"{shown(self.root_path)}")
        for name in self.allowed_media_domains:
            if not re.fullmatch(r"(\*\.)?[\w-]+(\.[\w-]+)+", name, re.ASCII):
                raise ValueError("allowed_media_domains must be host names such as images.example.org or "
                                 f"*.example.org, without a scheme and a port, got {shown(name)}")
        folder = self.allowed_local_media_path
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"allowed_local_media_path must be a folder, got {shown(folder)}")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if self.ssl_certfile is None and getattr(self, name) is not None:
                raise ValueError(f"{name} needs ssl_certfile, which is missing: add it, or leave {name} out")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.fullmatch(r"https?://\S+", endpoint):
            raise ValueError(f"otlp_traces_endpoint must be a URL, such as http://127.0.0.1:4318/v1/traces, got "
                             f"{shown(endpoint)}")

    @property
    def image_body_bytes(self) -> int:
        """Return how many more bytes than others the body of a request with images may have: two files of full size in
        base64."""
        return 2 * -(-self.image_max_bytes // 3) * 4

    def _check_transfer(self) -> None:
        given = self.weight_transfer_config
        if given is None:
            return
        is_known = {"backend"} <= set(given) <= {"backend", "device"} and given["backend"] in TRANSFER_BACKENDS
        if not is_known or not isinstance(given.get("device", "cuda:0"), str):
            raise ValueError(f'weight_transfer_config must be {{"backend": "gloo"}}, or with "nccl" as trainers write '
                             f'it, and perhaps a "device" such as "cuda:0", got {shown(given)}')
        if self.replicas > 1:
            raise ValueError("weight_transfer_config needs a server without replicas, to which a trainer sends weights "
                             "once: leave out one of the two")
        if not self.admin:
            raise ValueError("weight_transfer_config lets clients replace weights: set admin, and let only trainers "
                             "reach the server")
