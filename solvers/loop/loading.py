"""What numba has compiled is loaded where the solver is made, as modules are, before the clock of a search starts."""

from functools import cache

from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.solving import Budget
from solvers.core.search import Search
from solvers.loop.search import walk_candidates
from solvers.loop.settings import LoopSettings


@cache
def load_kernels() -> None:
    """Call every kernel of the loop once in this process: a walk of a few candidates for six GPUs."""
    cluster = Cluster.of({"rtx_3090": 4, "rtx_4090": 2}, inter_gb_per_s=1.0, gpus_per_machine=2)
    model = ModelSpec(
        name="small",
        architecture="llama",
        num_layers=4,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        ffn_size=512,
        vocab_size=1024,
        max_positions=1024,
    )
    run = Search("load_kernels", Problem(cluster, model, Workload(8, 512)), Budget(max_steps=12), 0)
    walk_candidates(run, LoopSettings(walks=1, candidates=4), run.until())
