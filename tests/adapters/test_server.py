"""Adapters over HTTP: as models by their names, loaded and removed by the operator alone, from one folder alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.adapters import LoRARequest
from outrider.async_llm import AsyncLLM
from outrider.beam_search import BeamSearchParams
from outrider.core.checked_request import CheckedRequest
from outrider.core.params import SamplingParams
from outrider.features.adapters.loads import AdapterRegistry
from outrider.llm import LLM
from outrider.lora_request import LoadedAdapter, UnknownAdapter
from outrider.server.errors import bad_value
from outrider.server.lora_modules import NamedAdapter, path_below, read_modules
from outrider.server.settings import ServerConfig
from tests.adapters.folders import write_adapter
from tests.engine.harness import tiny_model
from tests.server.rig import Served, serving, tiny_engine

KEY = {"Authorization": "Bearer secret"}
PROMPT = list(range(40, 60))
ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def registry_of(llm: AsyncLLM) -> AdapterRegistry:
    found = llm.engine.keepers.find(AdapterRegistry)
    assert found is not None
    return found


def number_of(request: CheckedRequest) -> int:
    part = request.part(LoadedAdapter)
    assert part is not None
    return part.number


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, model = tmp_path_factory.mktemp("root"), tiny_model("llama", torch.float32)
    for seed, name in enumerate(("sql", "law", "other")):
        write_adapter(path / name, model, seed)
    write_adapter(path / "bad", model, 1, scale=float("nan"))
    write_adapter(path.parent / "outside", model, 9)
    (path / "link").symlink_to(path.parent / "outside")
    return path


@pytest.fixture(scope="module")
def texts(root: Path) -> dict[str, str]:
    """What an engine answers to the prompt, by the adapter's name."""
    params = SamplingParams(temperature=0, max_tokens=8)
    with tiny_engine(**ADAPTERS) as rig:
        llm = LLM.around(rig.engine)
        adapters = [None, *(LoRARequest(name, 1, str(root / name)) for name in ("sql", "law"))]
        done = llm.generate([PROMPT] * 3, params, lora_request=adapters, use_tqdm=False)
    made = dict(zip(("tiny", "sql", "law"), (output.outputs[0].text for output in done), strict=True))
    assert len(set(made.values())) == 3
    return made


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Served]:
    with serving(lambda: AsyncLLM.around(tiny_engine(**ADAPTERS).engine), api_key=("secret",), admin=True,
                 lora_root=str(root), lora_modules=(f"sql={root / 'sql'}",)) as made:
        made.http.headers.update(KEY)
        yield made


def text(served: Served, model: str) -> str:
    answer = served.post("/v1/completions", model=model, prompt=PROMPT, temperature=0, max_tokens=8)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def test_an_adapter_is_a_model_of_its_own_name(served: Served, texts: dict[str, str], root: Path) -> None:
    assert text(served, "sql") == texts["sql"] and text(served, "tiny") == texts["tiny"]
    cards = {card["id"]: card for card in served.http.get("/v1/models").json()["data"]}
    assert cards["sql"]["parent"] == "tiny" and cards["sql"]["root"] == "sql"
    assert cards["tiny"]["parent"] is None
    assert served.http.get("/v1/models/sql").json()["id"] == "sql"
    assert "this server has no model 'law'" in served.error("/v1/completions", 404, model="law", prompt="x")["message"]


def test_adapters_are_loaded_and_removed_while_serving(served: Served, texts: dict[str, str]) -> None:
    done = served.post("/v1/load_lora_adapter", lora_name="law", lora_path="law")
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'law' added successfully.")
    assert text(served, "law") == texts["law"]
    again = served.error("/v1/load_lora_adapter", lora_name="law", lora_path="law")
    assert "there is a model 'law' already" in again["message"]
    assert served.post("/v1/load_lora_adapter", lora_name="law", lora_path="sql", load_inplace=True).status_code == 200
    assert text(served, "law") == texts["sql"], "read again in place"
    assert served.post("/v1/unload_lora_adapter", lora_name="law").status_code == 200
    assert served.post("/v1/completions", model="law", prompt="x").status_code == 404
    assert served.error("/v1/unload_lora_adapter", 404, lora_name="law")["param"] == "lora_name"


@pytest.mark.parametrize("path", ["../outside", "link", "/etc", ".", "nowhere", "a\0b", "sql/adapter_config.json",
                                  "Qwen/Qwen2.5-7B-lora"])
def test_only_folders_below_the_root_are_loaded(served: Served, path: str) -> None:
    error = served.error("/v1/load_lora_adapter", lora_name="new", lora_path=path)
    assert "must be a folder below the server's --lora-root" in error["message"]
    assert served.post("/v1/completions", model="new", prompt="x").status_code == 404


@pytest.mark.parametrize("body", [{"lora_name": "new"}, {"lora_name": "new", "lora_path": None}])
def test_a_field_that_is_missing_or_null_is_named_once(served: Served, body: dict[str, Any]) -> None:
    assert served.error("/v1/load_lora_adapter", **body)["message"] == "lora_path: Field required"


def test_a_broken_adapter_is_refused_by_its_name(served: Served, texts: dict[str, str]) -> None:
    error = served.error("/v1/load_lora_adapter", lora_name="bad", lora_path="bad")
    assert "holds NaN or Inf" in error["message"]
    assert text(served, "sql") == texts["sql"]


def test_errors_of_adapters_tell_clients_no_place_of_the_server(served: Served, root: Path) -> None:
    """Neither of one that is loaded over HTTP, nor of one that was given at start and is read by its first request."""
    (root / "odd").mkdir()
    (root / "odd/adapter_config.json").write_text('{"peft_type": "NEW"}')
    told = "odd/adapter_config.json: peft_type 'NEW' is not supported: only LORA is"
    error = served.error("/v1/load_lora_adapter", lora_name="new", lora_path="./odd")
    assert (error["message"], error["param"]) == (told, "lora_path")
    with serving(lambda: AsyncLLM.around(tiny_engine(**ADAPTERS).engine),
                 lora_modules=(f"own={root / 'odd'}",)) as made:
        error = made.error("/v1/completions", model="own", prompt="x")
        assert (error["message"], error["param"]) == (told, "model")
        assert str(root) not in made.http.get("/v1/models").text


def test_a_broken_reload_leaves_the_adapter_as_it_is(served: Served, texts: dict[str, str]) -> None:
    before = served.http.get("/v1/models/sql").json()["root"]
    error = served.error("/v1/load_lora_adapter", lora_name="sql", lora_path="bad", load_inplace=True)
    assert "holds NaN or Inf" in error["message"] and text(served, "sql") == texts["sql"]
    assert served.http.get("/v1/models/sql").json()["root"] == before


def test_a_beam_search_has_the_adapter_that_its_body_names(served: Served, root: Path) -> None:
    with tiny_engine(**ADAPTERS) as rig:
        (found,) = LLM.around(rig.engine).beam_search([PROMPT], BeamSearchParams(2, 6),
                                                      LoRARequest("sql", 1, str(root / "sql")))
    ask = {"prompt": PROMPT, "n": 2, "max_tokens": 6, "use_beam_search": True, "return_token_ids": True}
    own, base = (served.post("/v1/completions", model=model, **ask).json()["choices"] for model in ("sql", "tiny"))
    assert [choice["token_ids"] for choice in own] == [beam.tokens[len(PROMPT) :] for beam in found.sequences]
    assert own[0]["token_ids"] != base[0]["token_ids"]


def test_clients_without_the_key_or_a_server_without_the_flags_load_nothing(served: Served, root: Path) -> None:
    body = {"lora_name": "x", "lora_path": "sql"}
    assert served.http.post("/v1/load_lora_adapter", json=body, headers={"Authorization": "none"}).status_code == 401
    for wrong in ({"lora_root": str(root)}, {"lora_root": str(root), "admin": True},
                  {"lora_root": str(root), "api_key": ("k",)}):
        with pytest.raises(ValueError, match="lora_root .* set admin, and api_key"):
            ServerConfig(**wrong)


def test_modules_are_named_by_pairs_or_objects(root: Path) -> None:
    given = (f"a={root / 'sql'}", f'{{"name": "b", "path": "{root / "law"}", "base_model_name": "base"}}')
    assert read_modules(given) == {"a": NamedAdapter("a", str(root / "sql")),
                                   "b": NamedAdapter("b", str(root / "law"), "base")}
    for wrong, words in (("a", "write name=folder"), ("{", "is not valid JSON"),
                         ('{"name": "a"}', "must have name and path"),
                         (f"a={root}", "is no adapter"), ("=x", "write name=folder"),
                         ('{"name": "", "path": "x"}', "must have name and path")):
        with pytest.raises(ValueError, match=words):
            read_modules([wrong])
    with pytest.raises(ValueError, match="'a' is given twice"):
        read_modules([given[0], given[0]])


def test_links_are_resolved_before_they_are_compared(root: Path) -> None:
    assert path_below(str(root), "sql") == path_below(str(root), "./law/../sql") == str((root / "sql").resolve())
    with pytest.raises(ValueError, match="must be a folder below"):
        path_below(str(root), "link")


def test_files_that_are_links_out_of_the_root_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    own = tmp_path / "root" / "own"
    own.mkdir(parents=True)
    (own / "adapter_model.safetensors").touch()
    (own / "adapter_config.json").symlink_to(own / "adapter_model.safetensors")
    assert path_below(str(tmp_path / "root"), "own") == str(own.resolve()), "links inside the root are followed"
    (own / "adapter_config.json").unlink()
    (own / "adapter_config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match="must be a folder below"):
        path_below(str(tmp_path / "root"), "own")


def test_a_request_that_was_checked_before_a_reload_has_the_newer_adapter(root: Path, texts: dict[str, str]) -> None:
    """The reload ends after the request was checked and before it is added. An adapter that was removed is refused."""
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)

    async def run() -> None:
        async with AsyncLLM.around(tiny_engine(**ADAPTERS).engine) as llm:
            for name in ("sql", "law"):
                (request,) = await llm.check([PROMPT], params, 0, LoRARequest("own", 1, str(root / "sql")))
                await llm.add_lora(LoRARequest("own", 1, str(root / name), load_inplace=True))
                *_, last = [output async for output in llm.follow(request, name)]
                *_, wanted = [output async for output in llm.generate(
                    PROMPT, params, f"{name} again", lora_request=LoRARequest("own", 1, str(root / name)))]
                assert last.outputs[0].token_ids == wanted.outputs[0].token_ids
                assert number_of(request) not in registry_of(llm).sizes
            (request,) = await llm.check([PROMPT], params, 0, LoRARequest("own", 1, str(root / "law")))
            await llm.remove_lora("own")
            with pytest.raises(UnknownAdapter, match="has been removed: load the adapter again"):
                [output async for output in llm.follow(request, "removed")]

    asyncio.run(run())


def test_a_checked_request_whose_adapter_had_to_make_room_reads_it_again(root: Path) -> None:
    """One adapter fits into the host's memory, and between the request's check and its start another one was read."""
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    own, other = LoRARequest("own", 1, str(root / "sql")), LoRARequest("other", 1, str(root / "law"))

    async def run() -> None:
        async with AsyncLLM.around(tiny_engine(**ADAPTERS | {"max_loras": 1, "max_cpu_loras": 1}).engine) as llm:
            registry = registry_of(llm)

            async def tokens_of(request: CheckedRequest, request_id: str) -> list[int]:
                *_, last = [output async for output in llm.follow(request, request_id)]
                return list(last.outputs[0].token_ids)

            (first,) = await llm.check([PROMPT], params, 0, own)
            wanted = await tokens_of(first, "at once")
            (second,) = await llm.check([PROMPT], params, 0, other)
            assert list(registry.sizes) == [number_of(second)] and await tokens_of(second, "other") != wanted
            assert await tokens_of(first, "again") == wanted
            assert all(load.is_idle for load in registry._loads.values())
            await llm.add_lora(other)
            with suppress(UnknownAdapter):  # it is not loaded
                await llm.remove_lora("own")
            with pytest.raises(UnknownAdapter, match="has been removed: load the adapter again"):
                await tokens_of(first, "removed")

    asyncio.run(run())


def test_a_request_whose_adapter_is_removed_before_it_starts_names_no_model() -> None:
    error = bad_value(UnknownAdapter("the request's adapter has been removed: load the adapter again"))
    assert error.status == 404 and error.param == "model"


def test_clients_may_try_again_when_all_adapters_have_requests(root: Path) -> None:
    """One adapter fits into the host's memory, and requests are about to be added with it."""
    llm = AsyncLLM.around(tiny_engine(**ADAPTERS | {"max_loras": 1, "max_cpu_loras": 1}).engine)
    registry = registry_of(llm)
    with serving(lambda: llm, api_key=("secret",), admin=True, lora_root=str(root),
                 lora_modules=(f"law={root / 'law'}",)) as made:
        made.http.headers.update(KEY)
        asked = LoRARequest("sql", 1, str(root / "sql"))
        number = llm._owner.call(lambda: registry.begin(asked)).result()
        posts = [("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "model": "law"}),
                 ("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "other"})]
        answers = [made.http.post(path, json=body) for path, body in posts]
        assert [(each.status_code, each.headers["retry-after"]) for each in answers] == [(429, "1")] * 2
        assert "1 adapters are loaded (max_cpu_loras), and requests use all of them" in answers[0].text
        llm._owner.call(lambda: registry.release(number)).result()
        assert [made.http.post(path, json=body).status_code for path, body in posts] == [200, 200]
