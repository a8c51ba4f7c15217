"""The kernels that attention asks for: by name where a device fuses it, whatever torch chooses elsewhere."""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from hexiopt.errors import InputError
from runtime import device
from runtime.device import fused_attention, take_attention

CPU = torch.device("cpu")


def attend(q: torch.Tensor) -> torch.Tensor:
    with fused_attention(q.device, q.dtype, q.shape[-1]):
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_elsewhere_torch_chooses() -> None:
    q = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    assert torch.equal(attend(q), functional.scaled_dot_product_attention(q, q, q, is_causal=True))


def test_it_compiles_to_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice among kernels by priority too, which a CPU takes as any."""
    q = torch.randn(1, 2, 6, 8)
    wanted = attend(q)
    monkeypatch.setattr(device, "has_flash_attention", lambda *facts: True)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q), wanted)


@pytest.mark.parametrize(
    ("active", "kernels"),
    [(None, [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]), ("FA3", [SDPBackend.FLASH_ATTENTION])],
)
def test_a_gpu_is_asked_for_fused_kernels_alone(
    monkeypatch: pytest.MonkeyPatch, active: str | None, kernels: list[SDPBackend]
) -> None:
    monkeypatch.setattr(device, "has_flash_attention", lambda *facts: True)
    monkeypatch.setattr(device, "current_flash_attention_impl", lambda: active)
    with fused_attention(CPU, torch.bfloat16, 64):
        assert torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)[: len(kernels)] == kernels
        assert not torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()


def test_other_kernels_must_be_there() -> None:
    take_attention("auto", CPU)
    with pytest.raises(InputError, match=r"train\.attention: fa3 needs a GPU, .*; take auto"):
        take_attention("fa3", CPU)
    with pytest.raises(InputError, match=r"train\.attention: fa3 cannot be loaded \(No module named .*; .* take auto"):
        take_attention("fa3", torch.device("cuda", 0))
