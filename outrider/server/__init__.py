"""The HTTP server: OpenAI's routes in front of one AsyncLLM. `app.build_app` makes the application; `outrider serve`
runs it. Nothing is imported here, so that the command line can read the settings without FastAPI.
"""
