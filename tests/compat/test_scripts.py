"""Scripts in the way that vLLM's documentation teaches, with only the import changed: each runs, or is refused with a
message that names the feature."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

RUNS = {
    "several prompts": """
        prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
        outputs = llm.generate(prompts, params)
        for prompt, output in zip(prompts, outputs):
            assert output.prompt == prompt and len(output.outputs[0].token_ids) <= 16
        """,
    "no bar": "assert len(llm.generate(['a', 'b'], SamplingParams(max_tokens=2), use_tqdm=False)) == 2",
    "a bar of one's own": """
        made = []
        class Bar:
            def __init__(self, total, desc, **options): made.append(total)
            def update(self, n): made.append(n)
            def set_postfix_str(self, text, refresh=True): pass
            def close(self): made.append("closed")
        llm.generate(["a", "b"], SamplingParams(max_tokens=2), use_tqdm=Bar)
        assert made == [2, 1, 1, "closed"]
        """,
    "default parameters": """
        params = llm.get_default_sampling_params()
        params.max_tokens = 5
        (output,) = llm.generate("Hello", params)
        assert output.finished and len(output.outputs[0].token_ids) <= 5
        """,
    "parameters for each prompt": """
        each = [SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)]
        assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b"], each)] == [2, 5]
        """,
    "token ids as keyword": """
        outputs = llm.generate(prompt_token_ids=[[5, 6, 7], [8, 9]], sampling_params=SamplingParams(max_tokens=2))
        assert [o.prompt_token_ids for o in outputs] == [[5, 6, 7], [8, 9]]
        """,
    "typed prompts": """
        from outrider.inputs import TextPrompt, TokensPrompt
        outputs = llm.generate([TokensPrompt(prompt_token_ids=[5, 6]), TextPrompt(prompt="hi")],
                               SamplingParams(max_tokens=2))
        assert outputs[0].prompt is None and outputs[1].prompt == "hi"
        """,
    "a dict with nothing in it that is not text": """
        llm.generate({"prompt": "hi", "multi_modal_data": None}, SamplingParams(max_tokens=1))
        """,
    "log-probabilities": """
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1))
        sample = output.outputs[0]
        chosen = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs)]
        assert math.isclose(sample.cumulative_logprob, sum(chosen)) and output.prompt_logprobs[0] is None
        """,
    "cumulative log-probability only where asked": """
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=3))
        assert output.outputs[0].cumulative_logprob is None
        """,
    "several samples": """
        (output,) = llm.generate("Once", SamplingParams(n=3, temperature=1.0, max_tokens=4, seed=3))
        assert [sample.index for sample in output.outputs] == [0, 1, 2]
        """,
    "stop strings": """
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=8, stop=["\\n", "zz"], stop_token_ids=[3]))
        assert output.outputs[0].finish_reason in ("stop", "length")
        """,
    "parameters are changed between calls": """
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        assert len(llm.generate("a", params)[0].outputs[0].token_ids) == 2
        params.max_tokens = 4
        assert len(llm.generate("a", params)[0].outputs[0].token_ids) == 4
        """,
    "a clone is one's own": """
        params = SamplingParams(stop_token_ids=[3])
        other = params.clone()
        other.stop_token_ids.append(4)
        assert params.stop_token_ids == [3] and other.stop_token_ids == [3, 4]
        """,
    "a bias of any size": """
        (output,) = llm.generate("a", SamplingParams(max_tokens=3, temperature=0.7, logit_bias={97: 1e6, 98: -1e30},
                                                     ignore_eos=True))
        assert output.outputs[0].token_ids == [97, 97, 97]
        """,
    "prefix hits are told": """
        llm.generate("x" * 64, SamplingParams(max_tokens=1))
        assert llm.generate("x" * 64, SamplingParams(max_tokens=1))[0].num_cached_tokens >= 32
        """,
    "priorities": "llm.generate(['a', 'b'], SamplingParams(max_tokens=1), priority=[1, 0], lora_request=None)",
    "a chat": """
        messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hi"}]
        (output,) = llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False)
        text = bytes(output.prompt_token_ids).decode()
        assert text == "<system>You help.</><user>Hi</><assistant>"
        """,
    "several chats": """
        chat = [{"role": "user", "content": "Hi"}]
        assert len(llm.chat([chat, chat, chat], SamplingParams(max_tokens=1))) == 3
        """,
    "content in parts": """
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        assert bytes(output.prompt_token_ids) == b"<user>one\\ntwo</><assistant>"
        """,
    "variables of the template": """
        (output,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1),
                             chat_template_kwargs={"enable_thinking": True})
        assert b"(think)" in bytes(output.prompt_token_ids)
        """,
    "variables that the template does not use": """
        chat = [{"role": "user", "content": "Hi"}]
        (plain,), (output,) = (llm.chat(chat, SamplingParams(max_tokens=1), chat_template_kwargs=variables)
                               for variables in (None, {"thinking": True, "colour": "red"}))
        assert output.prompt_token_ids == plain.prompt_token_ids
        """,
    "a template of one's own": """
        (output,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1),
                             chat_template="{{ messages[0].content }}!", add_generation_prompt=False)
        assert bytes(output.prompt_token_ids) == b"Hi!"
        """,
    "the last message is continued": """
        (output,) = llm.chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}],
                             SamplingParams(max_tokens=1), add_generation_prompt=False, continue_final_message=True)
        assert bytes(output.prompt_token_ids) == b"<user>Hi</><assistant>Well,"
        """,
    "the tokenizer's template": """
        text = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False,
                                                       add_generation_prompt=True)
        assert text == "<user>Hi</><assistant>"
        assert llm.apply_chat_template([{"role": "user", "content": "Hi"}]) == list(b"<user>Hi</>")
        """,
    "beam search": """
        from outrider.sampling_params import BeamSearchParams
        (output,) = llm.beam_search([{"prompt": "Hello"}], BeamSearchParams(beam_width=3, max_tokens=4))
        scores = [beam.cum_logprob / len(beam.tokens) for beam in output.sequences]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)
        greedy = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=4, logprobs=1))[0].outputs[0]
        best = max(beam.cum_logprob for beam in output.sequences)
        assert best >= greedy.cumulative_logprob - 1e-4 and output.sequences[0].text.startswith("Hello")
        """,
    "embeddings": """
        (output,) = llm.embed("Hello, my name is")
        embeds = output.outputs.embedding
        assert len(embeds) == output.outputs.hidden_size and math.isclose(sum(x * x for x in embeds), 1, rel_tol=1e-4)
        """,
    "scores": """
        outputs = llm.score("What is the capital of France?", ["It is Paris.", "What is the capital of France?"])
        assert outputs[0].outputs.score < outputs[1].outputs.score <= 1.001
        """,
    "hidden states": """
        from outrider import PoolingParams
        (output,) = llm.encode("Hello", pooling_task="token_embed")
        assert output.outputs.data.shape[0] == len(output.prompt_token_ids)
        (output,) = llm.encode("Hello", PoolingParams(dimensions=4))
        assert output.outputs.data.shape == (4,)
        """,
    "names at their places": """
        from outrider import AsyncLLMEngine, CompletionOutput, EngineArgs, RequestOutput
        from outrider.outputs import RequestOutput as Same
        from outrider.sampling_params import SamplingParams as SameParams
        assert RequestOutput is Same and SamplingParams is SameParams
        from outrider import PromptType, ScoringRequestOutput
        from outrider.outputs import EmbeddingRequestOutput, PoolingOutput, PoolingRequestOutput
        """,
    "modules at their places": """
        import outrider
        from outrider.engine.arg_utils import AsyncEngineArgs, EngineArgs
        from outrider.engine.async_llm_engine import AsyncLLMEngine
        from outrider.entrypoints.llm import LLM as Same
        from outrider.pooling_params import PoolingParams
        from outrider.v1.engine.async_llm import AsyncLLM
        assert Same is LLM and AsyncLLM is AsyncLLMEngine is outrider.AsyncLLM and EngineArgs is outrider.EngineArgs
        """,
    "arguments that ask for nothing": """
        llm.generate("a", SamplingParams(max_tokens=1), tokenization_kwargs=None, prompt_adapter_request=None)
        llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1), chat_template=None, tools=None,
                 chat_template_content_format="auto", mm_processor_kwargs=None)
        """,
    "names of the tokenizer": """
        tokenizer = llm.get_tokenizer()
        assert tokenizer.eos_token is None and tokenizer.convert_ids_to_tokens([97, 98]) == ["a", "b"]
        assert tokenizer.convert_tokens_to_ids("a") == tokenizer.get_vocab()["a"] == 97
        assert tokenizer("ab").input_ids == tokenizer(["ab"])["input_ids"][0] == tokenizer.encode("ab")
        assert len(tokenizer) == len(tokenizer.get_vocab())
        """,
}

REFUSED = {
    "classes": ("llm.classify(['a'])", "this model has no head that classifies"),
    "other tasks of pooling": ("llm.encode('a', pooling_task='plugin')", "pooling_task must be one of embed, classify"),
    "adapters": ("llm.generate('a', lora_request=object())", "lora_request must be a LoRARequest"),
    "images": ("llm.generate({'prompt': 'a', 'multi_modal_data': {'image': 1}})", "is served without images"),
    "images in a chat": ("llm.chat([{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {}}]}])",
                         "a part of type 'image_url' in a message is not supported"),
    "tools without a template for them": ("llm.chat([{'role': 'user', 'content': 'a'}], tools=[{'type': 'function'}])",
                                          "tools is not supported: the model's chat template does not use it"),
    "an unknown variable": ("llm.chat([{'role': 'user', 'content': 'a'}], enable_thinkin=True)",
                            "enable_thinkin is not supported.*did you mean enable_thinking"),
    "logits processors": ("SamplingParams(logits_processors=[1])", "logits_processors is not supported: give"),
    "a misspelt parameter": ("SamplingParams(temprature=1)",
                             r"^SamplingParams: unknown field 'temprature': did you mean temperature\?"),
    "a parameter beside the parameters": (
        "llm.generate('a', max_tokens=5)",
        r"LLM.generate: max_tokens is a field of SamplingParams: write sampling_params=SamplingParams\(max_tokens=5\)"),
    "a parameter of a chat beside them": ("llm.chat([{'role': 'user', 'content': 'a'}], temperature=0)",
                                          "LLM.chat: temperature is a field of SamplingParams"),
    "a misspelt argument": ("llm.generate(promts='a')", r"unknown argument 'promts': did you mean prompts\?"),
    "a misspelt model": ("LLM(modle='a')", r"LLM: unknown setting 'modle': did you mean model\?"),
    "no model": ("LLM()", "LLM needs a model"),
    "a misspelt drafter": ("LLM(model, speculative_config={'method': 'ngrm', 'num_speculative_tokens': 2})",
                           r"^speculative_config: method 'ngrm': did you mean 'ngram'\? It must be one of ngram"),
    "a misspelt key of drafting": ("LLM(model, speculative_config={'methd': 'ngram'})",
                                   r"^speculative_config: unknown key 'methd': did you mean method\? Known are"),
    "a module that nobody has": ("import outrider.nothing", "No module named 'outrider.nothing'"),
    "arguments of the tokenizer": ("llm.generate('a', tokenization_kwargs={'truncation': True})",
                                   "tokenization_kwargs is not supported: encode the prompt"),
    "a text as a chat": ("llm.chat('Hello')", "messages must be a list of dicts.*got 'Hello': write .*LLM.generate"),
    "a message of nobody": ("llm.chat([{'content': 'a'}])", "a message needs a 'role'"),
    "other methods of the tokenizer": ("llm.get_tokenizer().tokenize('a')", "this tokenizer has no 'tokenize'"),
    "content of templates": ("llm.chat([{'role': 'user', 'content': 'a'}], chat_template_content_format='openai')",
                             "chat_template_content_format='openai' is not supported"),
    "short names of types": ("LLM(model, dtype='bf16')", r"^dtype 'bf16': did you mean 'bfloat16'\?"),
    "another name of CUDA": ("LLM(model, device='gpu')", r"^device 'gpu': did you mean 'cuda'\?"),
    "drafts without a method": (
        "LLM(model, speculative_config={'num_speculative_tokens': 2})",
        r"^speculative_config: method must be given, or a 'model' whose files tell it: one of ngram, "),
    "drafts without a number": ("LLM(model, speculative_config={'method': 'ngram'})",
                                "^speculative_config: num_speculative_tokens must be given: .* 1 to 16: "),
    "a drafter on several devices": (
        "LLM(model, speculative_config={'model': 'x', 'num_speculative_tokens': 2, 'draft_tensor_parallel_size': 2})",
        "speculative_config: draft_tensor_parallel_size=2 is not supported: a model is cut by"),
    "a misspelt beam": ("from outrider import BeamSearchParams\nBeamSearchParams(beam_widht=2, max_tokens=2)",
                        r"unknown field 'beam_widht': did you mean beam_width\?"),
    "a bad change": ("p = SamplingParams(); p.temperature = -1; llm.generate('a', p)", "temperature must be a number"),
    "two kinds of prompts": ("llm.generate('a', prompt_token_ids=[[1]])", "give prompts or prompt_token_ids, not both"),
    "wide beams": ("from outrider import BeamSearchParams\n"
                   "llm.beam_search('a', BeamSearchParams(beam_width=32, max_tokens=2))", "max_logprobs"),
    "other pooling": ("from outrider import PoolingParams\nPoolingParams(pooling='cls')", "pooling must be one of"),
    "several stages": ("LLM(model, pipeline_parallel_size=2)",
                       "pipeline_parallel_size=2 is not supported: a model is cut by tensor_parallel_size alone"),
    "another fp8 cache": ("LLM(model, kv_cache_dtype='fp8_e5m2')", "kv_cache_dtype 'fp8_e5m2': did you mean"),
    "another task": ("LLM(model, task='transcription')", "task='transcription' is not supported: a head that class"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_script_runs(name: str, names: dict[str, Any]) -> None:
    exec(textwrap.dedent(RUNS[name]), dict(names))


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_is_refused_by_name(name: str, names: dict[str, Any]) -> None:
    script, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError, AttributeError, ImportError), match=message):
        exec(script, dict(names))


ASYNC = """
import asyncio
from outrider import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, max_num_seqs=2, max_model_len=64,
        num_pages=64, disable_log_stats=True))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    seen = []
    async for output in engine.generate("Hello", params, "request-1"):
        assert output.request_id == "request-1"
        seen.append(len(output.outputs[0].token_ids))
    assert seen[-1] == 6 and seen == sorted(seen)
    engine.shutdown()

asyncio.run(main())
"""
ARGUMENTS = """
from dataclasses import asdict
from outrider import LLM, EngineArgs, SamplingParams

args = EngineArgs(model=model, block_size=32, max_num_seqs=2, max_model_len=64, num_pages=64, swap_space=4)
with LLM(**asdict(args) | {"seed": 3}) as llm:
    assert llm.generate("Hello", SamplingParams(max_tokens=2))[0].finished
"""
OTHER_TOKENIZER = """
import shutil
from pathlib import Path
from outrider import LLM, SamplingParams

folder = Path(model).parent / "bare"
shutil.copytree(model, folder)
(folder / "tokenizer.json").unlink()
with LLM(str(folder), tokenizer=model, max_num_seqs=2, max_model_len=64, num_pages=64) as llm:
    assert llm.generate("Hello", SamplingParams(max_tokens=2))[0].prompt_token_ids == list(b"Hello")
"""


@pytest.mark.parametrize("script", [ASYNC, ARGUMENTS, OTHER_TOKENIZER], ids=["async", "arguments", "tokenizer"])
def test_a_script_with_an_engine_of_its_own_runs(script: str, model: Path) -> None:
    exec(script, {"model": str(model)})
