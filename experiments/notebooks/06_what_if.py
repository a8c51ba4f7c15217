# %% [markdown]
# # What if: machines, links and money
#
# A plan says how to use a cluster. The next question is about the cluster itself: which machine should one add or
# rent, which would nobody miss, which link is worth an upgrade, and at what price? `what_if` plans every alternative
# with the same solver and budget, and compares what they would give.

# %%
import hexiopt as hx

problem = hx.Problem(
    cluster=hx.cluster("small_mixed"),
    model=hx.model("llama2_7b"),
    workload=hx.Workload(global_batch=64, seq_len=2048),
)
problem

# %% [markdown]
# ## A price list
#
# Prices are per hour, in any currency: of GPUs that the cluster has, of machines that one could rent, and of faster
# network interfaces. The numbers below are examples, not quotes; put your own.

# %%
PRICES = {
    "gpu_price_per_hour": {"rtx_4090": 0.40, "rtx_3090": 0.20},
    "machines": [
        {
            "name": "rented_a100",
            "gpu": "a100_80gb_sxm",
            "num_gpus": 2,
            "intra_bandwidth_gb_per_s": 300,
            "nic_bandwidth_gb_per_s": 3,
            "price_per_hour": 3.2,
        },
        {
            "name": "rented_4090",
            "gpu": "rtx_4090",
            "num_gpus": 4,
            "intra_bandwidth_gb_per_s": 12,
            "nic_bandwidth_gb_per_s": 1.25,
            "price_per_hour": 1.8,
        },
    ],
    "interfaces": [{"name": "25G", "bandwidth_gb_per_s": 3.125, "price_per_hour": 0.03}],
}
found = hx.what_if(
    problem, "local_search", 600, max_steps=200, prices=PRICES, bound_time_limit_s=5, processes=1, progress=False
)
print(found)

# %% [markdown]
# Every row is a cluster that differs from this one in one point. A plan found for one alternative counts for all
# others that can execute it, so a machine more never makes the answer worse.
#
# **gain** is what the best plan gains in tokens per second. **worth/h** turns it into money: at this price per hour a
# token costs as much as now, so an offer below it makes tokens cheaper, one above it buys speed. **bound** is the same
# question asked of the lower bound: its *dual values* say how much of the possible throughput each machine stands for,
# whatever plan one finds.
#
# ## Time against money

# %%
found.plot()

# %% [markdown]
# Points on the line are those that no other beats in both: the cheapest tokens are at one end, the fastest step at the
# other. Everything off the line costs more and is slower than something on it.
#
# ## What a faster network changes in the plan
#
# Each alternative has its plan. Those of the cluster as it is, and of the fastest alternative:

# %%
hx.plot.layers(found.options[0].plan).figure

# %%
best = min(found.options, key=lambda option: option.step_time_s)
print(best.alternative.name)
hx.plot.layers(best.plan).figure

# %% [markdown]
# ## The answer in numbers
#
# As a table for further work, with one row per alternative:

# %%
columns = ("alternative", "gain", "price_per_hour", "price_per_trillion_tokens", "worth_per_hour", "bound_share")
hx.Frame.of([{name: row[name] for name in columns} for row in found])
