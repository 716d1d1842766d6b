"""llama.cpp for comparisons, by its shared library alone: greedy decoding of a GGUF file, called through ctypes.

A folder with `libllama.so` (or `libllama.v*.so`), `libggml*.so` and, where they are apart, the code for each kind of
processor: that of the wheel of llama-cpp-python (`llama_cpp/lib`), of a build of llama.cpp, or of the npm package
`@node-llama-cpp/linux-x64` or `linux-arm64` (`package/bins/*`), which holds llama.cpp as it was built for every kind.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

_P, _I, _U, _B = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_bool


class _Settings(ctypes.Structure):
    """Settings of a model or of a context, handed back as they came. Longer than either: what is behind is not read."""

    _fields_ = (("first", _U * 4), ("others", ctypes.c_uint8 * 1008))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", _I), ("token", ctypes.POINTER(_I)), ("embd", _P), ("pos", ctypes.POINTER(_I)),
        ("n_seq_id", ctypes.POINTER(_I)), ("seq_id", ctypes.POINTER(ctypes.POINTER(_I))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class LlamaLibrary:
    """One model and a context of `sequences` equal parts, of `length` tokens each."""

    def __init__(self, folder: str, model: str, *, threads: int, sequences: int, length: int) -> None:
        where = Path(folder).resolve()
        base, backends, lib = (self._open(where, stem) for stem in ("libggml-base", "libggml", "libllama"))
        for name, result, arguments in (
            ("llama_model_default_params", _Settings, []), ("llama_context_default_params", _Settings, []),
            ("llama_model_load_from_file", _P, [ctypes.c_char_p, _Settings]),
            ("llama_init_from_model", _P, [_P, _Settings]), ("llama_set_n_threads", None, [_P, _I, _I]),
            ("llama_get_memory", _P, [_P]), ("llama_memory_clear", None, [_P, _B]),
            ("llama_batch_init", _Batch, [_I, _I, _I]), ("llama_decode", _I, [_P, _Batch]),
            ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [_P, _I]),
            ("llama_model_get_vocab", _P, [_P]), ("llama_vocab_n_tokens", _I, [_P]),
            ("llama_print_system_info", ctypes.c_char_p, []),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        self._silence = ctypes.CFUNCTYPE(None, _I, ctypes.c_char_p, _P)(lambda level, text, data: None)
        lib.llama_log_set(self._silence, None)
        backends.ggml_backend_load_all_from_path(str(where).encode())
        lib.llama_backend_init()
        self.lib, self._base = lib, base
        loaded = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        settings = lib.llama_context_default_params()
        settings.first[:] = (sequences * length, 2048, 512, sequences)  # n_ctx, n_batch, n_ubatch, n_seq_max
        self.context = lib.llama_init_from_model(loaded, settings)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        lib.llama_set_n_threads(self.context, threads, threads)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
        self.batch = lib.llama_batch_init(2048, 0, 1)
        self.system = lib.llama_print_system_info().decode()

    @staticmethod
    def _open(folder: Path, stem: str) -> ctypes.CDLL:
        found = sorted([*folder.glob(f"{stem}.so*"), *folder.glob(f"{stem}.v*.so")])
        if not found:
            raise FileNotFoundError(f"{folder} has no {stem}.so")
        return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Greedy tokens after prompts that are read anew."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        rows = [(s, p, t, p == len(prompt) - 1) for s, prompt in enumerate(prompts) for p, t in enumerate(prompt)]
        texts: list[list[int]] = [[] for _ in prompts]
        while True:
            for row, token in self._step(rows).items():
                texts[rows[row][0]].append(token)
            if len(texts[0]) == new:
                return texts
            rows = [(s, len(prompts[s]) + len(text) - 1, text[-1], True) for s, text in enumerate(texts)]

    def logprobs(self, tokens: list[int], first: int) -> list[float]:
        """Log-probabilities of a text's tokens from `first` on, each after those before it."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self._decode([(0, position, token, position >= first - 1) for position, token in enumerate(tokens)])
        rows = ((self._logits(position - 1).astype(np.float64), tokens[position])
                for position in range(first, len(tokens)))
        return [float(row[token] - row.max() - np.log(np.exp(row - row.max()).sum())) for row, token in rows]

    def _step(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """The next token of each row that asks for one, rows being (sequence, position, token, whether it asks)."""
        self._decode(rows)
        return {i: int(self._logits(i).argmax()) for i, row in enumerate(rows) if row[3]}

    def _logits(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, row), (self.vocab,))

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, token, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if code := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode answers {code}")
