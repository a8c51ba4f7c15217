"""The file through which every process of a run reads what it does."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hexiopt.files.plan_file import write_text
from hexiopt.reading import Section, read_mapping
from runtime.data.batches import Batches
from runtime.settings import AdamW, ExpertTraining, Settings


@dataclass(frozen=True)
class TrainingRun:
    """What every process of a run reads: the name of the `run`, which its checkpoints bear; paths of the plan, the
    tokens, the folder of checkpoints; the tokens of a text for validation, if it has its own; the checkpoint to go on
    from, or Hugging Face weights and an adapter to start with, if any. `float64` trains in it, as tests do. `device` is
    `cpu` or `cuda`, for all ranks; `auto` until their machines have chosen."""

    run: str
    plan: Path
    tokens: Path
    checkpoints: Path
    settings: Settings
    validation: Path | None = None
    resume: Path | None = None
    weights: Path | None = None
    adapter: Path | None = None
    float64: bool = False
    device: str = "cpu"

    def batches(self, seq_len: int, source: Path | str | None = None) -> Batches:
        """What is trained on. Raises InputError, which names the `source` of the tokens."""
        settings = self.settings
        return Batches(
            self.tokens, seq_len, settings.seed, settings.separator, (0.0, 1.0 - settings.validation_share), source
        )

    def validation_batches(self, seq_len: int, source: Path | str | None = None) -> Batches | None:
        """What is not, if any. Raises InputError, which names the `source` of the tokens."""
        settings = self.settings
        if self.validation is not None:
            return Batches(self.validation, seq_len, settings.seed, settings.separator, source=source)
        if not settings.validation_share:
            return None
        return Batches(
            self.tokens, seq_len, settings.seed, settings.separator, (1.0 - settings.validation_share, 1.0), source
        )

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
        adam, experts = AdamW(**settings.pop("adam")), ExpertTraining(**settings.pop("experts"))
        texts = {key: section.text(key) for key in ("plan", "tokens", "checkpoints")}
        optional = ("validation", "resume", "weights", "adapter")
        texts |= {key: text for key in optional if (text := section.raw(key, None)) is not None}
        paths = {key: Path(text) for key, text in texts.items()}
        device, float64 = section.text("device", choices=("auto", "cpu", "cuda")), section.flag("float64")
        return cls(
            section.text("run"),
            **paths,
            settings=Settings(adam=adam, experts=experts, **settings),
            float64=float64,
            device=device,
        )
