"""Weights that a trainer sends to a server over a connection of torch's, with the calls of TRL 1.16's client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import AsyncLLM, weight_group
from outrider.compat.modules.distributed.weight_transfer.nccl_common import trainer_init
from outrider.compat.modules.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from outrider.compat.network import get_open_port
from outrider.server.settings import ServerConfig
from tests.engine.harness import with_other_weights
from tests.engine.test_update_weights import SETTINGS, llama
from tests.engine.test_weights_checksum import of_file
from tests.server.rig import Served, serving

BODY: dict[str, Any] = {"prompt": [5, 6, 7] * 4, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
# A trainer that joins, sends one tensor of the announced two and waits to be killed.
KILLED = """
import sys, time, torch
from outrider.compat.weight_transfer import trainer_init
trainer = trainer_init({"master_address": "127.0.0.1", "master_port": int(sys.argv[1]), "world_size": 2})
trainer.group.send(torch.zeros(1))
print("sent", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llama(tmp_path)


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with serving(lambda: AsyncLLM(str(folder), **SETTINGS), admin=True,
                 weight_transfer_config={"backend": "nccl"}) as made:
        yield made


class Trainer:
    """A trainer in this process, as TRL's client is one."""

    def __init__(self, served: Served) -> None:
        self.served = served
        info = {"master_address": "127.0.0.1", "master_port": get_open_port(), "rank_offset": 1, "packed": True,
                "world_size": 1 + served.http.get("/get_world_size").json()["world_size"]}
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(served.post, "/init_weight_transfer_engine", init_info=info)
            self.endpoint = trainer_init(info)
            assert joined.result().json() == {"status": "joined"}

    def send(self, tensors: dict[str, torch.Tensor], **changed: Any) -> Any:
        """The server's answer to an update of these tensors."""
        info = {"names": list(tensors), "dtype_names": [str(each.dtype) for each in tensors.values()],
                "shapes": [list(each.shape) for each in tensors.values()]}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.served.post, "/update_weights", update_info=info | changed)
            packed_nccl_broadcast_producer(iterator=iter(tensors.items()), group=self.endpoint, src=0,
                                           post_iter_func=lambda item: item[1])
            return answer.result()


def tokens(served: Served) -> list[int]:
    return list(served.post("/v1/completions", **BODY).json()["choices"][0]["token_ids"])


def test_weights_come_from_a_trainer(served: Served, folder: Path) -> None:
    other = with_other_weights(folder, folder.parent / "other")
    tensors, ours = load_file(other / "model.safetensors"), tokens(served)
    trainer = Trainer(served)
    served.post("/start_weight_update")
    half = len(tensors) // 2
    for part in (dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])):
        assert trainer.send(part).status_code == 200
    assert served.post("/finish_weight_update").json()["num_tensors"] == len(tensors)
    assert served.post("/weight_checker", action="checksum").json()["checksums"] == of_file(other)
    assert tokens(served) != ours
    original = load_file(folder / "model.safetensors")
    assert trainer.send(original).json() == {"status": "updated", "weights_version": 2}, "without a session"
    assert tokens(served) == ours


def test_a_refused_weight_changes_nothing_and_the_connection_goes_on(served: Served, folder: Path) -> None:
    tensors, ours = load_file(folder / "model.safetensors"), tokens(served)
    trainer = Trainer(served)
    for in_session in (True, False):
        if in_session:
            served.post("/start_weight_update")
        answer = trainer.send({"model.extra": torch.zeros(3), **tensors})
        assert answer.status_code == 400 and "model.extra" in answer.json()["error"]["message"]
        if in_session:
            assert "without changing what is served" in served.error("/finish_weight_update")["message"]
    assert tokens(served) == ours and served.llm.weights_version == 0
    assert trainer.send(tensors).json()["weights_version"] == 1
    assert tokens(served) == ours


def test_a_trainer_that_is_killed_leaves_no_mixture(served: Served, folder: Path) -> None:
    tensors, ours = load_file(folder / "model.safetensors"), tokens(served)
    name, first = next((name, each) for name, each in tensors.items() if name.endswith("norm.weight"))
    port = get_open_port()
    with subprocess.Popen([sys.executable, "-c", KILLED.replace("torch.zeros(1)", f"torch.zeros({len(first)})"),
                           str(port)], stdout=subprocess.PIPE, text=True) as trainer, ThreadPoolExecutor(1) as pool:
        info = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        assert served.post("/init_weight_transfer_engine", init_info=info).status_code == 200
        served.post("/start_weight_update")
        updated: Future[Any] = pool.submit(served.post, "/update_weights", update_info={
            "names": list({name: first} | tensors), "dtype_names": ["float32"] * len(tensors),
            "shapes": [list(each.shape) for each in ({name: first} | tensors).values()]})
        assert trainer.stdout is not None and trainer.stdout.readline() == "sent\n"
        trainer.kill()
        assert updated.result().status_code == 400
        assert "was not received" in updated.result().json()["error"]["message"]
    assert served.post("/finish_weight_update").status_code == 503
    assert "the update lacks" in served.error("/v1/completions", 503, **BODY)["message"]
    assert "join first" in served.error("/update_weights", update_info={"names": []})["message"]
    assert Trainer(served).send(tensors).status_code == 200
    assert tokens(served) == ours


def test_what_a_trainer_announces_is_checked(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_group.WeightGroup.__init__, "__kwdefaults__",
                        {"device": None, "join_seconds": 1.0, "wait_seconds": 5.0})
    nobody = {"master_address": "127.0.0.1", "master_port": get_open_port()}
    assert "do not reach each other" in served.error("/init_weight_transfer_engine", init_info=nobody)["message"]
    for wrong in ({"world_size": 1}, {"rank_offset": 2}, {"master_port": 0}):
        served.error("/init_weight_transfer_engine", init_info=nobody | wrong)
    for info, words in (({"names": ["a"]}, "1 names, 0 dtype_names"),
                        ({"names": ["a"], "dtype_names": ["str"], "shapes": [[1]]}, "dtype 'str'"),
                        ({"names": ["a"], "dtype_names": ["int8"], "shapes": [[-1]]}, "shape [-1]"),
                        ({"names": []}, "join first")):
        assert words in served.error("/update_weights", update_info=info)["message"]


def test_a_server_says_how_it_was_started(served: Served) -> None:
    told = served.http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert told["weight_transfer_config"] == {"backend": "nccl"} and told["lora_config"] is None
    assert told["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert told["model_config"]["max_model_len"] == SETTINGS["max_model_len"]
    assert told["parallel_config"]["data_parallel_size"] == 1
    assert served.http.get("/server_info?config_format=text").status_code == 400


def test_trainers_send_weights_only_where_the_operator_lets_them(folder: Path) -> None:
    with pytest.raises(ValueError, match="set admin"):
        ServerConfig(weight_transfer_config={"backend": "nccl"})
    for given in ({}, {"backend": "ipc"}, {"backend": "nccl", "more": 1}):
        with pytest.raises(ValueError, match="weight_transfer_config must be"):
            ServerConfig(admin=True, weight_transfer_config=given)
    with pytest.raises(ValueError, match="without replicas"):
        ServerConfig(admin=True, replicas=2, weight_transfer_config={"backend": "gloo"})
    with serving(lambda: AsyncLLM(str(folder), **SETTINGS), admin=True) as served:
        info = {"master_address": "127.0.0.1", "master_port": 9}
        told = served.error("/init_weight_transfer_engine", 403, init_info=info)
        assert "--weight-transfer-config" in told["message"]
        assert served.http.get("/server_info").json()["vllm_config"]["weight_transfer_config"] is None


def test_a_trainer_needs_one_server() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 2"):
        trainer_init({"master_address": "127.0.0.1", "master_port": 9, "world_size": 1})
    with pytest.raises(ValueError, match="src must be 0"):
        packed_nccl_broadcast_producer(iter(()), None, src=1)  # type: ignore[arg-type]


def test_two_servers_get_the_weights_of_one_trainer(folder: Path) -> None:
    other = with_other_weights(folder, folder.parent / "other")
    tensors = load_file(other / "model.safetensors")
    made = partial(serving, lambda: AsyncLLM(str(folder), **SETTINGS), admin=True,
                   weight_transfer_config={"backend": "gloo"})
    with made() as one, made() as two, ThreadPoolExecutor(2) as pool:
        info = {"master_address": "127.0.0.1", "master_port": get_open_port(), "world_size": 3}
        joined = [pool.submit(served.post, "/init_weight_transfer_engine", init_info=info | {"rank_offset": rank})
                  for rank, served in enumerate((one, two), 1)]
        endpoint = trainer_init(info)
        assert [own.result().status_code for own in joined] == [200, 200]
        told = {"names": list(tensors), "dtype_names": [str(each.dtype) for each in tensors.values()],
                "shapes": [list(each.shape) for each in tensors.values()]}
        answers = [pool.submit(served.post, "/update_weights", update_info=told) for served in (one, two)]
        packed_nccl_broadcast_producer(iterator=iter(tensors.items()), group=endpoint, src=0)
        assert [own.result().json()["weights_version"] for own in answers] == [1, 1]
        for served in (one, two):
            assert served.post("/weight_checker", action="checksum").json()["checksums"] == of_file(other)
        assert one.post("/shutdown_weight_transfer_engine").json() == {"status": "left"}
        assert "join first" in one.error("/update_weights", update_info={"names": []})["message"]


@pytest.mark.parametrize(("places", "serves"), [(["a", "b"], True), (["a", "b", "c"], True), (["a", "a"], False),
                                                (["a", weight_group.HOST], False), ([weight_group.HOST] * 2, False)])
def test_nccl_needs_a_gpu_for_every_process(places: list[str], serves: bool) -> None:
    assert weight_group.can_use_nccl(places) is serves
