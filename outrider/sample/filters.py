"""The sampling stages that scale logits by the temperature and drop unlikely tokens: min-p, top-k and top-p.

The greatest scaled logit of a row is 0. Probabilities are summed and compared as integers, so the tokens that a logit
row keeps cannot depend on the order in which a device adds. All tokens tied with a threshold are kept.
"""

from __future__ import annotations

import torch

from outrider.kernels.sampling_keys import SamplingKeys
from outrider.sample.extras import LogitEditor, StepNeeds
from outrider.sample.sampling_rows import SamplingRows

_MASS_BITS = 40  # the likeliest token weighs 2^40: sums over 2^22 tokens fit in int64
_MANTISSA_BITS = 23
_LOG2_E = 1.4426950216293335  # in float32, as are the coefficients of 2^x in [0, 1), highest power first
_POWER = (0.0002161380834877491, 0.0012467376654967666, 0.009675532579421997, 0.05548521876335144, 0.24022932350635529,
          0.6931470632553101, 1.0)


def scale(logits: torch.Tensor, row: torch.Tensor, rows: SamplingRows | SamplingKeys) -> torch.Tensor:
    """Return new logits [L, V]: (logits - greatest) / temperature. The greatest is subtracted first, because a tiny
    temperature could otherwise make the greatest logits infinite, hence equal. Greedy logit rows are only shifted,
    which keeps their order and ties."""
    temperature = rows.temperature[row].to(logits.dtype)[:, None]
    return _below_greatest(logits).div_(torch.where(temperature > 0, temperature, 1))


def _below_greatest(logits: torch.Tensor) -> torch.Tensor:
    greatest = logits.amax(dim=1, keepdim=True)
    return logits - torch.where(greatest.isfinite(), greatest, 0)


def keep_likely(scaled: torch.Tensor, row: torch.Tensor, rows: SamplingRows, needs: StepNeeds,
                editor: LogitEditor | None = None) -> None:
    """Apply min-p, the editor, top-k and top-p in this order, in place. Top-p counts only the tokens that top-k has
    kept."""
    if needs.any_min_p:
        scaled.masked_fill_(scaled < rows.min_p_floor[row].to(scaled.dtype)[:, None], -torch.inf)
    if editor is not None:
        editor.shape(scaled)
        scaled.copy_(_below_greatest(scaled))
    if needs.any_top_k or needs.any_top_p:
        greatest = _greatest(scaled, needs)
        if needs.any_top_k:
            _keep_from(scaled, _top_k_threshold(greatest, rows.top_k[row], scaled.shape[1]))
        if needs.any_top_p:
            _keep_from(scaled, _top_p_threshold(greatest, scaled, rows.top_p[row]))


def _keep_from(scaled: torch.Tensor, threshold: torch.Tensor) -> None:
    scaled.masked_fill_(scaled < threshold, -torch.inf)


def _greatest(scaled: torch.Tensor, needs: StepNeeds) -> torch.Tensor:
    """Return each row's greatest scaled logits [L, depth] in descending order. `depth` is as many as a top-k or top-p
    of this batch may need."""
    vocab = scaled.shape[1]
    if needs.any_top_p_alone or needs.max_top_k >= vocab:
        return scaled.sort(dim=1, descending=True).values
    return scaled.topk(needs.max_top_k, dim=1).values


def _top_k_threshold(greatest: torch.Tensor, top_k: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the k-th greatest logit [L, 1], or -inf for rows without a top-k."""
    index = (top_k - 1).clamp(0, greatest.shape[1] - 1)[:, None]
    is_open = (top_k <= 0) | (top_k >= vocab)
    return torch.where(is_open[:, None], -torch.inf, greatest.gather(1, index))


def _top_p_threshold(greatest: torch.Tensor, scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the scaled logit [L, 1] of the last token that top-p keeps: the tokens likelier than it have a total
    probability below p. -inf where p is 1.

    `greatest` may contain tokens that top-k has dropped from `scaled`. They come after all kept tokens, whose
    probabilities add up to the total, so top-p never keeps them."""
    total = probability_mass(scaled).sum(dim=1, keepdim=True)
    mass = probability_mass(greatest)
    before = mass.cumsum(dim=1) - mass
    kept = before < total * top_p.to(torch.float64)[:, None]  # a prefix; with ties its last value is what matters
    last = kept.sum(dim=1, keepdim=True).sub_(1).clamp_(min=0)
    return torch.where((top_p >= 1)[:, None], -torch.inf, greatest.gather(1, last))


def probability_mass(scaled: torch.Tensor) -> torch.Tensor:
    """Return exp(scaled) as integers in units of 2^-40, because sums of integers are exact in any order.

    In float32 the exponential is computed in steps that every device rounds alike. Kernels compute the same steps."""
    if scaled.dtype != torch.float32:
        return (scaled.exp() * 2.0**_MASS_BITS).to(torch.int64)
    power = (scaled * _LOG2_E).clamp_(min=-64.0)
    whole = power.floor()
    rest = power.sub_(whole)
    value = torch.full_like(rest, _POWER[0])
    for coefficient in _POWER[1:]:
        value.mul_(rest).add_(coefficient)
    mantissa = value.mul_(2.0**_MANTISSA_BITS).to(torch.int64)
    return (mantissa << (_MASS_BITS - _MANTISSA_BITS)) >> whole.neg_().clamp_(max=63.0).to(torch.int64)
