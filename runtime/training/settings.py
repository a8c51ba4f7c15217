"""The settings of a training run, and the file through which every process of the run reads them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import cos, pi
from pathlib import Path
from typing import Any

from hexiopt.files.plan_file import write_text
from hexiopt.reading import Section, read_mapping
from runtime.data.batches import Batches
from runtime.parallel.optimizer import AdamW

TRACE_AFTER = 2  # steps of a process: operators are compiled and communicators made in the first


@dataclass(frozen=True)
class Settings:
    """How to train. The learning rate warms up linearly; then it falls to `min_lr_share` of itself, along a cosine, or
    linearly in the last `decay_share` of all steps: the `lr_schedule` `wsd` (warm-up, stable, decay: Hu et al., arXiv
    2404.06395).

    A checkpoint is written every `checkpoint_every` steps and at the end; the last `keep_checkpoints` stay. No message
    or collective waits longer than `timeout_s`. Layers are compiled if `compile_layers` is true or, where it is None,
    on GPUs; `attention` names its kernels, as `take_attention` has them. A process is lost when it gives no sign of
    life for `silence_s`, or for as long as five steps usually take.
    Where there is a `separator`, the token with which documents end, attention keeps to documents.

    The `validation_share` of the sequences of its text, the last ones, is not trained on. At the start, every
    `validation_every` steps and at the end, the loss of at most `validation_batches` global batches of them, or of the
    run's text for validation, is computed. `trace_steps` steps are traced, the ones after the first `TRACE_AFTER` of a
    process.
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
    silence_s: float = 15.0
    separator: int | None = None
    validation_share: float = 0.0
    validation_every: int = 25
    validation_batches: int = 8
    trace_steps: int = 0

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> "Settings":
        """The settings among `stated`, where those of AdamW stand beside the others."""
        adam, own = (
            {one.name: stated[one.name] for one in fields(made) if one.name in stated} for made in (AdamW, cls)
        )
        return cls(adam=AdamW(**adam), **own)

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.adam.lr * (step + 1) / self.warmup_steps
        return self.adam.lr * (self.min_lr_share + (1 - self.min_lr_share) * self._left(step))

    def _left(self, step: int) -> float:
        """What is left of the fall, from 1 to 0."""
        if self.lr_schedule == "cosine":
            done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
            return 0.5 * (1 + cos(pi * done))
        return min(1.0, (self.steps - step) / max(1.0, self.decay_share * self.steps))


@dataclass(frozen=True)
class TrainingRun:
    """What every process of a run reads: the name of the `run`, which its checkpoints bear; paths of the plan, the
    tokens, the folder of checkpoints; the tokens of a text for validation, if it has its own; the checkpoint to go on
    from, or Hugging Face weights to start with, if any. `float64`
    trains in it, as tests do. `device` is `cpu` or `cuda`, for all ranks; `auto` until their machines have chosen."""

    run: str
    plan: Path
    tokens: Path
    checkpoints: Path
    settings: Settings
    validation: Path | None = None
    resume: Path | None = None
    weights: Path | None = None
    float64: bool = False
    device: str = "cpu"

    def batches(self, seq_len: int, source: Path | str | None = None) -> Batches:
        """What is trained on. Raises InputError, which names the `source` of the tokens."""
        own = self.settings
        return Batches(self.tokens, seq_len, own.seed, own.separator, (0.0, 1.0 - own.validation_share), source)

    def validation_batches(self, seq_len: int, source: Path | str | None = None) -> Batches | None:
        """What is not, if any. Raises InputError, which names the `source` of the tokens."""
        own = self.settings
        if self.validation is not None:
            return Batches(self.validation, seq_len, own.seed, own.separator, source=source)
        if not own.validation_share:
            return None
        return Batches(self.tokens, seq_len, own.seed, own.separator, (1.0 - own.validation_share, 1.0), source)

    def to_dict(self) -> dict[str, Any]:
        """The run as plain data."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}

    def write(self, path: Path) -> None:
        """Write the run as JSON."""
        write_text(path, json.dumps(self.to_dict(), indent=1))

    @classmethod
    def read(cls, path: Path) -> "TrainingRun":
        """The run of a file that `write` wrote."""
        return cls.of(read_mapping(path), str(path))

    @classmethod
    def of(cls, data: Mapping[str, Any], where: str = "run") -> "TrainingRun":
        """The run of plain data, which `where` has. Raises InputError."""
        section = Section(data, where)
        settings = dict(section.raw("settings"))
        adam = AdamW(**settings.pop("adam"))
        given = {key: section.text(key) for key in ("plan", "tokens", "checkpoints")}
        optional = ("validation", "resume", "weights")
        given |= {key: text for key in optional if (text := section.raw(key, None)) is not None}
        paths = {key: Path(text) for key, text in given.items()}
        device, float64 = section.text("device", choices=("auto", "cpu", "cuda")), section.flag("float64")
        return cls(
            section.text("run"), **paths, settings=Settings(adam=adam, **settings), float64=float64, device=device
        )
