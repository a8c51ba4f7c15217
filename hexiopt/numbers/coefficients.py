"""The coefficients of the cost model that do not belong to a GPU type: name, value, unit, source.

They are data: a plan file carries their hash. Values of a GPU type stand in `gpus.yaml`.
"""

# Matmul passes of the backward over the forward: one for the input's gradient, one for the weight's.
GEMM_BACKWARD_PASSES = 2
# FlashAttention's backward has five matrix products to the forward's two (Dao, arXiv 2307.08691, section 3.1).
FUSED_ATTENTION_BACKWARD_PASSES = 2.5
UNFUSED_ATTENTION_BACKWARD_PASSES = 2
# Elements of a token's hidden vector that norms and residual adds read and write in one layer's forward:
# a norm reads and writes (2), a residual add reads two and writes one (3), twice each.
LAYER_HIDDEN_PASSES = 10
# Of these, those of one norm.
NORM_PASSES = 2
# An element-wise backward reads the saved input and the gradient and writes one: twice the forward's traffic.
MEMORY_BACKWARD_PASSES = 2
# Passes over an unfused score matrix in the forward: write scores, softmax reads and writes, values read.
SCORE_PASSES = 4
# Passes over the logits in the forward of the loss: maximum, exponential sum, in FP32.
LOSS_PASSES = 3
# Bytes of an element of what a product in FP8 reads, which is kept so for its backward (NVIDIA Transformer Engine).
FP8_BYTES = 1
# Bytes of the FP32 probability that the loss keeps for its backward, for each logit.
LOSS_BYTES = 4
# Bytes of a token's number (int64), which embedding and loss keep for their backwards.
TOKEN_ID_BYTES = 8
# Bytes of an FP32 statistic of a vector that a norm keeps: its scale; LayerNorm its mean too.
NORM_STATISTIC_BYTES = 4
# Keys of a block of attention kernels: of a window they compute whole blocks, of which half lies outside on average
# (tiles of 128 keys: Dao, arXiv 2307.08691, section 3.3; Shah et al., arXiv 2407.08608).
ATTENTION_BLOCK = 128
# Times that a state between chunks of a recurrence moves in a forward, and kernels of the forward: chunk states are
# made, passed on, and read (Dao and Gu, arXiv 2405.21060, section 6).
STATE_PASSES = 4
SCAN_KERNELS = 8
# Tokens of the fullest rank of a group that shares experts over the mean, where a router is not forced to balance: the
# ratio that explains each of four pairs of runs of Qwen3-235B on 256 H100 with 8 ranks a group, forced and natural
# (yanring/Megatron-MoE-ModelZoo, e8650517, best_practice/qwen3/readme.md): 1.55, 1.59, 1.60, 1.58.
EXPERT_IMBALANCE = 1.58
# An all-to-all inside a machine: its rate over that of rings, 0.5968 of NVLink's (SimuMax, B200, `all2all`) over the
# 0.7854 that rings reach (`nvlink_efficiency`), and its seconds for each doubling of the ranks (the same, 7.3 us).
ALL_TO_ALL_OF_RING = 0.5968 / 0.7854
ALL_TO_ALL_S = 7.3e-6
# Share of the memory's peak rate that kernels reach which permute tokens (SimuMax, B200: 0.5008 and 0.5108).
PERMUTE_SHARE = 0.50
# Rows of a tile, to which the rows of each expert's product are rounded up (CUTLASS grouped products).
TILE_ROWS = 128
# Kernels of a router: logits, softmax, top-k, counts, and their casts; and bytes that these move for each score: FP32,
# written or read six times.
ROUTER_KERNELS = 8
ROUTER_SCORE_BYTES = 24
# Kernels that permute tokens for experts, there and back.
PERMUTE_KERNELS = 4
# Collectives of a layer with sequence-parallel norms (Korthikanti et al., arXiv 2205.05198, section 4.2.2):
# all-gather and reduce-scatter around attention and MLP; the backward gathers the saved inputs again.
TP_FORWARD_COLLECTIVES = 4
TP_BACKWARD_COLLECTIVES = 6
# Share of a stage's gradients that no backward is left to hide, where frameworks overlap: a layer of 24.
LAST_BUCKET = 1 / 24
# Parameters of a buffer in which our executor sums gradients and gathers weights, unless one of them is larger.
BUCKET_PARAMS = 8_000_000
# Bytes that Adam moves for a parameter beside gradient and weight: master and two moments, read and written, FP32.
ADAM_STATE_TRAFFIC_BYTES = 24
# Kernels that merge a block's attention into what blocks before it gave, by the log-sum-exp of both: the new
# log-sum-exp, a weight of each part, their weighted sum (Liu et al., arXiv 2310.01889, algorithm 1).
MERGE_KERNELS = 4
# Kernels that add a block's gradients of queries, keys and values to those of blocks before it.
GRADIENT_SUM_KERNELS = 3
# Bytes of an element of what attention over blocks sums up, and of a log-sum-exp: FP32.
ACCUMULATOR_BYTES = 4
# Communicators of NCCL 2.30, whose allocations are multiples of 2 MiB. Each holds two: what kernels read, and ranks.
COMMUNICATOR_BYTES = 4 * 2**20
# Its tables of each channel, in three allocations: peers of the device, of the communicator, and the ring
# (`initChannel` in NCCL's src/channel.cc).
CHANNEL_BYTES = 6 * 2**20
# Buffers of a channel of a ring inside a machine: 9.2 MiB to receive in (protocols LL 0.5, LL128 4.7, Simple 4 MiB,
# src/init.cc), rounded up, and 2 MiB to send from (src/transport/p2p.cc; NVIDIA/nccl issue 1685 has both sizes).
PEER_BUFFER_BYTES = 12 * 2**20
# The same between machines where the network reads and writes GPU memory: 10 MiB each way (src/transport/net.cc).
NETWORK_BUFFER_BYTES = 20 * 2**20
# Channels: of a TP group by default, at most and over PCIe ("24 coll channels" in NCCL's logs of A100 and H100); the
# bounds that the executor states are of its group of all ranks, of a layout's groups, and of all groups together that
# sum a device's gradients, or carry its messages: none of them has fewer than so many, and a pair no more.
MOST_CHANNELS = 24
PCIE_CHANNELS = 4
WORLD_CHANNELS = 1
LAYOUT_CHANNELS = 8
SHARED_CHANNELS = 16
LEAST_CHANNELS = 2
PAIR_CHANNELS = 4
# Share of the transient memory that the caching allocator loses to fragments.
FRAGMENTATION = 0.05

COEFFICIENTS: dict[str, float] = {
    name: float(value) for name, value in sorted(globals().items()) if name.isupper() and isinstance(value, int | float)
}
