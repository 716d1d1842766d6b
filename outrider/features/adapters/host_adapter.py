"""HostAdapter: an adapter in the host's memory, laid out as the arena holds it, so that one copy places it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outrider.core.file_digests import file_digest, value_digest
from outrider.features.adapters.peft_folder import AdapterError, FactorPair, PeftFolder
from outrider.features.adapters.target import NamedPair, Target, TargetPart, aligned
from outrider.features.adapters.targets import Targets
from outrider.lora_request import CONFIG, TENSORS

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of factors in files
MAX_SCALE = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class FactorPlace:
    """The place of one target's two factors within an adapter, and their rank."""

    target: int
    a: int
    b: int
    rank: int
    scale: float


@dataclass(frozen=True)
class HostAdapter:
    name: str
    numbers: torch.Tensor  # [size], in the model's dtype
    entries: tuple[FactorPlace, ...]
    digest: str = ""  # of the files that it was read from

    @property
    def size(self) -> int:
        return len(self.numbers)

    @property
    def rank(self) -> int:
        return max(entry.rank for entry in self.entries)


def read_adapter(name: str, folder: str, targets: Targets, *, max_rank: int, max_size: int, dtype: torch.dtype,
                 pin: bool = False, check_cancelled: Callable[[], None] = lambda: None) -> HostAdapter:
    """Read an adapter's folder for a model, into the host's memory. Every shape is checked, and the size of the whole
    known, before the first tensor is read. Numbers that are not finite in the model's dtype are refused by the tensor's
    name."""
    source = PeftFolder.open(folder)
    places = {module: targets.find(module, pair) for module, pair in source.pairs.items()}
    ranks = _check_modules(source, folder, places, max_rank)
    if (size := sum(target.room(rank) for target, rank in ranks.items())) > max_size:
        raise AdapterError(f"{folder} takes {size * dtype.itemsize} bytes and the engine's room for one adapter is "
                           f"{max_size * dtype.itemsize}: raise max_loras or lora_memory_bytes")
    held: dict[Target, list[NamedPair]] = {}

    def take(module: str, pair: FactorPair, a: torch.Tensor, b: torch.Tensor) -> None:
        check_cancelled()
        _check_tensors(folder, pair, a, b, dtype)
        for part in places[module]:
            scale = source.scale(part.target.config_name(module))
            if scale > MAX_SCALE:
                raise AdapterError(f"{folder}: lora_alpha gives {module} the scale {scale:g}, and the weights that it "
                                   "makes are not finite: save the adapter with a smaller lora_alpha")
            held.setdefault(part.target, []).append(NamedPair(part.rest, a, part.of_factor(b), scale))

    source.read(take)
    return replace(_packed(name, held, dtype, pin), digest=_files_digest(Path(folder)))


def _files_digest(folder: Path) -> str:
    return value_digest({file: file_digest(folder / file) for file in (CONFIG, TENSORS)})


def _check_modules(source: PeftFolder, folder: str, places: Mapping[str, tuple[TargetPart, ...]],
                   max_rank: int) -> dict[Target, int]:
    """Check the shapes of all modules against the model and the config. Returns the rank of each target that they
    change."""
    ranks: dict[Target, int] = {}
    changed: dict[Target, set[tuple[int, int]]] = {}
    for module, part in ((name, own) for name, parts in places.items() for own in parts):
        pair, target = source.pairs[module], part.target
        rank = target.check(part.of_pair(pair))
        if rank > max_rank:
            raise AdapterError(f"{pair.a} has rank {rank}, and max_lora_rank is {max_rank}: raise max_lora_rank")
        _check_rank(source, target.config_name(module), pair, rank)
        parts = target.changed_parts(part.rest)
        if parts & changed.setdefault(target, set()):
            raise AdapterError(f"{pair.a}: the adapter has two entries for {target.name}: save it again with one")
        changed[target] |= parts
        ranks[target] = max(ranks.get(target, 0), target.held_rank(part.rest, rank))
        base = source.base_shapes.get(module)
        if base is not None and base != target.weight_shape:
            raise AdapterError(f"{folder}: the adapter was made for a {module} of shape {list(base)}, and this model's "
                               f"has {list(target.weight_shape)} (a resized vocabulary): use the adapter's own base "
                               "model")
    return ranks


def _check_tensors(folder: str, pair: FactorPair, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse factors that the model cannot compute with in its dtype."""
    if (tuple(a.shape), tuple(b.shape)) != (pair.a_shape, pair.b_shape):
        raise AdapterError(f"{folder} was changed while it was read: {pair.a} has another shape now. Load it again")
    for name, tensor in ((pair.a, a), (pair.b, b)):
        if tensor.dtype not in DTYPES:
            raise AdapterError(f"{folder}: tensor {name} holds {tensor.dtype}: it must hold floats of 16 or 32 bits")
        if not _is_finite(tensor, dtype):
            raise AdapterError(f"{folder}: tensor {name} holds NaN or Inf (as {dtype}): save the adapter again")


def _is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all numbers are finite in a dtype. The minimum and the maximum suffice: both are NaN if any number is."""
    return bool(torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all())


def _check_rank(source: PeftFolder, module: str, pair: FactorPair, rank: int) -> None:
    if source.rank(module) != rank:
        raise AdapterError(f"{pair.a} has rank {rank}, and adapter_config.json says {source.rank(module)}: save the "
                           "adapter again")


def _packed(name: str, held: dict[Target, list[NamedPair]], dtype: torch.dtype, pin: bool) -> HostAdapter:
    made = [(target, target.factors(pairs)) for target, pairs in held.items()]
    size = sum(aligned(own.a.numel()) + aligned(own.b.numel()) for _, own in made)
    numbers = torch.zeros(size, dtype=dtype, pin_memory=pin)
    entries: list[FactorPlace] = []
    first = 0
    for target, own in made:
        second = first + aligned(own.a.numel())
        numbers[first : first + own.a.numel()].view(own.a.shape).copy_(own.a)
        numbers[second : second + own.b.numel()].view(own.b.shape).copy_(own.b)
        entries.append(FactorPlace(target.index, first, second, own.rank, own.scale))
        first = second + aligned(own.b.numel())
    return HostAdapter(name, numbers, tuple(entries))
