"""DrafterOptimizer: AdamW on float32 weights, with a learning rate that rises and then falls along a cosine. Its state
can be saved."""

from __future__ import annotations

import math

import torch

from outrider.training.settings import TrainingSettings

LEAST_SHARE = 0.02  # of the peak rate, at the end


class DrafterOptimizer:
    def __init__(self, weights: dict[str, torch.Tensor], settings: TrainingSettings, *, peak_rate: float,
                 num_steps: int) -> None:
        self._weights, self._clip = weights, settings.clip
        self._peak, self._num_steps = peak_rate, num_steps
        self._num_warm = max(1, round(settings.warm_up * num_steps))
        self._is_fused = all(weight.is_cuda for weight in weights.values())  # one launch for all weights
        self._adam = torch.optim.AdamW(list(weights.values()), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.0,
                                       fused=self._is_fused or None)

    def rate(self, step: int) -> float:
        if step < self._num_warm:
            return self._peak * (step + 1) / self._num_warm
        progress = (step - self._num_warm) / max(1, self._num_steps - self._num_warm)
        return self._peak * (LEAST_SHARE + (1 - LEAST_SHARE) * (0.5 + 0.5 * math.cos(math.pi * progress)))

    def zero_gradients(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def apply(self, step: int) -> torch.Tensor:
        """Update the weights by their gradients. Returns the norm of the gradients before clipping, on the weights'
        device."""
        norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(list(self._weights.values()), self._clip)
        for group in self._adam.param_groups:
            group["lr"] = self.rate(step)
        self._adam.step()
        return norm.detach()

    def state(self) -> dict[str, torch.Tensor]:
        """The two moments of every weight, under `first.NAME` and `second.NAME`; empty before the first step."""
        states = {name: self._adam.state[weight] for name, weight in self._weights.items()}
        return {f"{ours}.{name}": own[theirs] for name, own in states.items() if own
                for ours, theirs in (("first", "exp_avg"), ("second", "exp_avg_sq"))}

    def load(self, state: dict[str, torch.Tensor], num_steps_done: int) -> None:
        for name, weight in self._weights.items():
            self._adam.state[weight] = {
                "step": torch.tensor(float(num_steps_done), device=weight.device if self._is_fused else "cpu"),
                "exp_avg": state[f"first.{name}"].to(weight.device).clone(),
                "exp_avg_sq": state[f"second.{name}"].to(weight.device).clone(),
            }
