"""The front of several replicas: how requests are passed on, and what happens when a replica dies meanwhile.

Replicas are scripts at unix sockets here, so that each can die at a chosen byte."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from outrider.commands.serve_replicas import behind_front, guarded, socket_folder
from outrider.replicas.adapter_changes import AdapterChanges
from outrider.replicas.front import ReplicaFront
from outrider.replicas.policy import PrefixRouter
from outrider.replicas.replica import Replica, ReplicaState
from outrider.replicas.trainer_changes import TrainerChanges
from outrider.server.guard import App, Guard
from outrider.server.settings import ServerConfig

Answering = Callable[["Script", bytes, bytes, asyncio.StreamWriter], Awaitable[None]]
PROMPT = "a prompt of some length " * 10
JSON = {"Content-Type": "application/json"}


async def reply(writer: asyncio.StreamWriter, content: Any, status: int = 200) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nx-request-id: theirs\r\ncontent-length: %d\r\n"
                 b"\r\n%s" % (status, len(body), body))
    await writer.drain()


async def begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
                 b"\r\n9\r\ndata: 1\n\n\r\n")
    await writer.drain()


class Script:
    """A replica that answers by a function, and notes what it was asked."""

    def __init__(self, number: int, folder: Path, answering: Answering) -> None:
        self.replica = Replica(number, str(folder / str(number)), ReplicaState.SERVING)
        self.answering = answering
        self.asked: list[tuple[bytes, bytes]] = []  # heads and bodies
        self.closed = asyncio.Event()  # the front has closed a connection before the answer's end

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        body = await reader.readexactly(int(length[1]))
        self.asked.append((head, body))
        answer = asyncio.ensure_future(self.answering(self, head, body, writer))
        end = asyncio.ensure_future(reader.read())
        await asyncio.wait({answer, end}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            self.closed.set()
        answer.cancel()
        end.cancel()
        writer.close()


async def nothing() -> None:
    pass


@asynccontextmanager
async def fronted(*answering: Answering, keys: tuple[str, ...] = (), guard: Callable[[App], App] | None = None,
                  adapters: AdapterChanges | None = None,
                  trainer: TrainerChanges | None = None) -> AsyncIterator[tuple[httpx.AsyncClient, list[Script]]]:
    with tempfile.TemporaryDirectory() as name:  # paths of unix sockets are short
        scripts = [Script(i, Path(name), each) for i, each in enumerate(answering)]
        servers = [await asyncio.start_unix_server(each.serve, each.replica.socket_path) for each in scripts]
        front = ReplicaFront([each.replica for each in scripts], PrefixRouter(), adapters or AdapterChanges(),
                             trainer or TrainerChanges(), start=nothing, stop=nothing)
        app: App = Guard(front, keys=keys, max_body_bytes=1 << 20) if guard is None else guard(front)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            yield client, scripts
        for server in servers:
            server.close()
        assert [each.replica.num_live for each in scripts] == [0] * len(scripts)


async def echo(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    await reply(writer, {"replica": script.replica.number})


async def die(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def die_in_stream(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    await begin_stream(writer)
    writer.close()


async def refuse(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    await reply(writer, {"error": {"message": "full"}}, 429)


async def hang(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    await begin_stream(writer)
    await asyncio.Event().wait()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


async def complete(client: httpx.AsyncClient, text: str = PROMPT, **more: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": text, **more})


def test_prompts_with_one_beginning_go_to_one_replica_and_others_by_load() -> None:
    async def test() -> None:
        async with fronted(echo, echo) as (client, scripts):
            scripts[0].replica.num_live = 2
            first = (await complete(client)).json()
            scripts[0].replica.num_live, scripts[1].replica.num_live = 0, 3
            assert first == (await complete(client, PROMPT + "and more")).json() == {"replica": 1}
            assert (await complete(client, "another " * 20)).json() == {"replica": 0}
            scripts[1].replica.state = ReplicaState.NOT_HEALTHY
            assert (await complete(client)).json() == {"replica": 0}
            scripts[1].replica.num_live = 0

    run(test)


def test_the_request_and_the_answer_pass_unchanged() -> None:
    async def test() -> None:
        async with fronted(echo, keys=("k",)) as (client, (script,)):
            headers = {"Authorization": "Bearer k", "X-Request-Id": "mine", "Host": "example.org"}
            answer = await client.post("/v1/completions?x=%20y", json={"prompt": "é"}, headers=headers)
            head, body = script.asked[0]
            assert head.startswith(b"POST /v1/completions?x=%20y HTTP/1.1\r\n") and json.loads(body) == {"prompt": "é"}
            for line in (b"authorization: Bearer k", b"x-request-id: mine", b"host: example.org"):
                assert head.count(b"\r\n" + line + b"\r\n") == 1
            assert answer.headers.get_list("x-request-id") == ["mine"] and answer.json() == {"replica": 0}
            assert (await client.post("/v1/completions", json={})).status_code == 401 and len(script.asked) == 1

    run(test)


@pytest.mark.parametrize("bad", [die, refuse])
def test_a_request_whose_replica_dies_or_is_full_goes_to_another(bad: Answering) -> None:
    async def test() -> None:
        async with fronted(bad, echo) as (client, scripts):
            answer = await complete(client)
            assert answer.status_code == 200 and answer.json() == {"replica": 1}
            assert len(scripts[0].asked) == 1

    run(test)


def test_a_request_that_seems_to_kill_replicas_does_not_kill_them_all() -> None:
    async def test() -> None:
        async with fronted(die, die, echo) as (client, scripts):
            answer = await complete(client)
            assert answer.status_code == 503 and "has died" in answer.json()["error"]["message"]
            assert [len(each.asked) for each in scripts] == [1, 1, 0]
            messages = await client.post("/v1/messages", json={})
            assert messages.json()["type"] == "error"

    run(test)


def test_a_full_queue_everywhere_is_told_as_it_is() -> None:
    async def test() -> None:
        async with fronted(refuse, refuse) as (client, scripts):
            answer = await complete(client)
            assert answer.status_code == 429 and answer.json() == {"error": {"message": "full"}}
            for each in scripts:
                each.replica.state = ReplicaState.STARTING
            for path in ("/health", "/v1/models"):
                answer = await client.get(path)
                assert answer.status_code == 503 and "replica 1 is starting" in answer.text

    run(test)


def test_a_stream_that_had_begun_ends_with_an_error() -> None:
    async def test() -> None:
        async with fronted(die_in_stream) as (client, _):
            first, error, done = (await complete(client, stream=True)).text.strip().split("\n\n")
            assert first == "data: 1" and done == "data: [DONE]"
            assert "has died" in json.loads(error.removeprefix("data: "))["error"]["message"]
            text = (await client.post("/v1/messages", json={"stream": True})).text
            assert text.split("\n\n")[1].startswith('event: error\ndata: {"type":"error"')

    run(test)


def test_a_client_that_leaves_ends_its_request() -> None:
    async def test() -> None:
        async with fronted(hang) as (_, (script,)):
            sent: list[Any] = []
            front = ReplicaFront([script.replica], PrefixRouter(), AdapterChanges(), TrainerChanges(), start=nothing,
                                 stop=nothing)
            messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            messages.put_nowait({"type": "http.request", "body": b"{}", "more_body": False})

            async def send(message: Any) -> None:
                sent.append(message)
                messages.put_nowait({"type": "http.disconnect"})

            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
                     "headers": [], "X-Request-Id": "x"}
            await front(scope, messages.get, send)
            await script.closed.wait()
            assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]

    run(test)


def test_a_method_that_a_route_of_the_front_does_not_have_is_left_to_a_replica() -> None:
    async def other_method(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        await reply(writer, {"error": {"message": "this route has another method"}}, 405)

    async def test() -> None:
        async with fronted(other_method) as (client, _):
            for method, path in (("DELETE", "/health"), ("POST", "/metrics"), ("POST", "/load")):
                assert (await client.request(method, path)).status_code == 405
            assert (await client.head("/health")).status_code == (await client.post("/ping")).status_code == 200

    run(test)


def test_the_body_of_a_get_is_not_kept() -> None:
    """The guard does not bound such a body, and some routes need no key: it could fill the front's memory."""
    async def test() -> None:
        async with fronted(echo) as (client, (script,)):
            assert (await client.request("GET", "/v1/models", content=b"x")).status_code == 200
            assert [body for _, body in script.asked] == [b""]

    run(test)


def test_what_concerns_all_replicas_is_asked_of_all() -> None:
    async def answer(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        number = script.replica.number
        path = head.split()[1]
        if path == b"/sleep?level=1":
            await reply(writer, {"freed_bytes": 10, "seconds": float(number)})
        elif path == b"/reset_prefix_cache":
            await reply(writer, {"success": number == 0})
        elif path == b"/v1/cache_sessions/mine":
            await reply(writer, {"id": "mine", "deleted": 1})
        elif path == b"/metrics":
            await reply(writer, b'# HELP vllm:n N.\nvllm:n{engine="0"} 7\n')
        elif path.startswith(b"/v1/responses/resp-1") and number != 1:
            await reply(writer, {"error": {}}, 404)
        else:
            await reply(writer, {"replica": number})

    async def test() -> None:
        async with fronted(answer, answer) as (client, scripts):
            assert (await client.post("/sleep?level=1")).json() == {"freed_bytes": 20, "seconds": 1.0}
            assert (await client.post("/reset_prefix_cache")).json() == {"success": False}
            assert (await client.delete("/v1/cache_sessions/mine")).json() == {"id": "mine", "deleted": 2}
            metrics = (await client.get("/metrics")).text
            assert 'vllm:n{engine="0"} 7\nvllm:n{engine="1"} 7\n' in metrics
            assert (await client.get("/v1/responses/resp-1")).json() == {"replica": 1}
            body = {"previous_response_id": "resp-1"}
            assert (await client.post("/v1/responses", json=body)).json() == {"replica": 1}
            assert (await client.get("/load")).json() == {"server_load": 0}
            assert (await client.get("/health")).json()["status"] == "healthy"
            scripts[0].replica.state = ReplicaState.GONE
            assert (await client.get("/health")).json() == {"status": "degraded",
                                                            "replicas": {"0": "gone", "1": "serving"}}

    run(test)


def test_no_replica_is_asked_to_sleep_while_one_is_not_there() -> None:
    async def test() -> None:
        async with fronted(echo, echo) as (client, scripts):
            for state in (ReplicaState.GONE, ReplicaState.STARTING, ReplicaState.NOT_HEALTHY):
                scripts[1].replica.state = state
                answer = await client.post("/sleep?level=1")
                assert answer.status_code == 503 and f"replica 1 is {state.value}" in answer.text
            assert not scripts[0].asked and not scripts[1].asked
            assert (await client.post("/wake_up")).status_code == 200
            scripts[1].replica.state = ReplicaState.SERVING
            assert (await client.post("/sleep?level=1")).status_code == 200

    run(test)


async def take_weights(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    await reply(writer, {"status": "updated", "weights_version": 1})


async def refuse_weights(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    if head.startswith(b"POST /update_weights"):
        await reply(writer, {"error": {"message": "no space"}}, 400)
    else:
        await reply(writer, {"replica": script.replica.number})


UPDATE = {"update_info": {"path": "step-1.safetensors"}}


def test_a_replica_with_older_weights_than_the_others_serves_nothing() -> None:
    """Neither one that refused an update nor one that starts again, which reads its files, until the next update."""
    async def test() -> None:
        async with fronted(take_weights, refuse_weights) as (client, scripts):
            answer = await client.post("/update_weights", json=UPDATE)
            assert answer.status_code == 503 and "replicas 1 have not taken the weights" in answer.text
            health = (await client.get("/health")).json()
            assert health == {"status": "degraded", "replicas": {"0": "serving", "1": "at older weights than others"}}
            scripts[1].answering = take_weights
            answer = await client.post("/update_weights", json=UPDATE)
            assert answer.json() == {"status": "updated", "weights_version": 1}
            assert (await client.get("/health")).json()["status"] == "healthy"

    run(test)


def test_weights_are_changed_on_all_replicas_or_on_none() -> None:
    async def test() -> None:
        async with fronted(take_weights, take_weights) as (client, scripts):
            scripts[1].replica.state = ReplicaState.STARTING
            answer = await client.post("/update_weights", json=UPDATE)
            assert answer.status_code == 503 and "no weights were changed, because replica 1 is starting" in answer.text
            for path in ("/start_weight_update", "/finish_weight_update"):  # chunks could reach only some
                answer = await client.post(path)
                assert answer.status_code == 400 and "/update_weights" in answer.text
            assert not scripts[0].asked and not scripts[1].asked

    run(test)


def test_an_update_is_carried_out_though_its_client_goes_away() -> None:
    """Replicas do not notice: the front must still learn who has taken the weights."""
    asked, go = asyncio.Event(), asyncio.Event()

    async def slow(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await go.wait()
        await take_weights(script, head, body, writer)

    async def test() -> None:
        trainer = TrainerChanges()
        async with fronted(slow, refuse_weights, trainer=trainer) as (client, scripts):
            update = asyncio.ensure_future(client.post("/update_weights", json=UPDATE))
            await asked.wait()
            update.cancel()
            go.set()
            while scripts[1].replica.state is ReplicaState.SERVING:
                await asyncio.sleep(0.01)
            await trainer.bring(scripts[0].replica)
            assert trainer.state_of(scripts[0].replica) is ReplicaState.OLD_WEIGHTS

    run(test)


def test_a_pause_holds_on_all_replicas_or_on_none() -> None:
    async def refuse_pause(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        refused = head.startswith(b"POST /pause")
        await reply(writer, {"error": {"message": "no"}} if refused else {"replica": 1}, 400 if refused else 200)

    async def test() -> None:
        trainer = TrainerChanges()
        async with fronted(echo, refuse_pause, trainer=trainer) as (client, scripts):
            assert (await client.post("/pause")).status_code == 400
            assert [head.split()[1] for head, _ in scripts[0].asked] == [b"/pause", b"/resume"]
            scripts[1].asked.clear()
            await trainer.bring(scripts[1].replica)
            assert not scripts[1].asked

    run(test)


def test_a_resume_ends_a_pause_that_waits_and_needs_no_dead_replica() -> None:
    resumed = asyncio.Event()

    async def wait(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"POST /pause"):
            await resumed.wait()
            await reply(writer, {"error": {"message": "it was resumed"}}, 400)
        else:
            resumed.set()
            await reply(writer, {"status": "resumed"})

    async def test() -> None:
        trainer = TrainerChanges()
        async with fronted(wait, wait, trainer=trainer) as (client, scripts):
            pause = asyncio.ensure_future(client.post("/pause?mode=wait"))
            while not scripts[1].asked:
                await asyncio.sleep(0.01)
            scripts[1].replica.state = ReplicaState.GONE
            assert (await client.post("/resume")).json() == {"status": "resumed"}
            assert (await pause).status_code == 400
            scripts[1].asked.clear()
            await trainer.bring(scripts[1].replica)
            assert not scripts[1].asked

    run(test)


def test_a_replica_that_starts_again_is_behind_and_paused_like_the_others() -> None:
    async def test() -> None:
        trainer = TrainerChanges()
        async with fronted(take_weights, take_weights, trainer=trainer) as (client, scripts):
            replica = scripts[1].replica
            await trainer.bring(replica)
            assert not scripts[1].asked and trainer.state_of(replica) is ReplicaState.SERVING
            assert (await client.post("/pause?mode=keep")).status_code == 200
            await client.post("/update_weights", json=UPDATE)
            scripts[1].asked.clear()
            await trainer.bring(replica)
            assert [head.split()[1] for head, _ in scripts[1].asked] == [b"/pause?mode=keep"]
            assert trainer.state_of(replica) is ReplicaState.OLD_WEIGHTS
            await client.post("/resume")
            scripts[1].asked.clear()
            await trainer.bring(replica)
            assert not scripts[1].asked

    run(test)


def test_a_browser_gets_each_header_of_origins_once() -> None:
    origin = "https://example.org"
    config = ServerConfig(allowed_origins=(origin,), replicas=2)

    async def answer(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await JSONResponse({})(scope, receive, send)

        own = guarded(app, behind_front(config, script.replica))  # a replica guards itself as the front does
        async with httpx.AsyncClient(transport=httpx.ASGITransport(own), base_url="http://replica") as client:
            answer = await client.post("/v1/completions", headers={"origin": origin}, json={})
        lines = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.multi_items())
        writer.write(f"HTTP/1.1 200 X\r\n{lines}\r\n".encode() + answer.content)
        await writer.drain()

    async def test() -> None:
        async with fronted(answer, guard=lambda front: guarded(front, config)) as (client, _):
            found = await client.post("/v1/completions", headers={"origin": origin}, json={"prompt": PROMPT})
            names = [name for name, _ in found.headers.multi_items()]
            assert found.headers["access-control-allow-origin"] == origin and found.headers["vary"] == "Origin"
            assert len(names) == len(set(names))

    run(test)


def test_a_folder_too_long_for_sockets_is_told_with_what_to_set(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ValueError, match="TMPDIR"):
        socket_folder(2)
    assert not list(long.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    folder = socket_folder(2)
    assert folder.is_dir()
    folder.rmdir()


# Adapters over HTTP

async def change_adapter(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    await reply(writer, b"Success: as a plain text")


async def refuse_adapter(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    await reply(writer, {"error": {"message": "no room for the adapter"}}, 400)


def paths_and_bodies(script: Script) -> list[tuple[str, Any]]:
    return [(head.split()[1].decode(), json.loads(body)) for head, body in script.asked]


def test_adapters_are_loaded_by_all_replicas_and_brought_to_one_that_starts_again() -> None:
    async def test() -> None:
        changes = AdapterChanges()
        async with fronted(change_adapter, change_adapter, keys=("k",), adapters=changes) as (client, scripts):
            key = {"Authorization": "Bearer k"}
            for name in ("sql", "poems", "jokes"):
                answer = await client.post("/v1/load_lora_adapter", headers=key, json={"lora_name": name,
                                                                                       "lora_path": f"of/{name}"})
                assert answer.status_code == 200 and answer.text == "Success: as a plain text"
                assert answer.headers["content-type"].startswith("text/plain")
            await client.post("/v1/unload_lora_adapter", headers=key, json={"lora_name": "poems"})
            assert [len(each.asked) for each in scripts] == [4, 4]
            scripts[0].asked.clear()
            await changes.bring(scripts[0].replica)
            assert paths_and_bodies(scripts[0]) == [
                ("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "of/sql", "load_inplace": True}),
                ("/v1/load_lora_adapter", {"lora_name": "jokes", "lora_path": "of/jokes", "load_inplace": True}),
                ("/v1/unload_lora_adapter", {"lora_name": "poems"})]
            assert all(b"authorization: Bearer k" in head for head, _ in scripts[0].asked)

    run(test)


def test_an_adapter_that_one_replica_refuses_is_unloaded_by_the_others() -> None:
    async def test() -> None:
        changes = AdapterChanges()
        async with fronted(change_adapter, refuse_adapter, adapters=changes) as (client, scripts):
            asked = {"lora_name": "sql", "lora_path": "of/sql"}
            answer = await client.post("/v1/load_lora_adapter", json=asked)
            assert answer.status_code == 400 and "no room" in answer.json()["error"]["message"]
            assert paths_and_bodies(scripts[0])[1:] == [("/v1/unload_lora_adapter", {"lora_name": "sql"})]
            scripts[0].replica.state = ReplicaState.STARTING
            answer = await client.post("/v1/load_lora_adapter", json=asked)
            assert answer.status_code == 503 and "no adapter was changed, because replica 0 is" in answer.text
            scripts[0].asked.clear()
            await changes.bring(scripts[0].replica)
            assert not scripts[0].asked

    run(test)


def test_a_reload_that_one_replica_refuses_is_undone_where_it_was_made(tmp_path: Path) -> None:
    """Also of an adapter that was given at start: the others would lose it otherwise."""
    async def test() -> None:
        changes = AdapterChanges({"sql": str(tmp_path / "sql")})
        async with fronted(change_adapter, refuse_adapter, adapters=changes) as (client, scripts):
            again = {"lora_name": "sql", "lora_path": "other/sql", "load_inplace": True}
            before = {"lora_name": "sql", "lora_path": str((tmp_path / "sql").resolve()), "load_inplace": True}
            for path, asked in (("/v1/load_lora_adapter", again), ("/v1/unload_lora_adapter", {"lora_name": "sql"})):
                scripts[0].asked.clear()
                assert (await client.post(path, json=asked)).status_code == 400
                assert paths_and_bodies(scripts[0]) == [(path, asked), ("/v1/load_lora_adapter", before)]

    run(test)


def test_bodies_on_routes_without_a_key_are_not_kept() -> None:
    async def test() -> None:
        async with fronted(echo, keys=("k",)) as (client, (script,)):
            for path in ("/", "/docs", "/ready", "/ping"):
                assert (await client.post(path, content=b"x" * 100_000)).status_code == 200
            assert [body for _, body in script.asked] == [b""] * 3  # the front answers /ping

    run(test)


def test_a_body_that_replicas_refuse_is_not_looked_at_for_a_response() -> None:
    async def test() -> None:
        async with fronted(echo) as (client, (script,)):
            for num, num_asked in ((10, 2), (200_000, 1)):
                script.asked.clear()
                body = b'{"previous_response_id": "resp_1", "input": [' + b"[]," * num + b"[]]}"
                assert (await client.post("/v1/responses", content=body, headers=JSON)).status_code == 200
                assert len(script.asked) == num_asked

    run(test)


def test_the_replica_of_a_response_is_found_by_the_head_of_its_answer_alone() -> None:
    async def answer(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET"):
            await hang(script, head, body, writer)
        await reply(writer, {"replica": script.replica.number})

    async def nowhere(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        await reply(writer, {}, 404)

    async def test() -> None:
        async with fronted(nowhere, answer) as (client, scripts):
            for path in ("/v1/responses", "/v1/responses/input_tokens"):
                body = {"previous_response_id": "resp_1", "input": "x"}
                assert (await client.post(path, json=body)).json() == {"replica": 1}
            await scripts[1].closed.wait()

    run(test)


def test_the_body_of_a_stream_that_has_begun_is_not_kept() -> None:
    async def stream(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        script.asked.clear()
        del body
        await begin_stream(writer)
        begun.set()
        await asyncio.Event().wait()

    begun = asyncio.Event()

    async def test() -> None:
        async with fronted(stream, guard=lambda front: Guard(front, keys=(), max_body_bytes=1 << 24)) as (client, _):
            tracemalloc.start()
            body = b"x" * (1 << 23)
            request = asyncio.ensure_future(client.post("/v1/completions", content=body, headers=JSON))
            await begun.wait()
            for _ in range(100):
                await asyncio.sleep(0.01)
            num_bytes = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            request.cancel()
            await asyncio.wait({request})
            assert num_bytes < 2.5 * len(body), "the client's, the replica's, and no further copy"

    run(test)


def test_a_client_that_may_not_resume_leaves_the_pause_as_it_is() -> None:
    async def forbid(script: Script, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        await reply(writer, {"status": "paused"}, 403 if head.startswith(b"POST /resume") else 200)

    async def test() -> None:
        trainer = TrainerChanges()
        async with fronted(forbid, trainer=trainer) as (client, (script,)):
            assert (await client.post("/pause")).status_code == 200
            assert (await client.post("/resume")).status_code == 403
            script.asked.clear()
            await trainer.bring(script.replica)
            assert [head.split()[1] for head, _ in script.asked] == [b"/pause"]
            script.replica.state = ReplicaState.GONE
            assert (await client.post("/resume")).status_code == 503

    run(test)
