"""Routes of a trainer: pauses, updates of weights, and checksums of weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from outrider import AsyncLLM
from outrider.server.errors import ApiError
from outrider.server.settings import ServerConfig
from outrider.server.trainer_routes import weights_path
from tests.engine.harness import with_other_weights
from tests.engine.test_update_weights import SETTINGS, llama
from tests.engine.test_weights_checksum import of_file
from tests.server.rig import Served, serving

LONG = {"max_model_len": 4096, "num_pages": 400}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llama(tmp_path, max_position_embeddings=4096)


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with serving(lambda: AsyncLLM(str(folder), **SETTINGS | LONG), admin=True, api_key=("key",),
                 weights_root=str(folder.parent)) as made:
        made.http.headers["Authorization"] = "Bearer key"
        yield made


def test_checksums_are_those_of_the_files_and_can_be_compared(served: Served, folder: Path) -> None:
    stored = of_file(folder)
    assert "nothing to compare with" in served.error("/weight_checker", action="compare")["message"]
    first = served.post("/weight_checker", action="checksum").json()
    assert first["checksums"] == stored and first["baseline_created"] and not first["coded"]
    assert set(first["dtypes"].values()) == {"float32"}
    again = served.post("/weights_checker", action="checksum").json()
    assert not again["baseline_created"] and again["sha256"] == first["sha256"]
    assert served.post("/weight_checker", action="compare").json() == {"match": True, "mismatches": []}
    served.error("/weight_checker", action="compare")
    name = next(iter(stored))
    told = served.post("/weight_checker", action="compare", baseline=stored | {name: "0" * 64, "more": "0"}).json()
    assert told == {"match": False, "mismatches": sorted([name, "more"])}
    for action in ("reset", "other"):
        assert served.error("/weight_checker", action=action)["param"] == "action"
    served.http.post("/sleep")
    assert "the weights are asleep" in served.error("/weight_checker", action="checksum")["message"]


def test_a_pause_over_http_in_all_modes(served: Served, folder: Path) -> None:
    body = {"prompt": [5, 6, 7] * 4, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def ask(**more: Any) -> dict[str, Any]:
        return served.post("/v1/completions", **body | more).json()["choices"][0]

    def paused(mode: str, max_tokens: int = 40, **more: str) -> Future[dict[str, Any]]:
        """The answer to a request in the middle of which the server was paused."""
        before = served.llm.engine.stats.num_generation_tokens
        asked = pool.submit(ask, max_tokens=max_tokens)
        served.wait_for(lambda: served.llm.engine.stats.num_generation_tokens > before)
        answer = served.http.post("/pause", params={"mode": mode, **more})
        assert answer.json() == {"status": "paused"} and served.http.get("/is_paused").json() == {"is_paused": True}
        return asked

    def resume() -> None:
        assert served.http.post("/resume").json() == {"status": "resumed"}
        assert served.http.get("/is_paused").json() == {"is_paused": False}

    whole = ask()
    with ThreadPoolExecutor(1) as pool:
        aborted = paused("abort", 3000).result()
        num_common = min(40, len(aborted["token_ids"]))
        assert aborted["finish_reason"] == "abort" and len(aborted["token_ids"]) < 3000
        assert aborted["token_ids"][:num_common] == whole["token_ids"][:num_common]
        assert "the engine is paused" in served.http.get("/ready").json()["error"]["message"]
        resume()
        waited = paused("wait")
        assert waited.result() == whole
        resume()
        for clear_cache in ("true", "false"):
            kept = paused("keep", clear_cache=clear_cache)
            resume()
            assert kept.result() == whole
    for query, param in (("mode=drain", "mode"), ("clear_cache=perhaps", "clear_cache"), ("level=1", "level")):
        refused = served.http.post(f"/pause?{query}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_a_server_is_healthy_but_not_ready_while_a_pause_is_coming(served: Served) -> None:
    body = {"prompt": [5, 6, 7] * 4, "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        before = served.llm.engine.stats.num_generation_tokens
        running = pool.submit(served.post, "/v1/completions", **body)
        served.wait_for(lambda: served.llm.engine.stats.num_generation_tokens > before)
        assert served.http.get("/ready").status_code == 200
        waiting = pool.submit(served.http.post, "/pause", params={"mode": "wait"})
        served.wait_for(lambda: served.llm.engine.pause.is_coming)
        ready = served.http.get("/ready")
        assert ready.status_code == 503 and "pauses as soon as" in ready.json()["error"]["message"]
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/is_paused").json() == {"is_paused": False}
        served.http.post("/resume")
        refused = waiting.result()
        assert refused.status_code == 400 and "resume_generation was called" in refused.json()["error"]["message"]
        assert served.http.get("/ready").status_code == 200 and running.result().status_code == 200


def test_weights_come_over_http_in_chunks_of_files_and_shared_memory(served: Served, folder: Path) -> None:
    other = with_other_weights(folder, folder.parent / "other")
    tensors, chunks = load_file(other / "model.safetensors"), folder.parent / "chunks"
    chunks.mkdir()
    pairs, body = list(tensors.items()), {"prompt": [5, 6, 7] * 4, "max_tokens": 8, "temperature": 0,
                                            "return_token_ids": True}
    for number, some in enumerate((pairs[:5], pairs[5:9])):
        save_file(dict(some), chunks / f"{number}.safetensors")
    (chunks / "bare").write_bytes(b"".join(each.numpy().tobytes() for _, each in pairs[9:]) + b"more")
    bare = {"path": "chunks/bare", "names": [name for name, _ in pairs[9:]],
            "dtype_names": ["float32"] * len(pairs[9:]), "shapes": [list(each.shape) for _, each in pairs[9:]]}
    whole = (chunks / "0.safetensors").read_bytes()
    (chunks / "cut").write_bytes(whole[: len(whole) // 2])
    ours = served.post("/v1/completions", **body).json()["choices"]

    def update(status: int, **info: Any) -> dict[str, Any]:
        answer = served.post("/update_weights", update_info=info)
        assert answer.status_code == status, answer.text
        return dict(answer.json())

    assert served.post("/start_weight_update").json() == {"status": "started"}
    update(200, path="chunks/0.safetensors")
    assert "finish_weight_update() ends it" in served.error("/v1/completions", 503, **body)["message"]
    for wrong in ({"path": "chunks/cut"}, {"path": "../secret"}, {"path": "/etc/passwd"}, {"path": "nothing"},
                  bare | {"names": ["model.norm.weight"]}, bare | {"shapes": [[1 << 40]] * len(pairs[9:])}):
        assert update(400, **wrong)["error"]["param"] == "path", "nothing has changed"
    update(200, path="chunks/1.safetensors")
    update(200, **bare)
    told = served.post("/finish_weight_update").json()
    assert told == {"status": "finished", "num_tensors": len(pairs), "weights_version": 1}
    assert served.post("/weight_checker", action="checksum").json()["checksums"] == of_file(other)
    assert served.post("/v1/completions", **body).json()["choices"] != ours
    assert update(200, path="target")["weights_version"] == 2
    assert served.post("/v1/completions", **body).json()["choices"] == ours
    update(400, path="chunks/cut")
    assert served.post("/v1/completions", **body).json()["choices"] == ours
    assert served.post("/update_weights", weight_dir=str(folder)).json()["weights_version"] == 3, "prime-rl's body"
    for wrong in ({}, {"weight_dir": "other", "update_info": {"path": "other"}}):
        assert "either update_info or weight_dir" in served.error("/update_weights", **wrong)["message"]
    served.post("/start_weight_update")
    update(200, path="chunks/1.safetensors")
    assert "the update lacks lm_head.weight" in served.error("/finish_weight_update", 503)["message"]
    assert "the update lacks lm_head.weight" in served.error("/v1/completions", 503, **body)["message"]
    assert update(200, path="other")["weights_version"] == 4


def test_a_chunk_after_one_that_was_refused_does_not_go_live_alone(served: Served, folder: Path) -> None:
    other = with_other_weights(folder, folder.parent / "other")
    pairs, body = list(load_file(other / "model.safetensors").items()), {"prompt": [5, 6, 7] * 4, "max_tokens": 8}
    save_file({"model.extra": pairs[0][1]}, folder.parent / "bad.safetensors")
    save_file(dict(pairs[:5]), folder.parent / "first.safetensors")
    save_file(dict(pairs[5:]), folder.parent / "second.safetensors")

    def update(chunk: str, status: int = 200) -> str:
        answer = served.post("/update_weights", update_info={"path": f"{chunk}.safetensors"})
        assert answer.status_code == status, answer.text
        return str(answer.json().get("error", {}).get("message"))

    served.post("/start_weight_update")
    assert "no weight of this name: model.extra" in update("bad", 400)
    for chunk in ("first", "second"):
        assert "start_weight_update() begins it again" in update(chunk, 400)
    assert served.post("/v1/completions", **body).status_code == 200 and served.llm.weights_version == 0
    assert "without changing what is served" in served.error("/finish_weight_update")["message"]
    served.post("/start_weight_update")
    update("first")
    update("second")
    assert served.post("/finish_weight_update").json()["weights_version"] == 1
    assert served.post("/weight_checker", action="checksum").json()["checksums"] == of_file(other)


def test_weights_need_a_root_and_keys(folder: Path) -> None:
    with pytest.raises(ValueError, match="weights_root lets clients replace weights"):
        ServerConfig(weights_root=str(folder), admin=True)
    with serving(lambda: AsyncLLM(str(folder), **SETTINGS), admin=True) as made:
        assert "--weights-root" in made.error("/update_weights", 403, update_info={"path": "target"})["message"]


def test_weights_come_from_folders_at_any_depth_and_no_link_leads_out(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    deep = root / "run" / "step" / "shards"
    for folder in (deep, secret, root / "links" / "deep", root / "around", root / "empty"):
        folder.mkdir(parents=True)
    for file in (deep / "model.safetensors", secret / "key", root / "plain"):
        file.write_bytes(b"1")
    (root / "run" / "latest").symlink_to(root / "run" / "step")
    (root / "run" / "loop").symlink_to(root / "run")
    for path in ("run", "run/latest", "run/step/shards", "run/latest/shards/model.safetensors", "run/../plain"):
        assert weights_path(str(root), path) == (root / path).resolve()
    (root / "links" / "deep" / "key").symlink_to(secret / "key")
    (root / "around" / "links").symlink_to(root / "links")
    (root / "folder").symlink_to(secret)
    (root / "lost").symlink_to(root / "nothing")
    (root / "itself").symlink_to(root / "itself")
    for path in ("links", "links/deep/key", "around", "folder", "folder/key", "lost", "itself", "../secret", ".",
                 "empty", "run/../../secret/key", str(secret), "nothing", "\0"):
        with pytest.raises(ApiError, match="must be a file or folder below the server's --weights-root"):
            weights_path(str(root), path)


def test_requests_are_aborted_by_their_ids_or_all(served: Served) -> None:
    """Without a pause: later requests are served."""
    body = {"prompt": [5, 6, 7] * 4, "max_tokens": 3000, "temperature": 0, "ignore_eos": True}

    def ask(**more: Any) -> dict[str, Any]:
        return dict(served.post("/v1/completions", **body | more).json()["choices"][0])

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, request_id=name) for name in ("first", "second", "second-0")]
        served.wait_for(lambda: served.llm.engine.num_requests == 3)
        assert served.post("/abort_requests", request_ids=["nobody"]).json() == {"status": "aborted", "aborted": 0}
        assert served.post("/abort_requests", request_ids=["first"]).json()["aborted"] == 1
        assert asked[0].result()["finish_reason"] == "abort" and not asked[1].done()
        assert served.post("/abort_requests", request_ids=["cmpl-second"]).json()["aborted"] == 1
        assert asked[1].result()["finish_reason"] == "abort" and not asked[2].done()
        assert served.post("/abort_requests").json()["aborted"] == 1
        assert asked[2].result()["finish_reason"] == "abort"
    assert ask(max_tokens=3)["finish_reason"] == "length"
    served.error("/abort_requests", request_ids="first")


def test_versions_are_told_and_counted(served: Served, folder: Path) -> None:
    assert served.http.get("/weight_info").json() == {"weight_version": "0", "is_updating": False}
    assert served.post("/update_weight_version", new_version="0").json() == {"success": True, "new_version": "0"}
    assert "versions are counted" in served.error("/update_weight_version", new_version="7")["message"]
    served.post("/start_weight_update")
    assert served.http.get("/weight_info").json()["is_updating"]
    other = with_other_weights(folder, folder.parent / "other")
    path = str((other / "model.safetensors").relative_to(folder.parent))
    assert served.post("/update_weights", update_info={"path": path}).status_code == 200
    assert served.error("/finish_weight_update", weight_version="step-3")["param"] == "weight_version"
    assert served.post("/finish_weight_update", weight_version="1").json()["weights_version"] == 1
    assert served.http.get("/weight_info").json() == {"weight_version": "1", "is_updating": False}
    assert "part of the model's update" in served.error("/start_draft_weight_update")["message"]


def test_the_memory_of_the_cache_is_released_and_comes_back(served: Served) -> None:
    body = {"prompt": [5, 6, 7] * 4, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    ours = served.post("/v1/completions", **body).json()["choices"][0]["token_ids"]
    assert served.post("/release_kv_cache_memory").json() == {"status": "kv_cache_released"}
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": True}
    served.http.post("/wake_up", params={"tags": "kv_cache"})
    assert served.post("/v1/completions", **body).json()["choices"][0]["token_ids"] == ours


class Extension:
    """A trainer's own class, for /collective_rpc."""

    def scaled(self, number: int, by: int = 2) -> dict[str, int]:
        return {"number": number * by}

    def name(self) -> Path:
        return Path("a")


def test_a_method_of_the_operators_class_is_called(served: Served, folder: Path) -> None:
    assert "worker_extension_cls" in served.error("/collective_rpc", method="scaled")["message"]
    place = f"{__name__}.Extension"
    with serving(lambda: AsyncLLM(str(folder), worker_extension_cls=place, **SETTINGS | LONG), admin=True) as own:
        answer = own.post("/collective_rpc", method="scaled", args=[3], kwargs={"by": 5})
        assert answer.json() == {"results": [{"number": 15}]}
        assert own.post("/collective_rpc", method="name").json() == {"results": ["a"]}
        assert "has no public method '_make'" in own.error("/collective_rpc", method="_make")["message"]
        own.error("/collective_rpc", method="scaled", args=5)
