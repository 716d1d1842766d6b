"""What the flags of `outrider serve` are for, in the words of its help."""

from __future__ import annotations

SERVER_HELP = {
    "host": "address to listen at; 0.0.0.0 for all",
    "port": "port to listen at; 0 for a free one",
    "uds": "listen at a unix socket with this path, instead of a host and a port",
    "root_path": "prefix under which a proxy serves the routes, as /llm",
    "ssl_certfile": "serve HTTPS, with the certificate (and those that signed it) in this PEM file",
    "ssl_keyfile": "the certificate's key, if it is in a file of its own; without a passphrase",
    "ssl_ca_certs": "serve only clients with a certificate that one in this PEM file signed",
    "api_key": "a key that requests must send (repeat for several; or set OUTRIDER_API_KEY)",
    "admin": "serve /sleep, /wake_up, /is_sleeping and /reset_prefix_cache, to every client that has a key",
    "served_model_name": "name of the model in requests and answers (repeat for several)",
    "chat_template": "a file with a chat template, or the name of one of the model's",
    "allowed_origins": "web page origin that may call the server (repeat for several)",
    "max_num_queued_reqs": "samples that may wait before requests are refused with 429",
    "max_body_bytes": "largest body of a request",
    "max_prompts": "most prompts in one request",
    "max_stored_responses": "most responses of /v1/responses that are kept for each key; 0 keeps none",
    "request_timeout": "seconds a request may take",
    "shutdown_timeout": "seconds that running requests get after SIGTERM",
    "stall_timeout": "seconds without a step until /health fails",
    "max_restarts": "how often a failed engine is started again within ten minutes",
    "pooling": "which hidden states an embedding is, unless its request says",
    "tool_call_parser": "how the model writes tool calls",
    "reasoning_parser": "how the model marks its reasoning",
    "enable_log_requests": "log one line for every request that ended",
    "log_format": "lines of text, or one JSON object a line",
    "otlp_traces_endpoint": "send OpenTelemetry traces there, as http://127.0.0.1:4318/v1/traces",
    "uvicorn_log_level": "what the HTTP server logs",
}
