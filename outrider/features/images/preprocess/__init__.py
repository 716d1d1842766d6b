"""From the RGB pixels of a decoded image to the patches that a vision tower takes, with numpy and Pillow.

| file | what it is |
|---|---|
| `processor.py` | the interface (`ImageProcessor`), and which family's class serves a model |
| `settings.py` | the settings in a model's processor config, flat or nested |
| `gemma4.py` | Gemma 4, with and without a tower |
| `qwen.py` | Qwen3-VL and Qwen3.5 |

From RGB on, results equal those of the PIL image processors of transformers, bit for bit. Pillow is an optional package
(`outrider[images]` or `outrider[server]`), imported when the first image is resized.
"""
