"""Builds models and draft heads from their sources, and fills them with random numbers or from files, one tensor at a
time.

Every tensor of the files must fit a weight of the model, and every weight must get a tensor; otherwise loading fails
and names them. Besides the model, at most about one tensor of the files is in memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch

from outrider.core.lazy_exports import LateModule
from outrider.formats import FormatChoice, RankGroup, StoredFormat, StoredWeight, WeightSlot
from outrider.formats.upload import upload
from outrider.models.base import Model
from outrider.models.registry import build_model
from outrider.models.sources.model_source import ModelSource, WeightError

if TYPE_CHECKING:
    from outrider.formats import scaled
else:
    scaled = LateModule("outrider.formats.scaled")

log = logging.getLogger("outrider")
MOST_NAMED = 12  # in a message
OTHER_WEIGHTS = "the weights are damaged, or of another model than their config"
MIB = 1 << 20
JOINT_PROJECTIONS = dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")  # in tensors of all experts
MOST_WIDENED = 1 << 24  # numbers in float32 beside those of 8 bits

Stored: TypeAlias = torch.Tensor | StoredWeight  # a file's tensor as numbers, or in its own bits
Tensors: TypeAlias = Iterator[tuple[str, Stored]]
Watch: TypeAlias = Callable[[Tensors, int], Tensors]


def load_model(source: ModelSource, *, dtype: torch.dtype, device: torch.device | str, load_format: str = "auto",
               seed: int = 0, max_len: int | None = None, keep_quantized: bool = False,
               group: RankGroup | None = None) -> Model:
    """Load the model of a source, ready to run. `max_len`: the number of positions that it must serve, by default the
    config's. `keep_quantized`: weights stay in the format of their files where possible. `group`: the ranks that
    hold the model together."""
    model = build_model(source.config, dtype=dtype, device=device, max_len=max_len, source=str(source.config_file))
    if group is not None:
        model.shard(group)
    if keep_quantized:
        declare_formats(model, stored_formats(model, source))
    fill_model(model, source, load_format=load_format, seed=seed)
    return model


def declare_formats(model: Model, stored_format: Callable[[str], StoredFormat | None],
                    device: torch.device | None = None, quantization: str | None = None) -> None:
    """Choose the formats of a model's weights from how its source stores them, before they are allocated. `device`:
    where the model will run, if it is only outlined on the meta device. `quantization`: the codes, such as fp8, to
    which unquantised linear layers are converted while they are read."""
    model.declare_formats(FormatChoice(stored_format, device or model.device, quantization))


def stored_formats(model: Model, source: ModelSource) -> Callable[[str], StoredFormat | None]:
    """Return a function that tells how a source stores a matrix, by the model's name for it. The files may have another
    name for the matrix (`slot_name`), or store it in a joint tensor of all experts."""
    try:
        names = source.tensor_names()
    except FileNotFoundError:  # a dummy model of a config alone
        return source.stored_format
    matrices = {name.rpartition(".")[0] for name in names}
    name_in_files = {model.slot_name(f"{matrix}.weight").removesuffix(".weight"): matrix for matrix in matrices}

    def stored_format(name: str) -> StoredFormat | None:
        in_files = name_in_files.get(name) or name_in_files.get(_joint_name(name))
        return source.stored_format(in_files or name)

    return stored_format


def _joint_name(name: str) -> str:
    """Return the name of the joint matrix of all experts, of which some families store an expert's matrix as a part."""
    experts, _, projection = name.rpartition(".")
    joint = JOINT_PROJECTIONS.get(projection, projection)
    return f"{experts.rpartition('.')[0]}.{joint}"


def fill_model(model: Model, source: ModelSource, *, load_format: str = "auto", seed: int = 0,
               watch: Watch | None = None) -> None:
    """Give a model its weights. load_format "dummy" draws them from `seed` and reads nothing. `watch` (a progress bar)
    gets the tensors and their number, and passes the tensors on. A model on the meta device is not filled."""
    if model.device.type == "meta":
        return
    if load_format == "dummy":
        return load_dummy(model, seed)
    tensors = source.read()
    try:
        load_weights(model, tensors if watch is None else watch(tensors, len(model.weights())))
    except WeightError as error:
        raise error if str(source.path) in str(error) else WeightError(f"{source.path}: {error}") from None


def load_weights(model: Model, tensors: Iterable[tuple[str, Stored]]) -> None:
    """Fill the model and finalize it. A quantised weight is dequantised unless the layer's format stores it as it
    is."""
    slots = model.weights()
    missing = set(slots)
    left_over: dict[str, None] = {}  # names in the files, without repeats
    expanded: Counter[str] = Counter()
    named = SlotNamed(model, tensors)
    try:
        for name, tensor in one_by_one(named, slots, expanded):
            if name in missing:
                _store(name, tensor, slots[name])
                missing.remove(name)
            elif name in slots:
                raise WeightError(f"tensor {name} is in the files twice: fetch them again")
            elif model.ignores(name):
                model.check_ignored(name, tensor)
            else:
                left_over[named.name_in_files or name] = None
            del tensor  # before the next one is read: two would be in memory otherwise
    except WeightError as error:
        raise named.explained(error) from None
    if missing or left_over:
        raise WeightError(
            "the weights do not fit the model"
            + (f"; missing: {some_names(missing)}" if missing else "")
            + (f"; left over: {some_names(left_over)}" if left_over else "")
            + ". Fetch the files again, or correct the config"
        )
    model.finalize()
    report_weights(slots, expanded)


class SlotNamed:
    """An iterator over a source's tensors under the names of their slots. It keeps the files' name of the current
    tensor, for error messages."""

    def __init__(self, model: Model, tensors: Iterable[tuple[str, Stored]]) -> None:
        self._model, self._tensors = model, tensors
        self.name_in_files: str | None = None  # of the tensor that is being stored; None while one is read

    def __iter__(self) -> Tensors:
        for name, tensor in self._tensors:
            self.name_in_files = name
            yield self._model.slot_name(name), tensor
            self.name_in_files = None
            del tensor  # before the next one is read

    def explained(self, error: WeightError) -> WeightError:
        """Return the error for the tensor being stored, with the files' name for it."""
        name = self.name_in_files
        return error if name is None or name in str(error) else WeightError(f"{error}; the files call it {name}")


def report_weights(slots: Mapping[str, WeightSlot], expanded: Mapping[str, int]) -> None:
    """Log one line: the forms in which the weights are kept in memory, and how many matrices of each quantised kind
    were dequantised."""
    if not expanded and all(slot.kind is None for slot in slots.values()):
        return
    dtypes = " or ".join(sorted({dtype_name(slot) for slot in slots.values() if slot.kind is None}))
    kinds = ", ".join(f"{count} of {kind}" for kind, count in expanded.items())
    level = logging.WARNING if expanded else logging.INFO  # they take several times the memory of the file
    log.log(level, "weights: %s%s", describe_weights(slots), f"; expanded to {dtypes}: {kinds}" if expanded else "")


def describe_weights(slots: Mapping[str, WeightSlot]) -> str:
    """Describe how much memory the weights take in each form: "4096 MiB in fp8 rows, 512 MiB in bfloat16"."""
    kept: Counter[str] = Counter()
    for name, slot in slots.items():
        module, _, part = name.rpartition(".")
        codes, scales = slots.get(f"{module}.weight"), slots.get(f"{module}.weight_scale")
        if codes is None or codes.kind is None or not part.startswith("weight"):  # numbers, a bias among them
            kept[slot.kind or dtype_name(slot)] += slot.nbytes
        else:  # codes, or scales that go with them
            groups = "" if scales is None else " rows" if scales.shape[-1] == 1 else " groups"
            source = "" if codes.recode is None else f" of {codes.recode.kind}"
            kept[codes.kind + groups + source] += slot.nbytes
    return ", ".join(f"{num_bytes / MIB:.0f} MiB in {form}" for form, num_bytes in kept.most_common())


def dtype_name(slot: WeightSlot) -> str:
    return str(slot.target.dtype).removeprefix("torch.")


def some_names(names: Collection[str]) -> str:
    """Join the first names in sorted order, and the number of the others. A file of another model can lack hundreds of
    names."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(sorted(names)[:MOST_NAMED]) + more


def one_by_one(
    tensors: Iterable[tuple[str, Stored]], slots: Mapping[str, WeightSlot], expanded: Counter[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a source, each under the name of its slot if the model has one. `expanded` counts, by kind,
    the quantised weights that are dequantised."""
    return _in_parts(split_experts(tensors, slots), slots, expanded)


def _in_parts(
    tensors: Iterable[tuple[str, Stored]], slots: Mapping[str, WeightSlot], expanded: Counter[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors to copy into slots. For a quantised weight these are its codes and scales if the layer's format
    keeps them, and otherwise one dequantised tensor."""
    for name, tensor in tensors:
        slot = slots.get(name)
        if slot is not None and slot.quantize is not None:
            numbers = tensor if isinstance(tensor, torch.Tensor) else tensor.dequantize()
            check_numbers(name, numbers, slot.numbers_shape)
            check_finite(name, numbers)
            tensor = slot.quantize(upload(numbers, slot.target.device))
            del numbers
        elif slot is not None and slot.recode is not None and not isinstance(tensor, torch.Tensor):
            tensor = slot.recode(tensor, slot.target.device) if slot.recode.kind == tensor.kind else tensor.dequantize()
        if isinstance(tensor, torch.Tensor):
            yield name, tensor
        elif parts := _kept_parts(name, tensor, slots):
            yield from parts
            del parts
        else:
            expanded[tensor.kind] += 1
            yield name, tensor.dequantize()
        del tensor  # before the next one is read


def _kept_parts(
    name: str, stored: StoredWeight, slots: Mapping[str, WeightSlot]
) -> list[tuple[str, torch.Tensor]]:
    """Return the codes and scales of a quantised weight under their own names. Empty if the layer's format dequantises
    it. The name of a joint matrix of experts has no ".weight", and the names of its scales are appended directly."""
    parts = [(name + part.removeprefix("weight"), tensor) for part, tensor in stored.parts().items()]
    if not any(part in slots and slots[part].kind == stored.kind for part, _ in parts):
        return []
    if not stored.is_finite():
        raise WeightError(f"tensor {name} holds NaN or Inf: fetch the files again")
    return parts


def split_experts(tensors: Iterable[tuple[str, Stored]], slots: Mapping[str, WeightSlot]) -> Tensors:
    """Yield the tensors. A joint tensor of all experts is split into one tensor for each expert and projection, if the
    model has slots for these. Files of the same family come in both forms."""
    for name, tensor in tensors:
        experts, _, projection = name.rpartition(".")
        if name in slots or not experts.endswith(".experts") or len(tensor.shape) != 3:
            yield name, tensor
        else:
            joint = tensor if isinstance(tensor, torch.Tensor | scaled.ScaledWeight) else tensor.dequantize()
            parts = [part for part, whole in JOINT_PROJECTIONS.items() if whole == projection] or [projection]
            rows = -(-joint.shape[1] // len(parts))
            for expert in range(joint.shape[0]):
                for at, part in enumerate(parts):
                    yield f"{experts}.{expert}.{part}.weight", joint[expert][at * rows : (at + 1) * rows]
            del joint
        del tensor  # before the next one is read


def load_dummy(model: Model, seed: int) -> None:
    """Fill every tensor with numbers from U(-1e-3, 1e-3), or with random codes if it is quantised, and finalize. The
    same seed and device give the same weights; each of several ranks gets its part of them."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for slot in model.weights().values():
        slot.fill(generator)
    model.finalize()
    report_weights(model.weights(), {})


def blank_model(model: Model) -> None:
    """Fill every tensor with zeros and finalize, so that steps of the model can be traced. `fill_model` can follow."""
    for slot in model.weights().values():
        slot.target.zero_()
    model.finalize()


def _store(name: str, tensor: torch.Tensor, slot: WeightSlot) -> None:
    check_shape(name, tensor, slot.shape)
    if slot.kind is None:
        check_numbers(name, tensor, slot.shape)
    elif tensor.dtype != slot.target.dtype:
        raise WeightError(f"tensor {name} has dtype {tensor.dtype}, and a weight stored as {slot.kind} needs "
                          f"{slot.target.dtype}: {OTHER_WEIGHTS}")
    slot.store(tensor)
    if slot.target.is_floating_point():
        check_finite(name, slot.target)  # after the copy: a value that only the model's dtype cannot hold shows too


def check_numbers(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that does not contain floats of this shape."""
    check_shape(name, tensor, shape)
    if not tensor.is_floating_point():
        raise WeightError(f"tensor {name} has dtype {tensor.dtype}, and the model needs a float type: {OTHER_WEIGHTS}")


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape."""
    if tuple(tensor.shape) != shape:
        raise WeightError(f"tensor {name} has shape {list(tensor.shape)}, and the model needs {list(shape)}: "
                          f"{OTHER_WEIGHTS}")


def check_finite(name: str, tensor: torch.Tensor) -> None:
    # Numbers of 8 bits have no extremes in torch before they are widened, some of them at a time.
    pieces = map(torch.Tensor.float, tensor.flatten().split(MOST_WIDENED)) if tensor.itemsize == 1 else (tensor,)
    # The extremes carry NaN along.
    if not all(bool(torch.stack(torch.aminmax(piece)).isfinite().all()) for piece in pieces):
        raise WeightError(f"tensor {name} holds NaN or Inf (as {tensor.dtype}): fetch the files again, or use a dtype "
                          "with a wider range")
