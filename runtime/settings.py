"""How a run trains, stated once: the command line's `train` has these fields and defaults. Nothing here needs torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import cos, pi
from typing import Any

TRACE_AFTER = 2  # steps of a process: operators are compiled and communicators made in the first


@dataclass(frozen=True)
class AdamW:
    """Loshchilov and Hutter, arXiv 1711.05101. The norm of all gradients is clipped to `max_norm`, if any; norms and
    biases do not decay. Of other optimizers, `beta1` is the momentum, and `beta2` and `eps` have no meaning."""

    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float | None = 1.0


@dataclass(frozen=True)
class ExpertTraining:
    """How experts are trained. With an `expert_capacity`, a rank sends an expert at most so many times the mean of what
    its tokens send to an expert, and drops the rest; None: nothing is dropped. `sequence_balance` is the weight of the
    balance loss of each sequence (DeepSeek-V3: 1e-4), `expert_bias_rate` by how much a step moves the bias of an expert
    whose load is not the mean, where the router has biases (arXiv 2408.15664; DeepSeek-V3: 1e-3).
    """

    expert_capacity: float | None = None
    sequence_balance: float = 0.0
    expert_bias_rate: float = 1e-3


EXPERTS = ExpertTraining()


@dataclass(frozen=True)
class Settings:
    """How to train. The learning rate warms up linearly; then it falls to `min_lr_share` of itself, along a cosine, or
    linearly in the last `decay_share` of all steps: the `lr_schedule` `wsd` (warm-up, stable, decay: Hu et al., arXiv
    2404.06395).

    A checkpoint is written every `checkpoint_every` steps and at the end; the last `keep_checkpoints` stay. No message
    or collective waits longer than `timeout_s`. Layers are compiled if `compile_layers` is true or, where it is None,
    on GPUs; `attention` names its kernels, as `take_attention` has them. With `async_tp`, GPUs of a TP group that have
    equally many tokens multiply while they exchange them. A process is lost when it gives no sign of life for
    `silence_s`, or for as long as five steps usually take. Where there is a `separator`, the token with which documents
    end, attention keeps to documents.

    The `validation_share` of the sequences of its text, the last ones, is not trained on. At the start, every
    `validation_every` steps and at the end, the loss of at most `validation_batches` global batches of them, or of the
    run's text for validation, is computed. `trace_steps` steps are traced, the ones after the first `TRACE_AFTER` of a
    process. Products of adapters are scaled by `lora_alpha` over their rank; None: twice the rank.
    """

    steps: int = 50
    adam: AdamW = field(default_factory=AdamW)
    lr_schedule: str = "cosine"
    warmup_steps: int = 5
    decay_share: float = 0.2
    min_lr_share: float = 0.1
    seed: int = 0
    checkpoint_every: int = 25
    keep_checkpoints: int = 2
    timeout_s: float = 60.0
    compile_layers: bool | None = None
    attention: str = "auto"
    async_tp: bool = False
    silence_s: float = 15.0
    separator: int | None = None
    validation_share: float = 0.0
    validation_every: int = 25
    validation_batches: int = 8
    trace_steps: int = 0
    lora_alpha: float | None = None
    experts: ExpertTraining = EXPERTS

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Settings":
        """The settings among `values`, where those of AdamW and of experts stand beside the others."""
        adam, experts, others = (
            {setting.name: values[setting.name] for setting in fields(kind) if setting.name in values}
            for kind in (AdamW, ExpertTraining, cls)
        )
        return cls(adam=AdamW(**adam), experts=ExpertTraining(**experts), **others)

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.adam.lr * (step + 1) / self.warmup_steps
        return self.adam.lr * (self.min_lr_share + (1 - self.min_lr_share) * self._decay_factor(step))

    def _decay_factor(self, step: int) -> float:
        """What is left of the fall, from 1 to 0."""
        if self.lr_schedule == "cosine":
            done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
            return 0.5 * (1 + cos(pi * done))
        return min(1.0, (self.steps - step) / max(1.0, self.decay_share * self.steps))
