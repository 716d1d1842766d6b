"""MTPTrainee: the multi-token-prediction module of a checkpoint, tuned on the target's own answers.

The module runs the forward pass of serving (`models.mtp`), with the reference implementation of every operation, which
has gradients. Published modules are trained for one draft. After tuning on several unrolled passes, a module makes
further drafts from its own output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from outrider.formats import WeightSlot
from outrider.kernels import ops
from outrider.layers import StepContext
from outrider.mixers import AttentionLayer, IndexedLayer
from outrider.models.base import Decoder, Model
from outrider.models.head import load_head
from outrider.models.mtp import MTPHead, build_mtp_modules
from outrider.models.sources import resolve
from outrider.training.export import write_module
from outrider.training.settings import TrainingSettings
from outrider.training.teacher import TaughtTexts
from outrider.training.trainee import DrafterCard, PassOutput, Trainee
from outrider.training.unrolled_attend import UnrolledAttend
from outrider.training.vocabulary import DraftVocabulary


class MTPTrainee(Trainee):
    def __init__(self, target: Model, settings: TrainingSettings, vocabulary: DraftVocabulary) -> None:
        self.num_passes = settings.passes
        self._target = _checked(target, settings)
        wide = torch.float64 if target.dtype == torch.float64 else torch.float32
        (self.module,) = build_mtp_modules(target, first_layer=target.num_layers, dtype=wide, device=target.device)
        self._attention = _attention_layers(self.module)
        load_head(self.module, lambda: resolve(_files(self._target)), load_format="auto", seed=settings.seed)
        # Several tensors of the file may be parts of one tensor here, which is trained as one.
        self.weights = {}
        held: set[int] = set()
        for name, slot in self.module.weights().items():
            whole = slot.target if slot.target._base is None else slot.target._base
            if whole.is_floating_point() and id(whole) not in held:
                held.add(id(whole))
                self.weights[name] = whole.requires_grad_()
        rows = target.lm_head.format.dense()
        assert rows is not None, "checked above"
        self._output = rows[vocabulary.ids.to(rows.device)].detach().to(wide).clone()

    @classmethod
    def aux_layers_for(cls, target: Model, settings: TrainingSettings) -> tuple[int, ...]:
        _checked(target, settings)
        return (target.num_layers,)

    def outputs(self, taught: TaughtTexts, rows: list[torch.Tensor]) -> Iterator[PassOutput]:
        width = taught.tokens.shape[1]
        for own_rows, states in zip(rows, self.passes(taught), strict=False):  # texts may be too short for the last
            at = own_rows // width * states.shape[1] + own_rows % width - 1
            yield PassOutput(states.flatten(0, 1).index_select(0, at), self._output)

    @contextmanager
    def with_gradients(self) -> Iterator[None]:
        """A context in which gradients work: operations run their reference implementations, and in-place sums do not
        overwrite tensors that gradients need."""
        with ops.using("reference"), torch.autograd.graph.allow_mutation_on_saved_tensors():
            yield

    def passes(self, taught: TaughtTexts) -> Iterator[torch.Tensor]:
        """Yield the inputs of the output layer for each pass, [texts, length - 1 - pass, hidden]. Index p - 1 belongs
        to token p."""
        module = self.module
        num_texts, length = taught.tokens.shape
        hidden = taught.aux_states[:, :-1, 0].to(self._output.dtype)
        if module.description.hidden == "final":
            hidden = self._target.norm(hidden.flatten(0, 1).to(self._target.dtype)).to(hidden.dtype).view(hidden.shape)
        module.finalize()  # norms may scale by 1 + weight, which is made here
        attend = UnrolledAttend(self._attention, num_texts)
        for index in range(self.num_passes):
            count = length - 1 - index
            if count < 1:
                return
            slots = torch.arange(1 + index, length, device=hidden.device).repeat(num_texts)
            tokens = taught.tokens[:, 1 + index :].flatten()
            # A copy: the module may overwrite what it consumes.
            output, feedback = module.forward(tokens, hidden[:, :count].flatten(0, 1).clone(),
                                              StepContext(attend, slots))
            yield output.view(num_texts, count, -1)
            hidden = feedback.view(num_texts, count, -1)

    def export(self, folder: Path, card: DrafterCard, file_form: str) -> None:
        """Write the module's tensors, under their names in the target's files, and the target's config."""
        tensors = {name: _as_in_file(slot) for name, slot in self.module.weights().items()}
        write_module(folder, dict(self._target.config.values), tensors, self.num_passes, card)


def _checked(target: Model, settings: TrainingSettings) -> Decoder:
    """Return the target if it has exactly one module, and one that can be tuned. Raises ValueError otherwise."""
    if not isinstance(target, Decoder) or target.lm_head.format.dense() is None:
        raise ValueError("--method mtp needs an output layer that is not quantised: give the unquantised checkpoint, "
                         "or train with --method eagle3")
    modules = build_mtp_modules(target, first_layer=target.num_layers, dtype=target.dtype, device=torch.device("meta"))
    if len(modules) != 1:
        raise ValueError("--method mtp can tune only one multi-token-prediction module, and the checkpoint has "
                         f"{len(modules)}: use --method eagle3")
    _attention_layers(modules[0])
    source, prefix = resolve(_files(target)), modules[0].description.names.prefix
    if not any(name.startswith(prefix) for name in source.tensor_names()):
        raise ValueError(f"--method mtp: the checkpoint has no multi-token-prediction module: in {source.path} no "
                         f"tensor begins with {prefix!r}. Use --method eagle3 or block")
    return target


def _files(target: Decoder) -> Path:
    return Path(target.config.source).parent


def _attention_layers(module: MTPHead) -> list[AttentionLayer]:
    found = [layer for layer in module.attention_layers
             if isinstance(layer, AttentionLayer) and not isinstance(layer, IndexedLayer)]
    if len(found) != len(module.attention_layers):
        raise ValueError("--method mtp cannot tune a module with latent attention or an indexer: use --method eagle3 "
                         "or block")
    return found


def _as_in_file(slot: WeightSlot) -> torch.Tensor:
    """Return the tensor of a weight, with its rows in the checkpoint's order."""
    tensor = slot.target.detach().reshape(slot.shape)
    if slot.layout is None:
        return tensor
    order = slot.layout.sort(torch.arange(tensor.shape[0])[:, None])[:, 0].to(tensor.device)
    return torch.empty_like(tensor).index_copy_(0, order, tensor)
