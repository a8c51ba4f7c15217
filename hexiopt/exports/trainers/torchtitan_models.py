"""The models with experts that torchtitan 0.3 trains, by shape, and the configurations that have them.

Shapes are those of `torchtitan/models/{deepseek_v3,gpt_oss,qwen3}/__init__.py`, functions those of `config_registry.py`
beside them (pytorch/torchtitan 902ac4a2). Not here: Kimi's, which train by Muon, and models that see (Qwen3.5).
"""

from dataclasses import dataclass, replace

from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind
from hexiopt.problem.model import ModelSpec


@dataclass(frozen=True)
class TitanModel:
    """A model by its shape: the `function` of `torchtitan.models.{module}` whose configuration has it or, with a
    `flavor`, has another of the same vocabulary, which the one of the registry under this name replaces."""

    module: str
    function: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerKind, ...]
    flavor: str | None = None

    def trains(self, model: ModelSpec) -> bool:
        """Whether a model has this shape, layers that predict further tokens aside."""
        sizes, form = (model.hidden_size, model.vocab_size), model.decoder_form
        if model.tied_embeddings or (form.norm, form.positions, form.head_bias) != ("rms", "rope", False):
            return False
        return sizes == (self.hidden_size, self.vocab_size) and model.layers == self.layers

    @property
    def imports(self) -> list[str]:
        """The lines that import the configuration as `base`."""
        package = f"from torchtitan.models.{self.module}"
        registry = [] if self.flavor is None else [f"{package} import model_registry"]
        return [*registry, f"{package}.config_registry import {self.function} as base"]


def _latent(heads: int, q_rank: int) -> Attention:
    return Attention(heads=heads, kv_heads=heads, qk_dim=192, v_dim=128, q_rank=q_rank, kv_rank=512, rope_dim=64)


def _deepseek(attention: Attention, dense: tuple[int, int], experts: tuple[int, Experts]) -> tuple[LayerKind, ...]:
    """Dense layers, of so many columns, then those with experts."""
    (num_dense, ffn_size), (num_sparse, part) = dense, experts
    first = LayerKind((attention,), (Dense(ffn_size=ffn_size),))
    return (first,) * num_dense + (LayerKind((attention,), (part,)),) * num_sparse


def _qwen(num_layers: int, heads: tuple[int, int], count: int, ffn_size: int) -> tuple[LayerKind, ...]:
    attention = Attention(heads=heads[0], kv_heads=heads[1], qk_dim=128, v_dim=128, qk_norm="head")
    return (LayerKind((attention,), (Experts(count=count, top_k=8, ffn_size=ffn_size),)),) * num_layers


def _gpt_oss(num_layers: int, count: int) -> tuple[LayerKind, ...]:
    full = Attention(heads=64, kv_heads=8, qk_dim=64, v_dim=64, bias=True, output_bias=True, sinks=True)
    experts = Experts(count=count, top_k=4, ffn_size=2880, bias=True, router_bias=True)
    kinds = [LayerKind((attention,), (experts,)) for attention in (replace(full, window=128), full)]
    return tuple(kinds[number % 2] for number in range(num_layers))


_16B = Experts(count=64, top_k=6, ffn_size=1408, shared=2816)
_236B = Experts(count=160, top_k=6, ffn_size=1536, shared=3072)
_671B = Experts(count=256, top_k=8, ffn_size=2048, shared=2048)
_DEBUG = Experts(count=8, top_k=3, ffn_size=256, shared=512)
MODELS = (
    TitanModel("deepseek_v3", "deepseek_v3_debugmodel", 256, 2048, _deepseek(_latent(16, 0), (1, 1024), (5, _DEBUG))),
    TitanModel("deepseek_v3", "deepseek_v3_16b", 2048, 102400, _deepseek(_latent(16, 0), (1, 10944), (26, _16B))),
    TitanModel(
        "deepseek_v3", "deepseek_v3_16b", 5120, 102400, _deepseek(_latent(128, 1536), (1, 12288), (59, _236B)), "236B"
    ),
    TitanModel("deepseek_v3", "deepseek_v3_671b", 7168, 129280, _deepseek(_latent(128, 1536), (3, 18432), (58, _671B))),
    TitanModel("qwen3", "qwen3_moe_debug", 256, 2048, _qwen(8, (16, 8), 64, 768)),
    TitanModel("qwen3", "qwen3_30b_a3b", 2048, 151936, _qwen(48, (32, 4), 128, 768)),
    TitanModel("qwen3", "qwen3_30b_a3b", 4096, 151936, _qwen(94, (64, 4), 128, 1536), "235B-A22B"),
    TitanModel("gpt_oss", "gpt_oss_debugmodel", 256, 2048, _gpt_oss(4, 8)),
    TitanModel("gpt_oss", "gpt_oss_20b", 2880, 201088, _gpt_oss(24, 32)),
    TitanModel("gpt_oss", "gpt_oss_120b", 2880, 201088, _gpt_oss(36, 128)),
)


def model_with_shape_of(model: ModelSpec) -> TitanModel | None:
    """The model of torchtitan that has the shape of `model`, layers that predict further tokens aside; None if none."""
    return next((titan for titan in MODELS if titan.trains(model)), None)
