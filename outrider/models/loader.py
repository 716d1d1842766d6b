"""Weights into a model, one tensor at a time: from safetensors files, or drawn at random.

Every tensor of a file finds its slot and every slot its tensor, or loading fails with all the names. Never holds
more of the files than about one tensor beside the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from outrider.formats import StoredWeight, WeightSlot
from outrider.models.base import Model

DUMMY_RANGE = 1e-3
MAPPED_BYTES = 32 << 20  # of one file read before it is opened anew, which drops the pages read so far


class WeightError(ValueError):
    """Weights that do not fit the model, or a file that cannot be read."""


Stored: TypeAlias = torch.Tensor | StoredWeight  # a file's tensor as numbers, or in its own bits


def load_weights(model: Model, tensors: Iterable[tuple[str, Stored]]) -> None:
    """Fill the model and finalize it. Tensors are not kept, bits are where a layer's format takes them."""
    slots = model.weights()
    missing = set(slots)
    left_over: list[str] = []
    for name, tensor in _one_by_one(tensors, slots):
        if name in missing:
            _store(name, tensor, slots[name])
            missing.remove(name)
        elif name in slots:
            raise WeightError(f"tensor {name} came twice")
        elif not model.ignores(name):
            left_over.append(name)
        del tensor  # before the next one is read: two would be in memory otherwise
    if missing or left_over:
        raise WeightError(
            "the weights do not fit the model"
            + (f"; missing: {', '.join(sorted(missing))}" if missing else "")
            + (f"; left over: {', '.join(sorted(left_over))}" if left_over else "")
        )
    model.finalize()


def _one_by_one(
    tensors: Iterable[tuple[str, Stored]], slots: Mapping[str, WeightSlot]
) -> Iterator[tuple[str, Stored]]:
    """A tensor of all experts as one for each, where the model has slots for these: files of a family have either."""
    for name, tensor in tensors:
        experts, _, projection = name.rpartition(".")
        if name in slots or not experts.endswith(".experts") or len(tensor.shape) != 3:
            yield name, tensor
        else:
            parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
            assert isinstance(tensor, torch.Tensor)
            for expert, rows in enumerate(tensor):
                for part, own in zip(parts, rows.chunk(len(parts)), strict=True):
                    yield f"{experts}.{expert}.{part}.weight", own
                    del own
                del rows
        del tensor  # as above


def load_dummy(model: Model, seed: int) -> None:
    """Fill every tensor from U(-1e-3, 1e-3), the same on every run with this seed and device, and finalize."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for slot in model.weights().values():
        slot.target.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
    model.finalize()


def _store(name: str, tensor: Stored, slot: WeightSlot) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise WeightError(f"tensor {name} has shape {list(tensor.shape)}, the model needs {list(slot.shape)}")
    if not isinstance(tensor, torch.Tensor):
        if slot.keep(tensor):
            if not tensor.is_finite():
                raise WeightError(f"tensor {name} holds NaN or Inf")
            return
        tensor = tensor.dequantize()
    if not tensor.is_floating_point():
        raise WeightError(f"tensor {name} has dtype {tensor.dtype}, the model needs a float type")
    slot.store(tensor)
    # After the copy: a value that only the model's dtype cannot hold shows too. The extremes carry NaN along.
    low, high = torch.aminmax(slot.target)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise WeightError(f"tensor {name} holds NaN or Inf (as {slot.target.dtype})")


def safetensors_tensors(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in model.safetensors or the shards of model.safetensors.index.json.

    Largest first: a tensor is in memory twice while it is copied, and what the model has not yet been given is not
    in memory at all, so the largest costs nothing extra when it comes first."""
    sizes = [(size, name, path) for path, names in _files(Path(folder)).items() for name, size in _sizes(path, names)]
    sizes.sort(key=lambda item: (-item[0], item[1]))
    handles: dict[Path, Any] = {}
    mapped = 0
    for size, name, path in sizes:
        if path not in handles:
            handles[path] = _open(path)
        yield name, _tensor(handles[path], name, path)
        mapped += size
        if mapped >= MAPPED_BYTES:
            handles.clear()
            mapped = 0


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Each file, with the tensors that the index expects in it (None: all there are)."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise FileNotFoundError(f"{folder} holds neither {single.name} nor {index.name}")
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{index} is damaged ({error!r}); download it again") from error
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        names = files.setdefault(folder / file, set())
        assert names is not None
        names.add(name)
    return files


def _sizes(path: Path, names: set[str] | None) -> list[tuple[str, int]]:
    """Name and bytes (of float32, which is near enough to sort by) of the tensors in a file."""
    handle = _open(path)
    held = set(handle.keys())
    if names is not None and names != held:
        odd = ", ".join(sorted(names ^ held))
        raise WeightError(f"{path} and model.safetensors.index.json disagree about {odd}; download both again")
    shapes = {name: handle.get_slice(name).get_shape() for name in held}
    return [(name, 4 * torch.Size(shape).numel()) for name, shape in shapes.items()]


def _open(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist, though the index beside it names it; download it again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _tensor(handle: Any, name: str, path: Path) -> torch.Tensor:
    try:
        return handle.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> WeightError:
    return WeightError(f"{path} is truncated or damaged ({error}); download it again")
