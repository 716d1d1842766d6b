"""Vision towers: models that turn the patches of one image into embeddings for a language model.

| file | what it is |
|---|---|
| `grid.py` | the size of an image in pixels and in tokens (`ImageGrid`); imports no torch |
| `levels.py` | the input numbers for the 256 values of a pixel's colour; imports no torch |
| `base.py` | the interface of towers (`VisionTower`) |
| `registry.py` | the tower of each `model_type`; building and loading one |
| `parts.py` | norms, attention and rope that towers share |
| `gemma4_unified.py` | Gemma 4 12B, which has no tower: its tiles are embedded by one product |
| `gemma4.py` | the tower of Gemma 4 E2B, E4B, 26B-A4B and 31B |
| `qwen.py` | the towers of Qwen3-VL and of Qwen3.5 |
| `mmproj.py` | GGUF files with the vision part of a model |

A tower encodes one image at a time, so an image's features never depend on other images."""
