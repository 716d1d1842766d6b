"""GGUF files with damaged headers are refused in short messages, whatever was damaged."""

from __future__ import annotations

import random
import re
from pathlib import Path

import gguf
import pytest
import torch

from outrider.config import EngineConfig
from outrider.engine.load import read_tokenizer
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from outrider.models.sources.gguf_header import read_header
from outrider.models.sources.model_source import WeightError
from tests.unit.test_sources import VOCAB, write_gguf


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([chr(97 + at // 26) + chr(97 + at % 26) for at in range(VOCAB)])
    writer.add_token_merges(["a b", "c d"])


def test_damaged_headers_are_refused_in_short_messages_that_name_the_file(tmp_path: Path) -> None:
    """Every length of a text or list becomes one that swallows what follows, or any other; other bytes change too."""
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    write_gguf(good, "Q4_0", extra=add_vocabulary)
    data, draw, refused = good.read_bytes(), random.Random(0), 0
    start = min(entry.offset for entry in read_header(good).tensors.values())
    lengths = [at for at in range(8, start - 8) if 0 < int.from_bytes(data[at : at + 8], "little") < 300]
    cases = [(at, draw.choice((200, 900, 5000, len(data) - at - 16, len(data), 2**40, 2**63 + 5)).to_bytes(8, "little"))
             for at in lengths for _ in range(2)]
    cases += [(draw.randrange(8, start), draw.randbytes(draw.randrange(1, 9))) for _ in range(300)]
    assert len(lengths) > 40
    for at, bytes_there in cases:
        bad.write_bytes(data[:at] + bytes_there + data[at + len(bytes_there) :])
        try:
            read_tokenizer(EngineConfig(model=str(bad)), source := resolve(bad))
            list(source.tensors())
        except ValueError as error:
            refused += 1
            text = str(error)
            assert str(bad) in text and len(text) < len(str(bad)) + 900 and text.isprintable(), (at, bytes_there, text)
    assert refused > len(lengths)


@pytest.mark.parametrize("key", ["general.architecture", "llama.a", "tokenizer.ggml.pre", "split.count"])
def test_values_are_shown_escaped_and_in_part(key: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def extra(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(writer)
        writer.add_string(key, "\x1b[2J\n" * 40_000)

    write_gguf(path, extra=extra)
    with pytest.raises(ValueError, match=re.escape(key.removeprefix("general."))) as raised:
        read_tokenizer(EngineConfig(model=str(path)), resolve(path))
    assert str(path) in str(raised.value) and len(str(raised.value)) < 900 and str(raised.value).isprintable()


def test_weights_that_are_not_numbers_are_refused_with_their_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "Q8_0")
    entry, data = read_header(path).tensors["blk.1.ffn_up.weight"], bytearray(path.read_bytes())
    data[entry.offset : entry.offset + 2] = b"\x00\x7c"  # an infinity
    path.write_bytes(data)
    with pytest.raises(WeightError, match=r"m\.gguf: tensor model\.layers\.1\.mlp\.up_proj\.weight holds NaN or Inf"):
        load_model(resolve(path), dtype=torch.float32, device="cpu", keep_quantized=True)
