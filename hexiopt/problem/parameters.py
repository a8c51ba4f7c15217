"""Which parameters of a model are trained, which stay frozen, and their bytes: memory, gradient rings and optimizer
steps count these."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hexiopt.numbers.optimizers import ADAMW, OPTIMIZERS, StateBytes, orthogonal_flops
from hexiopt.problem.kinds import LayerKind
from hexiopt.problem.lora import Lora
from hexiopt.problem.model import ModelSpec, largest_shard
from hexiopt.problem.operators import Holder, ParameterGroup, Shard, Split
from hexiopt.problem.workload import Workload


class Matrix(NamedTuple):
    """A matrix of a layer by the name that `TARGETS` lists: its inputs and outputs, one of which a TP group cuts."""

    target: str
    inputs: Split
    outputs: Split


class FrozenGroup(NamedTuple):
    """Parameters that are not trained: those of a model's group, bytes of an element of its matrices, and of others."""

    group: ParameterGroup
    matrix_bytes: float
    vector_bytes: float

    def bytes_on(self, shard: Shard) -> float:
        """Bytes on a rank that holds `shard`; the most of any rank."""
        vectors = self.group.vectors.on(shard)
        return (self.group.split.on(shard) - vectors) * self.matrix_bytes + vectors * self.vector_bytes


@dataclass(frozen=True)
class Parameters:
    """The parameters of `model` under `workload`.

    Of a low-rank adapter of a matrix that TP cuts by its outputs, every rank holds the first matrix whole and its part
    of the second; of one cut by its inputs, its part of the first and the second whole. Ranks sum the gradients of
    whole matrices as those of norms.
    """

    model: ModelSpec
    workload: Workload

    @cached_property
    def trained_groups(self) -> tuple[ParameterGroup, ...]:
        """Groups of trained parameters: all of the model, or the adapters of each kind of layers."""
        lora, model = self.workload.adapters, self.model
        if lora is None:
            return model.parameter_groups
        groups = []
        for number, kind in enumerate(model.kinds):
            ends = [end for matrix in adapted_matrices(model, kind, lora) for end in matrix[1:]]
            split = Split(*(lora.rank * sum(column) for column in zip(Split(), *ends, strict=True)))
            layers = tuple([n for n, of_layer in enumerate(model.depth) if of_layer == number])
            whole = split.on(model.layer_of(kind).shard(1, 0))
            of_kind = layers if len(model.kinds) > 1 else None
            groups.append(ParameterGroup("layer", whole, split, kind=number, layers=of_kind))
        return tuple(groups)

    @cached_property
    def frozen_groups(self) -> tuple[FrozenGroup, ...]:
        """Groups of frozen parameters: none, or all of the model. Embedding and LM head are never quantised."""
        lora, width = self.workload.adapters, float(self.workload.element_bytes)
        if lora is None:
            return ()
        matrix = lora.frozen_storage.element_bytes or width
        groups = self.model.parameter_groups
        return tuple(FrozenGroup(group, matrix if group.holder == "layer" else width, width) for group in groups)

    def params_of(self, *holders: Holder) -> int:
        """Trained parameters of all groups that any of `holders` holds, of the mean layer where layers are of several
        kinds."""
        counts = ((group, self._count(group)) for group in self.trained_groups if group.holder in holders)
        return round(sum(group.params * count / self._units(group) for group, count in counts))

    def _units(self, group: ParameterGroup) -> int:
        """Layers, of a group that layers hold, else 1."""
        return self.model.num_layers if group.holder == "layer" else 1

    def _count(self, group: ParameterGroup) -> int:
        """Units that hold such a group."""
        return self._units(group) if group.layers is None else len(group.layers)

    @property
    def layer_params(self) -> int:
        """Trained parameters of a layer."""
        return self.params_of("layer")

    @property
    def first_params(self) -> int:
        """Trained parameters that only first stages hold."""
        return self.params_of("first")

    @property
    def last_params(self) -> int:
        """Trained parameters that only last stages hold."""
        return self.params_of("last")

    @property
    def tied_params(self) -> int:
        """Trained parameters that first and last stages hold together."""
        return self.params_of("ends")

    @property
    def num_trained_params(self) -> int:
        """All trained parameters."""
        return self.model.num_layers * self.layer_params + self.params_of("first", "last", "ends")

    @property
    def bytes(self) -> float:
        """Bytes of all states, unsharded: weights, gradients, master weights, moments and what is frozen."""
        states: Mapping[bool, StateBytes] = {True: self.workload.states, False: self.end_states}
        trained = sum(
            self._count(group) * group.params * states[group.holder == "layer"].total for group in self.trained_groups
        )
        whole = largest_shard(self.model, 1)
        return trained + sum(self._count(row.group) * row.bytes_on(whole) for row in self.frozen_groups)

    @property
    def in_words(self) -> str | None:
        """What is trained and by which optimizer; None for the whole model by AdamW."""
        lora, optimizer = self.workload.adapters, self.workload.optimizer
        by = "" if optimizer == ADAMW else f"by {optimizer}"
        if lora is None:
            return f"full, {by}" if by else None
        trained = f"{self.num_trained_params / 1e6:.3g} M parameters trained"
        return f"{lora}: {trained} {by}".rstrip()

    @property
    def end_states(self) -> StateBytes:
        """Bytes of a trained parameter of embedding and LM head, which may have another optimizer than layers."""
        kind = OPTIMIZERS[self.workload.optimizer]
        states = self.workload.states
        return states if kind.ends is None else OPTIMIZERS[kind.ends].states(int(states.weight), int(states.gradient))

    @property
    def flops_per_token(self) -> int:
        """FLOPs per token that training takes, without recompute; these define MFU.

        Frozen matrices take two passes, of the forward and of the gradient of their input, where trained ones take
        three; adapters take three, attention as ever; nothing flows back into a frozen embedding.
        """
        model, seq_len = self.model, self.workload.seq_len
        lora = self.workload.adapters
        if lora is None:
            return model.model_flops_per_token(seq_len)
        layer = 2 * model.layer_gemm_flops_per_token + 3 * model.attention_flops_per_token(seq_len)
        layer += 6 * self.layer_params
        return model.num_layers * layer + model.embedding_flops_per_token + 2 * model.head_flops_per_token

    def orthogonal_flops(self) -> tuple[float, ...]:
        """FLOPs of each matrix product by which the optimizer makes what it adds to a layer's matrices orthogonal."""
        model, of_step = self.model, OPTIMIZERS[self.workload.optimizer]
        (kind,) = model.kinds if of_step.products else model.kinds[:1]
        whole = model.layer_of(kind).shard(1, 0)
        shapes = [(row.inputs.on(whole), row.outputs.on(whole)) for row in layer_matrices(model, kind)]
        return tuple(flops for shape in shapes for flops in orthogonal_flops(*shape)) * of_step.products


def layer_matrices(model: ModelSpec, kind: LayerKind) -> tuple[Matrix, ...]:
    """The matrices of a layer that may have an adapter, in the order of `TARGETS`: projections of attention, of the MLP
    and of shared experts.

    There are none of recurrences, latent vectors, routers and routed experts. Of models with experts those of attention
    alone have one (`Problem`).
    """
    rows, hidden = list[Matrix](), Split(whole=model.hidden_size)
    if (part := kind.attention) is not None:
        queries = Split(heads=part.qk_dim * (1 + part.gated))
        keys, values = Split(kv_heads=part.qk_dim), Split(kv_heads=part.v_dim)
        if not part.q_rank:
            rows.append(Matrix("q", hidden, queries))
        if not part.kv_rank:
            rows += [Matrix("k", hidden, keys), Matrix("v", hidden, values)][: 1 if part.keys_are_values else 2]
        rows.append(Matrix("o", Split(heads=part.v_dim), hidden))
    for columns, is_gated in _columns(kind):
        rows += [Matrix("gate", hidden, columns)] * is_gated
        rows += [Matrix("up", hidden, columns), Matrix("down", columns, hidden)]
    return tuple(rows)


def _columns(kind: LayerKind) -> Iterator[tuple[Split, bool]]:
    """Columns of the MLP and of the shared experts of a layer, and whether they are gated."""
    if kind.dense is not None:
        yield Split(ffn=1), kind.dense.gated
    if kind.experts is not None and kind.experts.shared:
        yield Split(shared=1), kind.experts.gated


def adapted_matrices(model: ModelSpec, kind: LayerKind, lora: Lora) -> tuple[Matrix, ...]:
    """Those of `layer_matrices` that have an adapter."""
    return tuple([row for row in layer_matrices(model, kind) if row.target in lora.matrices])
