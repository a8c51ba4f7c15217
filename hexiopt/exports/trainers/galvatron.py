"""Galvatron: one chain of stages with equally many GPUs; TP degree and full recompute by layer, as a JSON file.

Ranks are t + T·(r + R·s) for replica r of R of stage s (`galvatron/core/runtime/comm_groups.py`).
"""

import json
from itertools import accumulate, pairwise

from hexiopt.exports.file_jobs import import_layout
from hexiopt.exports.formats import (
    EVEN,
    ImportContext,
    ImportedPlan,
    Program,
    Trainer,
    divides_model_and_sequence,
    stage_name,
)
from hexiopt.exports.layout import JobLayout, LayoutStage, chain_of, check_tp, schedule_of, zero_stage
from hexiopt.exports.settings import FileSettings, script_notes
from hexiopt.exports.trainer_schedules import TRAINER_SCHEDULES
from hexiopt.ledger import Reason, Vocabulary, words
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem

TARGET = "Galvatron cea12ff"
FILE = "galvatron.json"
_SCHEDULES = TRAINER_SCHEDULES["galvatron"]
_ZERO = {0: "ddp", 2: "zero2", 3: "zero3"}
_EXPERTS = "experts are not read here; import a dense layout"


def _join(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


# ----------------------------------------------------------------------------- reading


def _all(harmless: str, reason: str) -> Reason:
    """The reason to refuse a list of numbers unless all are `harmless`."""
    return lambda value: None if {part.strip() for part in str(value).split(",")} == {harmless} else reason


_KEYS = words("""
    checkpoint chunks default_dp_type dp_types_enc global_bsz pipeline_type pp_deg pp_division tp_sizes_enc vtp
""")
VOCABULARY = Vocabulary(
    harmless=frozenset({"dispatcher", "hexiopt.notes", "hexiopt.target"}),  # of experts; the exporter's own
    refused={
        "cp_sizes_enc": _all("1", "context parallelism is not read here; take 1"),
        "embed_sdp": _all("0", "shards the embedding alone, which is not modelled; take 0"),
        "ep_sizes_enc": _all("1", _EXPERTS),
        "tp_consecutive_flags": _all("1", "puts ranks of a TP group apart, which is not read here; take 1"),
        "tp_of_ep_sizes_enc": _all("1", _EXPERTS),
        "use_sp": _all("0", "Ulysses' sequence parallelism is not read here; take 0"),
        "vcp": _all("1", "context parallelism is not read here; take 1"),
        "vsp": _all("0", "Ulysses' sequence parallelism of the vocabulary is not read here; take 0"),
    },
)


def _numbers(settings: FileSettings, key: str, count: int, default: int | None = None) -> list[int]:
    """The `count` numbers in a comma-separated text."""
    if key not in settings and default is not None:
        settings.by_default(key, default)
        return [default] * count
    parts = [part.strip() for part in str(settings.get(key, "")).split(",")]
    if key not in settings:
        settings.fault(key, "is missing; state it")
    elif len(parts) != count or not all(part.isdecimal() and len(part) < 10 for part in parts):
        settings.refuse_value(key, f"is not a list of {count} whole numbers with commas between; correct it")
    else:
        return [int(part) for part in parts]
    return [1] * count


class GalvatronFormat(Trainer):
    """Galvatron's configuration of layers."""

    name = "galvatron"
    target = TARGET
    expresses = "one chain of stages with equally many GPUs; TP degree by stage, full recompute by layer"
    schedules = TRAINER_SCHEDULES["galvatron"]
    choices = EVEN | {"workload.optimizer_sharding": ("2", "3", "0"), "workload.recompute": ("full", "none")}
    takes_tp = staticmethod(divides_model_and_sequence)

    def unsuitable(self, problem: Problem) -> str | None:
        model = problem.model
        known = ("llama", "mistral", "qwen2", "gpt2")
        return (
            None
            if model.architecture in known
            else f"model {model.name}: Galvatron trains {', '.join(known)}; take one"
        )

    def write(self, problem: Problem, plan: Plan) -> Program:
        refuse = self.refuse
        schedule = schedule_of(plan, self.schedules, refuse)
        chain, zero = chain_of(plan, refuse), zero_stage(plan, tuple(_ZERO), refuse)
        check_tp(problem, chain, self.takes_tp, refuse)
        for s, stage in enumerate(chain.stages):
            if stage.tp * stage.dp != chain.stages[0].tp * chain.stages[0].dp:
                what = f"{stage_name(0, s)} has {stage.tp * stage.dp} GPUs, stage 0 has"
                refuse(
                    f"{what} {chain.stages[0].tp * chain.stages[0].dp}", "space.uneven_tp=false space.replicas=false"
                )
            if "selective" in stage.recompute:
                refuse(f"{stage_name(0, s)} recomputes selectively", "workload.recompute=full")
        tps = [stage.tp for stage in chain.stages for _ in range(stage.num_layers)]
        checkpoint = [
            int(policy == "full") for stage in chain.stages for policies in stage.policies() for policy in policies
        ]
        ends = chain.stages[0].tp, chain.stages[-1].tp
        what = f"embedding and head have one TP degree, {ends[0]}, where the plan has {ends[0]} and {ends[1]}"
        notes = (what,) * (ends[0] != ends[1])
        document = {
            "pp_deg": len(chain.stages),
            "tp_sizes_enc": _join(tps),
            "tp_consecutive_flags": _join([1] * len(tps)),
            "dp_types_enc": _join([int(zero == 3)] * len(tps)),
            "use_sp": _join([0] * len(tps)),
            "checkpoint": _join(checkpoint),
            "global_bsz": chain.global_batch,
            "chunks": chain.num_micro_batches,
            "pp_division": _join([stage.num_layers for stage in chain.stages]),
            "pipeline_type": _SCHEDULES[schedule],
            "default_dp_type": _ZERO[zero],
            "vtp": ends[0],
            "vsp": 0,
            "hexiopt": {"target": TARGET, "notes": list(notes)},
        }
        command = f'"${{GALVATRON:-.}}/train_dist.py" --galvatron_config_path "$HERE/{FILE}"'
        return Program(chain.stage_major(), command, {FILE: json.dumps(document, indent=1) + "\n"}, notes=notes)

    def read(self, text: str, context: ImportContext) -> ImportedPlan:
        settings = FileSettings.of_json(text, context, VOCABULARY, _KEYS)
        model = context.require_model("Galvatron")
        devices, of_ranks = context.ranks_of(None)
        stages = settings.whole("pp_deg")
        division = _numbers(settings, "pp_division", stages)
        tps, checkpoint, types = (
            _numbers(settings, name, model.num_layers, default)
            for name, default in (("tp_sizes_enc", None), ("checkpoint", 0), ("dp_types_enc", 0))
        )
        batch, chunks = settings.whole("global_bsz"), settings.whole("chunks")
        schedule = settings.word("pipeline_type", {word: value for value, word in _SCHEDULES.items()}, "gpipe")
        zero = settings.word("default_dp_type", {word: value for value, word in _ZERO.items()}, "ddp")
        if len(set(types)) > 1:
            settings.fault("dp_types_enc", "layers differ in ZeRO stage, which is not modelled; give all the same")
        if sum(division) != model.num_layers:
            settings.fault("pp_division", f"does not sum to the {model.num_layers} layers of {model.name}; correct it")
        if len(devices) % stages or batch % chunks:
            what = f"{stages} stages do not divide {len(devices)} GPUs, or {chunks} chunks global_bsz {batch}"
            settings.fault("pp_deg and chunks", f"{what}; give ranks=ranks.tsv, or correct them")
        vocabulary = settings.whole("vtp", tps[0])
        settings.refuse()
        size, per = batch // chunks, len(devices) // stages
        chain = []
        for s, (first, end) in enumerate(pairwise([0, *accumulate(division)])):
            tp, rank = tps[first], s * per
            if len(set(tps[first:end])) > 1:
                context.fail(
                    f"tp_sizes_enc: layers of stage {s} have several TP degrees, which are not modelled; give it one"
                )
            if per % tp or size % (per // tp):
                context.fail(
                    f"stage {s}: TP {tp} on {per} GPUs does not divide micro-batches of {batch} / {chunks} sequences; "
                    "correct one of them"
                )
            replicas = tuple(devices[rank + r * tp : rank + (r + 1) * tp] for r in range(per // tp))
            policies = tuple("full" if on else "none" for on in checkpoint[first:end])
            chain.append(LayoutStage(replicas, ((first, end),), policies if len(set(policies)) > 1 else policies[:1]))
        ends = {chain[0].tp, chain[-1].tp} - {vocabulary}
        note = f"embedding and head have TP degree {vocabulary}, priced with that of their stages"
        workload = context.workload
        script = {"seq_len": workload.seq_len, "precision": workload.precision}
        if max(tps) > 1:
            script["sequence_parallel"] = workload.sequence_parallel
        notes = (*of_ranks, *((note,) if ends else ()), *script_notes(context, **script), *settings.notes())
        layout = JobLayout(tuple(chain), chunks, size)
        zero = 3 if set(types) == {1} else zero
        return import_layout(context, model, layout, schedule, zero, {"global_batch": batch}, notes)


TRAINER = GalvatronFormat()
