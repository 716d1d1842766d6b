"""Preprocessing of images: makes the patches that a vision tower takes from RGB pixels, with numpy and Pillow.

| file | what it is |
|---|---|
| `processor.py` | the interface (`ImageProcessor`), and which family's class serves a model |
| `settings.py` | the settings in a model's processor config, flat or nested |
| `gemma4.py` | Gemma 4, with and without a tower |
| `qwen.py` | Qwen3-VL and Qwen3.5 |

For equal RGB pixels the patches equal those of the PIL image processors of transformers, bit for bit. Pillow is an
optional package (`outrider[images]` or `outrider[server]`), imported when the first image is resized."""
