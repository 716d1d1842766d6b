"""The HTTP server: OpenAI's routes in front of one AsyncLLM. `app.build_app` makes the application; `outrider serve`
runs it. Nothing is imported here, so that the command line can read the settings without FastAPI.

    request -> http_protocol (limits on headers) -> guard (host names, keys, limits on the body) -> app (routes)
            -> bodies, protocol (JSON, fields) -> service, admission (prompts, places in the queue)
            -> generation (engine) -> work (one JSON object, or server-sent events)

The engine's worker is a separate process, so tokenizing and HTTP delay no step. The worker ends with the server's
process. Long work runs in threads that tenants share (`fair_threads`). `engine_host` loads, watches and restarts the
engine. When a request forces a tool call, `forms` constrains the output: to the model's own call format with the parser
`hermes`, otherwise to a JSON list, which every model can write.
"""
