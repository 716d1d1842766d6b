"""A table of the body fields that other servers support and this one does not, for each type of body.

A field is ignored if leaving it out does not change the meaning of the answer. Otherwise it is refused with a hint what
to use instead. Fields that a body supports are not looked up here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias


class IgnoredField(NamedTuple):
    why: str  # no answer depends on it


class RefusedField(NamedTuple):
    instead: str
    neutral: tuple[Any, ...] = ()  # values that ask for what happens anyway

    def allows(self, value: Any) -> bool:
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in self.neutral)


KnownFields: TypeAlias = Mapping[str, IgnoredField | RefusedField]


def _each(field: IgnoredField | RefusedField, *names: str) -> KnownFields:
    return dict.fromkeys(names, field)


OPENAI: KnownFields = {
    **_each(IgnoredField("the API key says who asks"), "client_metadata", "safety_identifier", "user"),
    **_each(IgnoredField("only /v1/responses keeps anything"), "metadata", "store"),
    **_each(IgnoredField("every prefix is cached"), "prompt_cache_key", "prompt_cache_options",
            "prompt_cache_retention"),
    **_each(IgnoredField("a hint to OpenAI's models"), "prediction", "verbosity"),
    "service_tier": IgnoredField("there is one tier"),
    "context_management": IgnoredField("conversations are not shortened"),
    "max_tool_calls": IgnoredField("it is for tools that a server runs"),
    "stream_options": IgnoredField("streams of this route have their usage"),
    "truncation": IgnoredField("a conversation that is too long is refused"),
    "audio": RefusedField("text is the only modality"),
    "background": RefusedField("a response is the answer to its request: wait for it, or stream it", (False,)),
    "best_of": RefusedField("use n", (1,)),
    "conversation": RefusedField("use previous_response_id, or send the whole conversation"),
    "echo": RefusedField("the prompt is not repeated", (False,)),
    "function_call": RefusedField("use tool_choice"),
    "functions": RefusedField("use tools"),
    "include": RefusedField("answers hold all there is", ([],)),
    "modalities": RefusedField("text is the only modality", (["text"],)),
    "moderation": RefusedField("nothing is moderated"),
    "prompt": RefusedField("there are no stored prompts: send messages, input or instructions"),
    "reasoning": RefusedField("use reasoning_effort, include_reasoning or chat_template_kwargs", ({},)),
    "suffix": RefusedField("text is not inserted", ("",)),
    "web_search_options": RefusedField("there is no web search"),
}
ANTHROPIC: KnownFields = {
    "cache_control": IgnoredField("every prefix is cached"),
    **_each(IgnoredField("the server says where and how fast it computes"), "inference_geo", "speed"),
    **_each(IgnoredField("there is one version of the API"), "anthropic_version", "anthropic_beta", "betas"),
    "container": RefusedField("the server runs no code"),
    "mcp_servers": RefusedField("the server calls no tools: give them in tools", ([],)),
    "thinking": RefusedField("use reasoning_effort, or chat_template_kwargs if the model's template reads it"),
    "thinking_budget": RefusedField("use max_tokens"),
}
VLLM: KnownFields = {
    **_each(IgnoredField("it is for servers that share the work"), "kv_transfer_params", "ec_transfer_params"),
    "media_io_kwargs": IgnoredField("it is about videos and sounds"),
    "add_special_tokens": RefusedField("prompts may be token ids"),
    "activation": RefusedField("use use_activation"),
    "chat_template": RefusedField("a template of a request's own is not run; the server has --chat-template"),
    "embed_dtype": RefusedField("numbers are float32", ("float32",)),
    "enable_response_messages": RefusedField("answers have items only", (False,)),
    "endianness": RefusedField("numbers are little-endian", ("native", "little")),
    "guided_choice": RefusedField('use structured_outputs: {"choice": ...}'),
    "guided_decoding_backend": RefusedField("there is one grammar library"),
    "guided_grammar": RefusedField('use structured_outputs: {"grammar": ...}'),
    "guided_json": RefusedField('use structured_outputs: {"json": ...}'),
    "guided_regex": RefusedField('use structured_outputs: {"regex": ...}'),
    "guided_whitespace_pattern": RefusedField('use structured_outputs: {"json": ..., "whitespace_pattern": ...}'),
    "instruction": RefusedField("write it into the texts"),
    "logits_processors": RefusedField("use logit_bias, bad_words or allowed_token_ids", ([],)),
    "logprob_token_ids": RefusedField("use logprobs"),
    "mm_processor_kwargs": RefusedField("use detail of an image", ({},)),
    "previous_input_messages": RefusedField("use previous_response_id, or send the whole conversation", ([],)),
    "repetition_detection": RefusedField("use repetition_penalty"),
    "return_tokens_as_token_ids": RefusedField("use return_token_ids", (False,)),
    "softmax": RefusedField("use use_activation"),
    "spaces_between_special_tokens": RefusedField("the tokenizer's decoder says where spaces are", (True,)),
    "structural_tag": RefusedField('use structured_outputs: {"structural_tag": ...}'),
    "thinking_token_budget": RefusedField("use max_tokens"),
    "truncate_prompt_tokens": RefusedField("truncate the prompt yourself"),
}
LLAMA_CPP: KnownFields = {
    "cache_prompt": IgnoredField("every prefix is cached"),
    **_each(IgnoredField("the scheduler chooses the row"), "id_slot", "slot_id"),
    **_each(IgnoredField("a conversation that is too long is refused"), "n_keep", "n_discard"),
    **_each(IgnoredField("drafts change no answer"), "speculative.n_max", "speculative.n_min", "speculative.p_min"),
    **_each(IgnoredField("the server chooses how it computes"), "backend_sampling", "sse_ping_interval"),
    **_each(IgnoredField("answers have usage and metrics"), "return_progress", "timings_per_token"),
    "response_fields": IgnoredField("answers have all their fields"),
    **_each(IgnoredField("it goes with mirostat, which is not served"), "mirostat_eta", "mirostat_tau"),
    **_each(IgnoredField("it goes with dry_multiplier, which is not served"), "dry_allowed_length", "dry_base",
            "dry_penalty_last_n", "dry_sequence_breakers"),
    "dynatemp_exponent": IgnoredField("it goes with dynatemp_range, which is not served"),
    "repeat_last_n": IgnoredField("penalties count the whole text"),
    "xtc_threshold": IgnoredField("it goes with xtc_probability, which is not served"),
    "dry_multiplier": RefusedField("use repetition_penalty", (0,)),
    "dynatemp_range": RefusedField("use temperature", (0,)),
    "grammar": RefusedField('use structured_outputs: {"grammar": ...}', ("",)),
    "grammar_lazy": RefusedField("use tools with tool_choice auto", (False,)),
    "grammar_triggers": RefusedField("use tools with tool_choice auto", ([],)),
    "image_data": RefusedField("use messages with images", ([],)),
    "json_schema": RefusedField("use response_format"),
    "lora": RefusedField("name the adapter as model", ([],)),
    "min_keep": RefusedField("use min_p or top_k", (0, 1)),
    "mirostat": RefusedField("use temperature and top_p", (0,)),
    "n_cmpl": RefusedField("use n", (1,)),
    "n_indent": RefusedField("use structured_outputs", (0,)),
    "n_predict": RefusedField("use max_tokens"),
    "n_probs": RefusedField("use logprobs", (0,)),
    "parse_tool_calls": RefusedField("the server's --tool-call-parser says what a call is", (True,)),
    "post_sampling_probs": RefusedField("use logprobs", (False,)),
    "preserved_tokens": RefusedField("use skip_special_tokens", ([],)),
    "reasoning_format": RefusedField("use include_reasoning; the server's --reasoning-parser says what reasoning is",
                                ("auto", "deepseek")),
    "repeat_penalty": RefusedField("use repetition_penalty", (1,)),
    "return_tokens": RefusedField("use return_token_ids", (False,)),
    "samplers": RefusedField("filters have one order: set them to values that keep all tokens"),
    "t_max_predict_ms": RefusedField("use timeout", (0, -1)),
    "tfs_z": RefusedField("use top_p", (1,)),
    "thinking_forced_open": RefusedField("use chat_template_kwargs", (False,)),
    "top_n_sigma": RefusedField("use min_p", (0, -1)),
    **_each(RefusedField("use top_p", (1,)), "typ_p", "typical_p"),
    "xtc_probability": RefusedField("use temperature", (0,)),
}
SGLANG: KnownFields = {
    "ebnf": RefusedField('use structured_outputs: {"grammar": ...}'),
    "extra_key": RefusedField("use cache_salt"),
    "lora_path": RefusedField("name the adapter as model"),
    "no_stop_trim": RefusedField("use include_stop_str_in_output", (False,)),
    "regex": RefusedField('use structured_outputs: {"regex": ...}'),
    "rid": RefusedField("use request_id"),
    "separate_reasoning": RefusedField("use include_reasoning; the server's --reasoning-parser says what reasoning is",
                                  (True,)),
    "stream_reasoning": RefusedField("use include_reasoning", (True,)),
}
# Fields that gateways and hosted models read on the way, and pass on to a server that they take for another gateway.
GATEWAYS: KnownFields = {
    **_each(IgnoredField("this server is the only provider"), "models", "provider", "route", "fallbacks"),
    **_each(IgnoredField("a gateway traces by it"), "litellm_call_id", "litellm_metadata", "litellm_session_id",
            "litellm_trace_id", "session_id", "tags", "trace"),
    **_each(IgnoredField("a gateway repeats and caches requests"), "cache", "caching", "keep_alive", "num_retries"),
    **_each(IgnoredField("a field has the same meaning for every model"), "allowed_openai_params", "drop_params"),
    "transforms": IgnoredField("a conversation that is too long is refused"),
    "usage": IgnoredField("answers have their usage; streams with stream_options.include_usage"),
    "enable_thinking": RefusedField("give it in chat_template_kwargs"),
    "extra_body": RefusedField("give its fields in the body itself"),
    "format": RefusedField("use response_format"),
    "guardrails": RefusedField("nothing is moderated", ([],)),
    "options": RefusedField("give its fields in the body itself", ({},)),
    "plugins": RefusedField("the server calls no tools: give them in tools", ([],)),
    "preset": RefusedField("give its fields in the body itself"),
    "think": RefusedField("use reasoning_effort"),
    "top_a": RefusedField("use min_p", (0,)),
}
SCHEMAS: Mapping[str, KnownFields] = {
    "OpenAI": OPENAI, "Anthropic": ANTHROPIC, "vLLM": VLLM, "llama.cpp": LLAMA_CPP, "SGLang": SGLANG,
    "gateways": GATEWAYS,
}
OF_BODIES: KnownFields = {name: field for fields in SCHEMAS.values() for name, field in fields.items()}
# Fields of the objects in a body: messages, their parts, tools, options.
OF_PARTS: KnownFields = {
    **_each(IgnoredField("a part of an answer that a client sends back"), "annotations", "caller", "citations",
            "extra_content", "namespace", "parsed", "parsed_arguments", "parsed_output", "phase",
            "provider_specific_fields", "reasoning_details", "thinking_blocks", "toolset_name"),
    **_each(IgnoredField("every prefix is cached"), "cache_control", "prompt_cache_breakpoint"),
    **_each(IgnoredField("messages are not stored"), "metadata", "store", "user"),
    **_each(IgnoredField("the model sees and may call every tool of the list"), "allowed_callers", "defer_loading"),
    "input_examples": IgnoredField("the schema of a tool says what its arguments are"),
    "uuid": IgnoredField("an image is known by its content"),
    "budget_tokens": IgnoredField("max_tokens bounds the answer"),
    "eager_input_streaming": IgnoredField("arguments are streamed as they are written"),
    "strict": IgnoredField("arguments of forced calls always have the schema's form"),
    **_each(IgnoredField("reasoning comes as it was written"), "display", "generate_summary", "summary"),
    "include_obfuscation": IgnoredField("nothing is added to streams"),
    "verbosity": IgnoredField("a hint to OpenAI's models"),
    "audio": RefusedField("texts and images are the only media", ([],)),
    "images": RefusedField("use parts of the type image_url", ([],)),
    "function_call": RefusedField("use tool_calls"),
    **_each(RefusedField("use continue_final_message", (False,)), "partial", "prefix"),
}
