"""`outrider run-batch`: answers a file of requests, in OpenAI's batch format, with a file of answers."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from outrider.async_llm import AsyncLLM
from outrider.commands.parser import UsageError, engine_config
from outrider.commands.serve import NEEDS, check_adapters, model_name, server_config
from outrider.commands.serve_files import chat_template, check_files
from outrider.core.deep_thread import end_process
from outrider.core.fields import INT32
from outrider.core.status_line import say
from outrider.engine.progress import bar
from outrider.engine.start import start_engine

if TYPE_CHECKING:
    from outrider.server.service import Service

LINES_PER_REQUEST = 2  # lines in memory for each request that can run: others are ready when one ends


def run(args: argparse.Namespace) -> int:
    try:
        from outrider.server.engine_host import EngineHost
        from outrider.server.service import Service
    except ModuleNotFoundError as error:
        raise ValueError(f"{NEEDS.replace('serve', 'run-batch')} ({error.name} is missing)") from None
    engine, config = engine_config(args), replace(server_config(args), api_key=(), max_num_queued_reqs=INT32)
    check_adapters(engine, config)
    template = chat_template(config.chat_template)
    given, written = Path(args.input_file), Path(args.output_file)
    _check_paths(given, written)
    check_files(engine, template)
    with given.open("rb") as source, written.open("ab") as target:  # known to be writable before the model is loaded
        llm = AsyncLLM.around(start_engine(engine))
        target.truncate(0)
        try:
            ready = asyncio.Event()
            host = EngineHost(lambda: llm, max_restarts=0, on_serving=ready.set)
            service = Service(host, config, config.served_model_name or (model_name(engine.model),), template)
            num_lines, num_errors = asyncio.run(_run(service, ready, source, target))
        finally:
            llm.shutdown()
    say(f"outrider: {num_lines} lines answered, {num_errors} of them with an error, in {written}")
    status = 1 if num_errors else 0
    end_process(status)
    return status


def _check_paths(given: Path, written: Path) -> None:
    for path, flag in ((given, "--input-file"), (written, "--output-file")):
        if "://" in str(path) or ":/" in str(path):
            raise UsageError(f"{flag} {path}: only files of this machine are read and written: give a path")
    if not given.is_file():
        raise UsageError(f"--input-file {given} is not a file: name one")
    if written.exists() and written.samefile(given):
        raise UsageError("--output-file is the input file: choose another")


async def _run(service: Service, ready: asyncio.Event, source: IO[bytes], target: IO[bytes]) -> tuple[int, int]:
    """Answer all lines once the engine is `ready`. Returns the number of lines and the number of lines with an
    error."""
    from outrider.server.app import build_app
    from outrider.server.batch_file import answer_lines, read_lines

    watch = asyncio.create_task(service.host.run())
    await ready.wait()
    num_errors = num_lines = 0
    max_at_once = LINES_PER_REQUEST * service.host.llm.engine.limits.max_requests
    lines = read_lines(source, service.config.max_body_bytes + service.config.image_body_bytes * service.takes_images)
    try:
        with bar(desc="lines", unit="line") as progress:
            async with aclosing(answer_lines(build_app(service), lines, max_at_once)) as answers:
                async for answer in answers:
                    target.write(answer.json)
                    target.flush()
                    num_lines += 1
                    num_errors += answer.is_error
                    progress.update()
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    return num_lines, num_errors
