"""NativeChain: a whole proposal of an EAGLE-3 head as one native call on the CPU.

Most of the time of a proposal is otherwise spent between its small operations. Batches with prompts, several ranks and
heads of other shapes are left to `AutoregressiveDrafter`, pass by pass.

A head with quantised files (compressed-tensors, for example) stays quantised on a CPU, where the inputs of its products
are rounded to 8 bits. The call also plans the passes. For an output layer in 8 bits it has a copy in 4 bits, which
finds the largest logits; only these are computed in 8 bits. With `"target_output_rows": true` in its config, an EAGLE-3
head or a block drafter has no output layer in its files, and uses the target's output rows of its vocabulary.
`bench/pack_drafter.py` writes both kinds of files.
"""

from __future__ import annotations

import torch

from outrider.drafters.base import Drafts, Step
from outrider.kernels.cpu.draft_chain import ChainInputs, ChainWeights, DraftChain
from outrider.kernels.drafting import CommittedRequests, DrafterCacheState, DraftingRows
from outrider.layers import Linear
from outrider.layers.mlp import ACTIVATIONS
from outrider.mixers import PagedLayer
from outrider.mixers.paged.native_backend import NativeBackend
from outrider.models.eagle import Eagle3Head


class NativeChain:
    def __init__(self, head: Eagle3Head, paged: PagedLayer, tails: torch.Tensor) -> None:
        """paged: the head's layer with its paged cache. tails: [pages, hidden], the hidden state that is kept with each
        page."""
        self._head, self._paged, self._tails = head, paged, tails
        self._bound: DraftChain | None = None
        self._matrices: list[object] = []  # of the products that `_bound` was made with

    @classmethod
    def try_build(cls, network: object, paged: object, tails: torch.Tensor) -> NativeChain | None:
        """Build the chain. Returns None if the C code does not support this kind of network, or if its attention is not
        native."""
        if not isinstance(network, Eagle3Head) or not isinstance(paged, PagedLayer):
            return None
        layer, norms = network.attention_layers[0], network.first.attention.norms
        is_simple = (
            len(network.attention_layers) == 1 and network.input_norm is None and network.own_output is not None
            and network.target.group is None and network.first.mlp.activation in ACTIVATIONS
            and layer.sinks is None and not layer.softcap and not layer.is_chunked and not layer.has_mask
            and (norms is None or (norms.has_v and not norms.norms_v))
        )
        return cls(network, paged, tails) if is_simple and isinstance(paged.backend, NativeBackend) else None

    def propose(self, step: Step, requests: CommittedRequests, rows: DraftingRows, page_table: torch.Tensor,
                state: DrafterCacheState) -> Drafts | None:
        """Make a proposal's drafts. If the native call does not support the step, None is returned and nothing has
        changed."""
        view, hidden, num_wanted = step.batch.padded, step.hidden, step.num_wanted
        if view.num_tokens > view.num_requests * (1 + num_wanted) or step.given_rows is not None:
            return None
        if hidden.context.deltas is not None:
            return None
        chain = self._bind(view.num_tokens)
        inputs = ChainInputs(requests, rows, page_table, state, hidden.aux_states, self._tails, num_wanted)
        if chain is None or not chain.takes(inputs):
            return None
        tokens, counts, levels = chain.propose(inputs, any_sampled=step.any_sampled)
        return Drafts(tokens.t(), counts, levels)

    def _bind(self, num_tokens: int) -> DraftChain | None:
        """Return the native chain for this number of token rows, or None if the C code does not support it. The chain
        is made again if a head that learns has new weights."""
        head, attention, mlp = self._head, self._head.first.attention, self._head.first.mlp
        assert head.own_output is not None
        linears: list[Linear] = [head.fc, attention.qkv, attention.out, mlp.gate_up, mlp.down, head.own_output]
        products = [product for linear in linears if (product := linear.format.native_product()) is not None]
        if len(products) < len(linears) or num_tokens > min(product.max_rows for product in products):
            return None
        matrices = [product.matrix for product in products]
        if len(self._matrices) != len(matrices) or any(
                one is not other for one, other in zip(matrices, self._matrices, strict=True)):
            self._matrices = list(matrices)
            embedding = head.embedding.format
            table = embedding.packed_rows if embedding.table is None else embedding.table
            if table is None:
                return None
            norms, layer, cache = attention.norms, self._paged.layer, self._paged.cache
            cos, sin = head.rotary.halves
            fc, qkv, out, gate_up, down, output = matrices
            self._bound = DraftChain.bind(ChainWeights(
                fc=fc, qkv=qkv, out=out, gate_up=gate_up, down=down, output=output,
                aux_norms=[norm.scale for norm in head.aux_norms],
                norms=(head.first.input_norm.scale, head.hidden_norm.scale, head.first.mlp_norm.scale, head.norm.scale),
                head_norms=None if norms is None else (norms.q, norms.k), embedding=table, target_ids=head.target_ids,
                cos=cos, sin=sin, num_aux=len(head.aux_layers), eps=head.sizes.eps,
                norm_eps=1e-6 if norms is None else norms.eps, scale=layer.scale, window=layer.window or 0,
                gelu=mlp.activation != "silu", norm_before_residual=head.norm_before_residual,
                feeds_back_normed=head.feeds_back_normed,
            ), cache.k, cache.v)
        return self._bound
