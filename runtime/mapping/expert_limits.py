"""Which models with experts, and which plans of them, the runtime does not train."""

from hexiopt.numbers.optimizers import ADAMW
from hexiopt.plan.parallelism import ExpertParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.kinds import Experts
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import FULL, Workload
from runtime.mapping.expert_rules import ROUTED_TYPES, RouterRule, model_type, router_rule
from runtime.mapping.model_parts import layer_kinds


def untrainable_experts(model: ModelSpec, workload: Workload, plan: Plan | None) -> str | None:
    """Why the experts of a model cannot be trained so, with a remedy; None if they can, or there are none."""
    parts = [kind.experts for kind in model.kinds if kind.experts is not None]
    if not parts:
        return None
    where = f"model {model.name}"
    if model_type(model) not in ROUTED_TYPES:
        known = ", ".join(ROUTED_TYPES)
        return f"{where}: routers of {model_type(model)} cannot be trained, only planned; take one of {known}"
    if len({part.count for part in parts}) > 1:
        counts = " and ".join(map(str, sorted({part.count for part in parts})))
        return f"{where}: layers of {counts} experts cannot be trained together; give all equally many"
    if any(kind.dense and kind.experts for kind in model.kinds):
        return f"{where}: an MLP beside the experts of a layer cannot be trained; take a model without"
    rule = router_rule(model)
    if fault := next((fault for part in parts if (fault := _misfit(part, rule))), None):
        return f"{where}: {fault}"
    for name, value, only in (("training", workload.training, FULL), ("optimizer", workload.optimizer, ADAMW)):
        if value != only:
            return f"workload.{name}: {value} cannot be trained yet beside experts, only planned; take {only}"
    if workload.routing != "natural":
        return f"workload.routing: {workload.routing} cannot be trained, only planned; take natural"
    for p, pipeline in enumerate(() if plan is None else plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            group, at = stage.parallelism, f"stage {s} of pipeline {p}"
            if not isinstance(group, ExpertParallel):
                continue
            if group.waves > 1:
                return f"{at} has two waves, which cannot be trained, only planned; take one"
            if 0 in group.shares and not _has_experts(model, stage):
                return f"{at} has devices for experts alone, and no layer with experts; give it one"
    return None


def expert_feature(part: Experts) -> str | None:
    """What of experts is not trained, in words; None if all is."""
    features = {
        "experts without a gate": not part.gated,
        "experts behind a projection": part.latent > 0,
        "scales of a router's input or of experts": bool(part.router_vectors or part.expert_scales),
    }
    return next((name for name, is_there in features.items() if is_there), None)


def _misfit(part: Experts, rule: RouterRule) -> str | None:
    """Why a router cannot choose of these experts, with a remedy."""
    size, rest = divmod(part.count, rule.num_groups)
    if rest:
        return f"{part.count} experts are not {rule.num_groups} equal groups; state another n_group"
    if not rule.top_groups <= rule.num_groups or part.top_k > rule.top_groups * size:
        return (
            f"{part.top_k} experts are not among {rule.top_groups} of {rule.num_groups} groups of {size}; "
            "state another topk_group"
        )
    return None


def _has_experts(model: ModelSpec, stage: Stage) -> bool:
    kinds = layer_kinds(model)
    return any(kind.experts is not None for layers in stage.layers for kind in kinds[slice(*layers)])
