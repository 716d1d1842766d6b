"""A server around a tiny model that is said to see images. What the engine would get is recorded; each image then
becomes a few tokens of text, so that the answer is real."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken

from outrider.async_llm import AsyncLLM
from outrider.core.checked_request import CheckedRequest
from outrider.engine.text import Tokenizer
from tests.engine.harness import Rig, byte_tokenizer, tiny_model
from tests.server.rig import Served, serving

TEMPLATE = ("{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}"
            "{% endfor %}{% endif %}{% endfor %}[assistant]")
IMAGE_TOKENS = 5  # of each image
SHOWN = ord("I")  # the token that stands for a part of an image


def image_tokenizer() -> Tokenizer:
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken("<|image_pad|>", special=True)])
    return Tokenizer(backend, chat_templates={"default": TEMPLATE})


class ImageEngine:
    """Stands in for the engine's check of prompts with images."""

    def __init__(self, *, sees: bool = True, **settings: Any) -> None:
        self.prompts: deque[dict[str, Any]] = deque(maxlen=1)  # the last one: its images may be large
        given = {"max_model_len": 200, "num_pages": 256} | settings
        self.rig = Rig(tiny_model("llama", torch.float32), tokenizer=image_tokenizer(), **given)
        object.__setattr__(self.rig.engine.model, "takes_images", sees)
        self.llm = AsyncLLM.around(self.rig.engine)
        self._check = self.llm.check
        self.llm.check = self.check  # type: ignore[method-assign]

    @property
    def images(self) -> list[np.ndarray]:
        """Those of the last prompt."""
        return self.prompts[-1]["multi_modal_data"]["image"]

    @property
    def text(self) -> str:
        """The last prompt, with (image) for each placeholder."""
        pad = self.rig.engine.model.need_tokenizer().token_to_id("<|image_pad|>")
        ids = self.prompts[-1]["prompt_token_ids"]
        return b"".join(b"(image)" if token == pad else bytes([token]) for token in ids).decode()

    async def check(self, prompts: Any, *args: Any) -> list[CheckedRequest]:
        return await self._check([self._without_images(prompt) for prompt in prompts], *args)

    def _without_images(self, prompt: dict[str, Any]) -> dict[str, Any]:
        self.prompts.append(prompt)
        pad = self.rig.engine.model.need_tokenizer().token_to_id("<|image_pad|>")
        images = prompt.get("multi_modal_data", {"image": []})["image"]
        ids = prompt.get("prompt_token_ids", [])
        if ids.count(pad) != len(images):
            raise ValueError(f"the prompt has {ids.count(pad)} places for {len(images)} images")
        for image in images:
            assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
        expanded = [token for one in ids for token in ([SHOWN] * IMAGE_TOKENS if one == pad else [one])]
        kept = {key: value for key, value in prompt.items() if key in ("prompt", "cache_salt")}
        return kept | {"prompt_token_ids": expanded}


@contextmanager
def serving_images(sees: bool = True, **settings: Any) -> Iterator[tuple[Served, ImageEngine]]:
    engine = ImageEngine(sees=sees)
    with serving(lambda: engine.llm, **settings) as served:
        yield served, engine
        served.assert_idle()
        assert served.service.images.is_idle
