# %% [markdown]
# # What if: machines, links and money
#
# A plan says how to use a cluster. The next questions are about the cluster itself. Which machine should one add or
# rent? Which would nobody miss? Which link is worth an upgrade, and at what price? `what_if` plans every alternative
# with the same solver and budget, and compares what they would give. Here it is asked three times: of a small lab with
# a price list, of eight GPUs on a slow network, and of 32 GPUs of four types.

# %%
import hexiopt as hx

lab = hx.Problem(
    cluster=hx.cluster("small_mixed"),
    model=hx.model("llama2_7b"),
    workload=hx.Workload(global_batch=64, seq_len=2048),
)
lab

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
SEARCH = {"solver": "local_search", "time_limit_s": 600, "bound_time_limit_s": 5, "progress": False}
result = hx.what_if(lab, max_steps=3000, prices=PRICES, **SEARCH)
print(result)

# %% [markdown]
# Every row is a cluster that differs from this one in one point. A plan found for one alternative counts for all
# others that can execute it, so a machine more never makes the answer worse.
#
# **gain** is what the best plan gains in tokens per second. **worth/h** turns it into money: at this price per hour a
# token costs as much as now. **bound** asks the lower bound instead of the plans: its *dual value* is the share of the
# possible throughput that a machine stands for, whatever plan one finds.
#
# Three answers stand out. Neither of the two machines can be missed: what is left has too little memory for the
# model, so there is no plan at all. A faster network gives next to nothing, because this plan is a single pipeline and
# sends only activations. And every machine more gives a lot, since six GPUs barely hold the model.
#
# ## Which offer is worth its price?
#
# An offer whose price is below its worth makes tokens cheaper. One above it buys speed with money.

# %%
base = result.options[0]
offers = {}
for option, row in zip(result.options, result, strict=True):
    if option.alternative.change == "machine added":
        price = option.price_per_hour - base.price_per_hour
        offers[option.alternative.name] = {"worth per hour": row["worth_per_hour"], "price per hour": price}
hx.plot.bars(offers, unit="per hour").figure

# %% [markdown]
# Another machine like the lab's own is the bargain: it is worth more than it costs. Both rented machines make steps
# twice as fast, and a token dearer: the four RTX 4090 only slightly, the two A100 much.
#
# ## Time against money

# %%
result.plot()

# %% [markdown]
# Points on the line are those that no other beats in both: the cheapest tokens are at one end, the fastest step at the
# other. Everything off the line costs more and is slower than something on it. The lab as it is lies off it.
#
# What does the fastest alternative do with its GPUs? First the plan as it is, then the one with rented machines:

# %%
hx.plot.layers(base.plan).figure

# %%
fastest = min(result.options, key=lambda option: option.step_time_s)
print(fastest.alternative.name)
hx.plot.layers(fastest.plan).figure

# %% [markdown]
# ## Which link is worth an upgrade?
#
# HexiScale's case study has three A800, three RTX 4090 and two RTX 3090 in three machines with only 0.7 GB/s between
# them ([its notebook](02_hexiscale_case_study.ipynb)). Without a price list, `what_if` still adds and takes a machine
# of every kind, and makes the links of every kind twice as fast.

# %%
case = hx.Problem(
    hx.cluster("hexiscale_case_study"), hx.model("llama2_13b"), hx.Workload(global_batch=64, seq_len=4096)
)
links = hx.what_if(case, max_steps=3000, **SEARCH)
gains = {row["alternative"]: {"gain": 100 * row["gain"]} for row in links if row["change"] == "faster links"}
hx.plot.bars(gains, unit="gain in tokens per second (%)").figure

# %% [markdown]
# A message travels at the rate of the slower of its two ends. So an upgrade of all interfaces gains more than those of
# single machines together: one fast interface helps only where messages to several machines share it. Links inside the
# machines are not what this plan waits for.
#
# How far does it pay to go? The same plan on a network of several speeds, and beside it a plan made for that network:


# %%
def with_network(gb_per_s: float) -> hx.Problem:
    """The case study with this rate of every network interface."""
    machines = [machine.replace(nic_bandwidth_bytes_per_s=1e9 * gb_per_s) for machine in case.cluster.machines]
    return case.replace(cluster=case.cluster.replace(machines=tuple(machines)))


as_it_is = links.options[0].plan
step_s = {}
for gb_per_s in (0.7, 1.25, 3.125, 12.5, 50):
    faster = with_network(gb_per_s)
    same = hx.price(faster, as_it_is)
    anew = hx.solve(faster, "local_search", 600, max_steps=3000, start=as_it_is, progress=False)
    step_s[f"{gb_per_s:g} GB/s"] = {"the same plan": same.step_time_s, "planned anew": anew.cost.step_time_s}
hx.plot.bars(step_s, unit="step time (s)").figure

# %% [markdown]
# The first step, from 0.7 to 1.25 GB/s, brings most of the gain, and what comes after 3 GB/s hardly matters. The old
# plan misses most of it: on the fastest network it gains 4 %, a plan made for that network 13 %. So price an upgrade
# with a new plan, never with the old one.
#
# ## Machines and their dual values
#
# HexiScale's second setting has a machine of eight GPUs of each of four types. What is one more of each worth to the
# best plan found, and what to the lower bound?

# %%
large = hx.Problem(hx.cluster("hexiscale_setting_2"), hx.model("llama2_7b"))
kinds = hx.what_if(large, max_steps=1500, **SEARCH)
added = {
    row["alternative"]: {"gain of the plan": 100 * row["gain"], "share in the bound": 100 * row["bound_share"]}
    for row in kinds
    if row["change"] == "machine added"
}
hx.plot.bars(added, unit="tokens per second (%)").figure

# %%
losses = {
    row["alternative"]: {"loss of the plan": -100 * row["gain"], "share in the bound": 100 * row["bound_share"]}
    for row in kinds
    if row["change"] == "machine taken"
}
hx.plot.bars(losses, unit="tokens per second (%)").figure

# %% [markdown]
# Today's machines are worth to the plan nearly what they are worth to the bound: what the bound says that they can
# compute, the plan uses. One more of them adds much less than its share, and a second machine of RTX 3080 Ti adds
# nothing. The bound counts what a machine computes; a plan must also feed it through the network and fit the model into
# its memory. (And the search must find that plan: 1,500 steps for each alternative are few.) Both numbers side by side
# tell, before a purchase, whether a machine is weak or hard to use.
#
# As a table for further work, one row per alternative:

# %%
columns = ("alternative", "change", "step_time_s", "gain", "gpus_used", "bound_share")
hx.Frame.of([{name: row[name] for name in columns} for row in kinds])
