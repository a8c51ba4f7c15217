"""A decoder layer of torch's own modules, to compare ours with: samples come first."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hexiopt.problem.model import ModelSpec


class _Attention(nn.Module):
    def __init__(self, model: ModelSpec, seq_len: int) -> None:
        super().__init__()
        inner, of_kv = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
        self.q_proj = nn.Linear(model.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(model.hidden_size, of_kv, bias=False)
        self.v_proj = nn.Linear(model.hidden_size, of_kv, bias=False)
        self.o_proj = nn.Linear(inner, model.hidden_size, bias=False)
        self._head_dim = model.head_dim
        steps = torch.arange(0, model.head_dim, 2, dtype=torch.int64).to(torch.float32)
        angle = torch.arange(seq_len, dtype=torch.float32)[:, None] / model.rope_theta ** (steps / model.head_dim)
        both = torch.cat([angle, angle], dim=-1)
        self._cos, self._sin = both.cos(), both.sin()

    def forward(self, x_bth: Tensor) -> Tensor:
        q, k, v = (
            project(x_bth).unflatten(-1, (-1, self._head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = self._rotate(q), self._rotate(k)
        out_bntd = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended: Tensor = self.o_proj(out_bntd.transpose(1, 2).flatten(2))
        return attended

    def _rotate(self, x_bntd: Tensor) -> Tensor:
        """Rotary position embedding, as in transformers."""
        left, right = x_bntd.chunk(2, dim=-1)
        return x_bntd * self._cos + torch.cat([-right, left], dim=-1) * self._sin


class _Mlp(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down_proj = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, x_bth: Tensor) -> Tensor:
        out_bth: Tensor = self.down_proj(functional.silu(self.gate_proj(x_bth)) * self.up_proj(x_bth))
        return out_bth


class StockLayer(nn.Module):
    """Attention and gated MLP, each after its norm and beside a residual."""

    def __init__(self, model: ModelSpec, seq_len: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.self_attn = _Attention(model, seq_len)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.mlp = _Mlp(model)

    def forward(self, x_bth: Tensor) -> Tensor:
        """Hidden states [B, T, H] after the layer."""
        x_bth = x_bth + self.self_attn(self.input_layernorm(x_bth))
        out_bth: Tensor = x_bth + self.mlp(self.post_attention_layernorm(x_bth))
        return out_bth
