"""Names that scripts written for vLLM import beside LLM and SamplingParams: engines and requests of one's own, kinds of
output, parsers of command lines, metrics. Each script runs, or is refused with what to use instead."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

RUNS = {
    "prompts of a benchmark": """
        import json, tempfile
        from outrider.benchmarks.datasets import add_dataset_parser, get_samples
        from outrider.utils.argparse_utils import FlexibleArgumentParser
        parser = FlexibleArgumentParser()
        add_dataset_parser(parser)
        samples = get_samples(parser.parse_args(["--num_prompts", "3", "--random-input-len", "9"]), llm.get_tokenizer())
        assert len(samples) == 3 and all(0 < sample.prompt_len for sample in samples)
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            print(json.dumps({"prompt": "Hi"}), file=file, flush=True)
            args = parser.parse_args(["--dataset-name", "custom", "--dataset-path", file.name])
            assert [sample.prompt for sample in get_samples(args, llm.get_tokenizer())] == ["Hi"]
        """,
    "the model's config": """
        config = llm.llm_engine.model_config
        assert config.hf_config.vocab_size == config.hf_text_config.vocab_size == 259 == config.get_vocab_size()
        assert config.hf_config.id2label == {0: "LABEL_0", 1: "LABEL_1"} and config.hf_config.num_labels == 2
        assert llm.llm_engine.get_model_config() == config == llm.get_model_config()
        """,
    "fields that ask for nothing": """
        params = SamplingParams(best_of=1, spaces_between_special_tokens=True, truncate_prompt_tokens=None,
                                flat_logprobs=False, use_beam_search=False, logits_processors=None, max_tokens=1)
        assert params == SamplingParams(max_tokens=1) == SamplingParams.from_optional(max_tokens=1, best_of=None)
        """,
    "names at the top, and modules": """
        import outrider
        from outrider import ClassificationOutput, EmbeddingOutput, ScoringOutput
        from outrider.distributed.parallel_state import destroy_model_parallel
        destroy_model_parallel()
        assert outrider.sampling_params.SamplingParams is SamplingParams and outrider.outputs.EmbeddingOutput
        """,
    "special tokens": """
        tokenizer = llm.get_tokenizer()
        assert tokenizer.all_special_ids == [256, 257, 258] and tokenizer.all_special_tokens[1] == "<|end|>"
        assert tokenizer.batch_decode([[72, 105], [33]]) == ["Hi", "!"] and tokenizer.pad_token_id is None
        """,
    "settings of older and newer versions": """
        from outrider import EngineArgs
        EngineArgs(model, num_scheduler_steps=8, disable_async_output_proc=True, optimization_level=2, nnodes=1,
                   structured_outputs_config={"backend": "xgrammar"}, attention_backend="FLASH_ATTN")
        """,
    "settings for images and other files": """
        from outrider import EngineArgs
        EngineArgs(model, limit_mm_per_prompt={"image": 5}, disable_chunked_mm_input=True, tokenizer_mode="mistral",
                   config_format="mistral", load_format="mistral", logits_processors=None)
        """,
    "the engine inside": """
        engine = llm.llm_engine
        assert engine is llm.llm_engine and engine.model_config.max_model_len == 96 == llm.model_config.max_model_len
        assert engine.vllm_config.scheduler_config.max_num_seqs == 4
        assert engine.vllm_config.cache_config.block_size == 16 and engine.get_tokenizer() is llm.get_tokenizer()
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        whole = llm.generate("Hello", params)[0].outputs[0].token_ids
        waiting = [("one", "Hello"), ("two", "Well"), ("three", "Hello")]
        finished, num_steps = {}, 0
        while waiting or engine.has_unfinished_requests():
            if waiting:
                engine.add_request(*waiting.pop(0), params)
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output.outputs[0].token_ids
            num_steps += 1
            if num_steps == 3:
                engine.abort_request("two")
                llm.generate("others go on meanwhile", params)
                engine.reset_prefix_cache(reset_running_requests=True)
        assert finished == {"one": whole, "three": whole} and engine.get_num_unfinished_requests() == 0
        assert engine.step() == []
        """,
    "parts of outputs from steps": """
        from outrider.sampling_params import RequestOutputKind
        engine, texts = llm.llm_engine, {}
        for kind in RequestOutputKind:
            engine.add_request(kind.name, "Hello", SamplingParams(temperature=0, max_tokens=6, output_kind=kind))
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts.setdefault(output.request_id, []).append(output.outputs[0].text)
        assert len(texts["FINAL_ONLY"]) == 1 and len(texts["DELTA"]) > 1
        assert "".join(texts["DELTA"]) == texts["CUMULATIVE"][-1] == texts["FINAL_ONLY"][-1]
        """,
    "a pause between steps": """
        engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        whole = llm.generate("Hello", params)[0].outputs[0]
        engine.add_request("a", "Hello", params)
        while not engine.step():
            pass
        llm.pause_generation("keep")
        while engine.step():  # what the steps in flight added
            pass
        assert engine.step() == [] and engine.has_unfinished_requests() and not llm.engine.has_work
        assert llm.is_paused()
        llm.resume_generation()
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].outputs[0] == whole
        """,
    "a queue of requests": """
        params = SamplingParams(temperature=0, max_tokens=3)
        first = llm.enqueue(["a", "b"], params)
        again = llm.generate("a", params)
        second = llm.enqueue("a", params)
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [output.request_id for output in outputs] == first + second
        assert outputs[0].outputs == outputs[2].outputs == again[0].outputs and llm.wait_for_completion() == []
        """,
    "metrics": """
        from outrider.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector
        def value_of(name):
            return next(metric.value for metric in llm.get_metrics() if metric.name == name)
        before = value_of("vllm:generation_tokens")
        llm.generate("Hello", SamplingParams(max_tokens=5, ignore_eos=True))
        assert value_of("vllm:generation_tokens") == before + 5 and value_of("vllm:num_requests_running") == 0
        kinds = {type(metric) for metric in llm.get_metrics()}
        assert kinds == {Counter, Gauge, Histogram, Vector} and all(issubclass(kind, Metric) for kind in kinds)
        steps = next(metric for metric in llm.get_metrics() if isinstance(metric, Histogram))
        assert steps.count == steps.buckets["+Inf"] == llm.engine.stats.num_steps
        """,
    "helpers": """
        import logging
        from outrider.distributed import cleanup_dist_env_and_memory
        from outrider.logger import init_logger
        from outrider.utils import FlexibleArgumentParser, random_uuid
        from outrider.utils.print_utils import print_embeddings
        assert random_uuid() != random_uuid() and init_logger("mine") is logging.getLogger("mine")
        print_embeddings(llm.embed("Hello")[0].outputs.embedding)
        cleanup_dist_env_and_memory()
        """,
    "environment variables": """
        import outrider.envs as envs
        assert envs.VLLM_USE_V1
        """,
    "config classes": """
        from outrider.config import CompilationConfig, ModelConfig, PoolerConfig, VllmConfig
        from outrider.compat.engine_args import config_for
        assert isinstance(llm.llm_engine.vllm_config, VllmConfig) and isinstance(llm.model_config, ModelConfig)
        given = {"pooler_config": PoolerConfig(task="token_embed"), "compilation_config": CompilationConfig(level=3),
                 "attention_backend": "FLASH_ATTN", "mamba_cache_mode": "all"}
        assert config_for("LLM", "m", given) == config_for("LLM", "m", {})
        assert config_for("LLM", "m", {"attention_backend": "FLEX_ATTENTION"}).attention_backend == "flex"
        """,
    "grammars by their older name": """
        from outrider.sampling_params import GuidedDecodingParams
        guided = GuidedDecodingParams(choice=["Positive", "Negative"], backend="auto")
        (output,) = llm.generate("It is wonderful!", SamplingParams(guided_decoding=guided, max_tokens=20))
        assert output.outputs[0].text in ("Positive", "Negative")
        assert GuidedDecodingParams.from_optional(json=None, backend="auto") is None
        """,
    "optional parameters": """
        params = SamplingParams.from_optional(n=None, top_p=None, temperature=0.0, max_tokens=3, stop=None,
                                              logit_bias={"97": 100}, ignore_eos=True)
        assert llm.generate("a", params)[0].outputs[0].token_ids == [97, 97, 97]
        assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
        """,
    "parts of an output": """
        from outrider.sampling_params import RequestOutputKind
        asked = dict(max_tokens=8, seed=3, n=2, logprobs=1, prompt_logprobs=0, ignore_eos=True)
        whole = llm.generate("Hello", SamplingParams(**asked, output_kind=RequestOutputKind.DELTA))[0]
        parts = list(llm.stream("Hello", SamplingParams(**asked, output_kind=RequestOutputKind.DELTA)))
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 2
        for i, sample in enumerate(whole.outputs):
            assert "".join(part.outputs[i].text for part in parts) == sample.text
            assert sum((part.outputs[i].token_ids for part in parts), []) == sample.token_ids
            assert len(sum((part.outputs[i].logprobs for part in parts), [])) == 8
        assert sum((part.prompt_logprobs for part in parts), []) == whole.prompt_logprobs
        (last,) = llm.stream("Hello", SamplingParams(**asked, output_kind=RequestOutputKind.FINAL_ONLY))
        assert last.outputs == whole.outputs
        """,
}

REFUSED = {
    "a dict as a grammar": ("SamplingParams(guided_decoding={'json': {}})",
                            "guided_decoding must be a GuidedDecodingParams, got"),
    "two grammars": ("from outrider.sampling_params import StructuredOutputsParams as Form\n"
                     "SamplingParams(guided_decoding=Form(regex='a'), structured_outputs=Form(regex='a'))",
                     "guided_decoding and structured_outputs say the same thing"),
    "another kind of output": ("SamplingParams(output_kind='delta')", "output_kind must be a RequestOutputKind, got"),
    "helpers of vLLM": ("from outrider.utils import make_async", "make_async is not supported: use asyncio.to_thread"),
    "another pooling": ("from outrider.config import PoolerConfig\nLLM(model, pooler_config=PoolerConfig("
                        "pooling_type='MEAN'))", "pooling_type='MEAN' is not the default here: give PoolingParams"),
    "another dataset": ("import argparse\nfrom outrider.benchmarks.datasets import get_samples\n"
                        "get_samples(argparse.Namespace(dataset_name='hf', dataset_path='x'), None)",
                        "dataset_name='hf' is not supported: use random, or custom"),
    "a cache that moves": ("from outrider.config import KVTransferConfig", "KVTransferConfig is not supported: one en"),
    "a variable": ("import outrider.envs as envs\nenvs.VLLM_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT is not supported: "
                   "use exact=True"),
    "an unknown key of the model's config": (
        "LLM(model, hf_overrides={'attention_of_tomorrow': 3})", "attention_of_tomorrow=3: Outrider does"),
    "other ends of text": ("LLM(model, hf_overrides={'eos_token_id': 3})", "eos_token_id is not supported: use stop"),
    "a profile without a place": ("llm.start_profile()", "profiles need a folder: start the engine with profiler_dir"),
    "a profile of some steps": ("LLM(model, profiler_config={'torch_profiler_dir': 'x', 'max_iterations': 3})",
                                "profiler_config: max_iterations=3 is not supported: start_profile and stop_profile"),
    "groups of devices": ("from outrider.distributed import init_distributed_environment",
                          "outrider.distributed.init_distributed_environment is not supported: a model is cut"),
    "a setting that the groups lack": ("llm.llm_engine.model_config.code_revision",
                                       "ModelConfig has no 'code_revision' in outrider; it has model, "),
    "a field that asks for something": ("SamplingParams(best_of=2)", "best_of is not supported: use n"),
    "a request twice": ("engine = llm.llm_engine\ntry:\n    engine.add_request('a', 'x', SamplingParams())\n"
                        "    engine.add_request('a', 'x', SamplingParams())\nfinally:\n    engine.abort_request('a')",
                        "request id 'a' is in use"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_script_runs(name: str, names: dict[str, Any]) -> None:
    exec(textwrap.dedent(RUNS[name]), dict(names))


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_is_refused_by_name(name: str, names: dict[str, Any]) -> None:
    script, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError, AttributeError, ImportError), match=message):
        exec(script, dict(names))


DELTAS = """
import asyncio
from outrider import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from outrider.sampling_params import RequestOutputKind

async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, max_num_seqs=2, max_model_len=64,
                                                             num_pages=64))
    outputs = {}
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, output_kind=kind)
        outputs[kind] = [output async for output in engine.generate("Hello", params, kind.name)]
    (last,) = outputs[RequestOutputKind.FINAL_ONLY]
    assert last.finished and last.outputs == outputs[RequestOutputKind.CUMULATIVE][-1].outputs
    parts = outputs[RequestOutputKind.DELTA]
    assert len(parts) > 1 and "".join(part.outputs[0].text for part in parts) == last.outputs[0].text
    assert sum((part.outputs[0].token_ids for part in parts), []) == last.outputs[0].token_ids
    engine.shutdown()

asyncio.run(main())
"""
COMMAND_LINE = """
from outrider import LLM, EngineArgs, LLMEngine, SamplingParams
from outrider.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(description="A script of its own")
EngineArgs.add_cli_args(parser)
parser.set_defaults(model=model, enforce_eager=True, runner="pooling")
parser.add_argument_group("Sampling parameters").add_argument("--max-tokens", type=int)
given = ["--max_num_seqs=2", "--max-model-len", "64", "--num-gpu-blocks-override", "64", "--block-size=32", "--dtype",
         "float32", "--max_tokens", "3", "--speculative-config.method", "ngram",
         "--speculative-config.num_speculative_tokens=2", "--no-enable-prefix-caching", "--swap-space", "4"]
args = parser.parse_args(given)
assert args.tensor_parallel_size == 1 and args.seed == 0 and args.tokenizer is None
own = EngineArgs.from_cli_args(args)
config = own.create_engine_config()
assert config.cache_config.block_size == 32 and config.model_config.model == model and config.lora_config is None
assert config.speculative_config.num_speculative_tokens == 2 and not config.cache_config.enable_prefix_caching
settings = vars(args)
max_tokens = settings.pop("max_tokens")
with LLM(**settings) as llm:
    (output,) = llm.generate("abcabcabc", SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
engine = LLMEngine.from_engine_args(own)
engine.add_request("0", "Hello", SamplingParams(max_tokens=2))
while engine.has_unfinished_requests():
    outputs = engine.step()
assert outputs[0].finished and engine.get_metrics()
engine.shutdown()
"""


PAUSES = """
import asyncio
from outrider import AsyncLLM, SamplingParams

async def main():
    async with AsyncLLM(model, max_num_seqs=2, max_model_len=96, num_pages=64) as llm:
        params, seen = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), []

        async def read():
            async for output in llm.generate("Hello", params):
                seen.append(len(output.outputs[0].token_ids))
            return output

        async def begin():
            reading = asyncio.create_task(read())
            while not (llm.engine.num_requests or reading.done()):
                await asyncio.sleep(0.001)
            return reading

        whole = (await read()).outputs[0]
        seen.clear()
        await llm.pause_generation(mode="keep")
        waiting = await begin()
        await asyncio.sleep(0.05)
        assert await llm.is_paused() and not seen
        await llm.resume_generation()
        assert (await waiting).outputs[0] == whole
        seen.clear()
        running = await begin()
        while not seen:
            await asyncio.sleep(0.001)
        await llm.pause_generation(mode="keep")
        num_seen = len(seen)
        await asyncio.sleep(0.05)
        assert len(seen) == num_seen
        await llm.resume_generation()
        assert (await running).outputs[0] == whole
        await llm.pause_generation(mode="keep")
        waiting = await begin()
        await llm.pause_generation()
        assert (await waiting).outputs[0].finish_reason == "abort"
        await llm.resume_generation()
        assert (await read()).outputs[0] == whole and not await llm.is_paused()
        running = await begin()
        await llm.pause_generation(mode="wait")
        assert (await running).outputs[0] == whole
        waiting = await begin()
        await llm.resume_generation()
        assert (await waiting).outputs[0] == whole
        try:
            await llm.pause_generation(mode="drain")
        except ValueError as error:
            assert "mode must be 'abort', 'wait' or 'keep', got 'drain'" in str(error)
        else:
            raise AssertionError("no such mode")

asyncio.run(main())
"""
PROFILE = """
import gzip
from pathlib import Path
from outrider import LLM, SamplingParams
from outrider.config import ProfilerConfig

config = ProfilerConfig(profiler="torch", torch_profiler_dir=str(Path(model).parent / "profiles"))
with LLM(model, max_num_seqs=2, max_model_len=64, num_pages=64, profiler_config=config) as llm:
    for _ in range(2):
        llm.start_profile("two tokens")
        llm.generate("Hello", SamplingParams(max_tokens=2))
        file = Path(llm.stop_profile())
        assert b"aten::" in gzip.decompress(file.read_bytes()) and file.name.startswith("two tokens-")
    try:
        llm.stop_profile()
    except ValueError as error:
        assert "no profile is being recorded" in str(error)
    else:
        raise AssertionError
"""
OVERRIDES = """
from outrider import LLM, SamplingParams

sizes = {"max_num_seqs": 2, "num_pages": 64}
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
tokens = {}
for theta in (None, 100.0):
    overrides = None if theta is None else {"rope_theta": theta, "max_position_embeddings": 48, "new": 1}
    with LLM(model, **sizes, hf_overrides=overrides, ignore_config_keys=["new"], skip_tokenizer_init=True) as llm:
        (output,) = llm.generate({"prompt_token_ids": list(range(20, 50))}, params)
        tokens[theta] = output.outputs[0].token_ids
        assert output.outputs[0].text == "" and (llm.model_config.max_model_len == 48) == (theta is not None)
        try:
            llm.generate("Hello")
        except ValueError as error:
            assert "skip_tokenizer_init is set: give prompts as token ids" in str(error)
assert tokens[None] != tokens[100.0]
"""


@pytest.mark.parametrize("script", [DELTAS, COMMAND_LINE, PAUSES, PROFILE, OVERRIDES],
                         ids=["deltas", "command line", "pauses", "profile", "overrides"])
def test_a_script_with_an_engine_of_its_own_runs(script: str, model: Path) -> None:
    exec(script, {"model": str(model)})
