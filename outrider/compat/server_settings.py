"""A table of the flags of `vllm serve` without a counterpart here, each with its effect or a replacement. No torch."""

from __future__ import annotations

from outrider.compat.settings import NO_IMAGES, Explained, Meaning, Refused

OFF = (None, False)
NO_OWN_CODE = "the server imports nothing by name: put a proxy in front of it"

VLLM_SERVER_SETTINGS: dict[str, Meaning] = {
    "enable_auto_tool_choice": Explained("tool_choice auto works wherever tool_call_parser is given", is_switch=True),
    "exclude_tools_when_tool_choice_none": Explained("with tool_choice none the model sees no tools", is_switch=True),
    "enable_prompt_tokens_details": Explained("usage always says how many tokens were cached", is_switch=True),
    "enable_per_request_metrics": Explained("answers always have metrics", is_switch=True),
    "enable_server_load_tracking": Explained("/load always counts", is_switch=True),
    "enable_tokenizer_info_endpoint": Explained("/tokenizer_info is always there", is_switch=True),
    "enable_request_id_headers": Explained("answers always have the header x-request-id", is_switch=True),
    "enable_offline_docs": Explained("/docs loads nothing from elsewhere", is_switch=True),
    "enable_log_deltas": Explained("texts are never logged", is_switch=True),
    "enable_log_outputs": Refused("texts are never logged", OFF, is_switch=True),
    "max_log_len": Explained("texts are never logged"),
    "log_error_stack": Explained("unexpected errors are logged with their stack", is_switch=True),
    "disable_uvicorn_access_log": Explained("requests are not logged unless enable_log_requests is set",
                                            is_switch=True),
    "disable_access_log_for_endpoints": Explained("requests are not logged unless enable_log_requests is set"),
    "disable_frontend_multiprocessing": Explained("the worker has a process of its own", is_switch=True),
    "disable_fastapi_docs": Refused("/docs shows the fields of bodies and nothing else", OFF, is_switch=True),
    "fingerprint_mode": Explained("answers have no system_fingerprint"),
    "chat_template_content_format": Refused("chat templates read the contents of messages as text",
                                            (None, "auto", "string")),
    "trust_request_chat_template": Refused("a template of a request's own is not run: use chat_template", OFF,
                                           is_switch=True),
    "response_role": Refused("answers have the role assistant", (None, "assistant")),
    "tool_parser_plugin": Refused("parsers are built in: use tool_call_parser", (None, "")),
    "tool_server": Refused("tools are run by the client"),
    "middleware": Refused(NO_OWN_CODE, (None, [])),
    "allow_credentials": Refused("pages of other origins send a key in a header", OFF, is_switch=True),
    "allowed_methods": Refused("give allowed_origins", (None, ["*"])),
    "allowed_headers": Refused("give allowed_origins", (None, ["*"])),
    "enable_ssl_refresh": Refused("start the server again with the new certificate", OFF, is_switch=True),
    "ssl_cert_reqs": Refused("with ssl_ca_certs clients need a certificate, and otherwise none", (None, 0)),
    "ssl_ciphers": Refused("the ciphers are those of Python's ssl module"),
    "api_server_count": Refused("one process serves HTTP", (None, 1)),
    "anthropic_disabled_thinking_effort": Explained("a template without thinking gets no effort"),
    "cohere_format": Explained("there are no routes of Cohere"),
    "cohere_is_reasoning_model": Explained("reasoning_parser says how reasoning is parsed", is_switch=True),
    "enable_flash_late_interaction": Explained("scores are computed by the model's head", is_switch=True),
    "grpc_port": Refused("the server speaks HTTP"),
    "reasoning_effort_map": Refused("a template reads reasoning_effort as it is given", (None, {})),
    "sse_keep_alive_interval": Explained("a stream has its first bytes when its first token is there"),
    "tool_strict_level": Explained("tools with strict are held to their schemas"),
    "trust_request_mm_kwargs": Refused(NO_IMAGES, OFF, is_switch=True),
    **dict.fromkeys(("data_parallel_supervisor_port", "dp_supervisor_probe_failure_threshold",
                     "dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s"),
                    Explained("--replicas starts replicas and watches over them")),
    "headless": Explained("a node with a node_rank above 0 serves no requests", is_switch=True),
}
