"""`hexiopt export export.checkpoint=outputs/trained/checkpoints/step-00000050`: weights for other programs."""

import sys
from importlib.util import find_spec
from pathlib import Path

from experiments.app.common import Job
from experiments.cli import main
from hexiopt.errors import InputError

FOLDER = "huggingface"


def run(job: Job) -> float:
    """Write a checkpoint's weights as a Hugging Face model. Raises InputError."""
    if find_spec("torch") is None:
        raise InputError("export: needs torch; install hexiopt[train]")
    from runtime.mapping.parts import whole_parts
    from runtime.state.checkpoint import Checkpoint
    from runtime.state.weights import DTYPES, write_hugging_face

    config = job.config.export
    if config.checkpoint is None:
        raise InputError("export.checkpoint: is missing; name a folder step-NNNNNNNN")
    checkpoint = Checkpoint(Path(config.checkpoint))
    checkpoint.check()
    model = checkpoint.model
    tensors = ((part.name, checkpoint.read("weight", part)) for part in whole_parts(model))
    write_hugging_face(job.folder / FOLDER, model, tensors, DTYPES[config.precision])
    job.show_files(FOLDER)
    return float("nan")


if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
