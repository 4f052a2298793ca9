"""What passes over the few rows of blocks compute faster on the CPU: linear layers, attention, a packed LM head."""

import copy
from typing import TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Model = TypeVar("Model", bound=nn.Module)

# Rows for which MKL multiplies weight by input faster than input by weight: a whole pass of a small model takes 1.05
# times less at 4 to 8 rows, 1.6 times less at 16. Up to 3 rows take its matrix-vector kernel, which is faster still.
FEW_ROWS = range(4, 49)


class FewRowsLinear(nn.Linear):
    """`nn.Linear` as W x^T where that is the faster of the two orders. The layers of `with_cpu_kernels`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        num_rows = input.numel() // max(input.shape[-1], 1)
        if num_rows not in FEW_ROWS or torch.is_autocast_enabled("cpu"):  # which casts the bias in linear only
            return super().forward(input)
        out = torch.mm(self.weight, input.reshape(num_rows, -1).T).T.contiguous()
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], -1)


SHARED_KV = "shared_kv_heads"  # no "flash" in it, which the drafter takes for kernels without masks


def shared_kv_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """transformers' sdpa attention, where it has a mask without its copy of keys and values for every query head.

    The copy pays on GPUs, whose fast kernels take masks and shared heads one at a time. On a CPU it takes longer than
    the attention: at 8 rows of 4 tokens over 300, with 3 K/V heads for 9, the whole takes a fifth of the time without.
    """
    odd = dropout or any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    if attention_mask is None or odd or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(SHARED_KV, shared_kv_attention)


def with_cpu_kernels(module: Model) -> Model:
    """A second object for the same module that is fast at few rows on the CPU; `module` stays as it is.

    Linear layers become `FewRowsLinear`, sdpa attention with shared K/V heads `shared_kv_attention`. Parameters,
    buffers and hooks are shared, not copied, so it costs no memory and follows their changes; modules and buffers that
    are added or replaced later are not. Layers that are not plain `nn.Linear` in float32 on the CPU are left as they
    are. transformers sets its hooks for hidden states on first use: let `module` return some before it has a twin, or
    both will set theirs.

    Example:
        >>> linear = nn.Linear(16, 64)
        >>> fast = with_cpu_kernels(linear)
        >>> fast.weight is linear.weight, torch.allclose(fast(torch.ones(5, 16)), linear(torch.ones(5, 16)), atol=1e-5)
        (True, True)
    """
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {
        name: None if child is None else with_cpu_kernels(child) for name, child in module._modules.items()
    }
    # RoPE that follows the length puts other frequencies in place of its own, and notes so in an attribute.
    twin.__dict__["_buffers"] = dict(module._buffers)
    # An own `forward` (offloading, compilation) stands in the object and goes on to call the original.
    plain = type(module) is nn.Linear and type(module.weight) is nn.Parameter and torch.backends.mkl.is_available()
    if plain and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
        twin.__class__ = FewRowsLinear  # type: ignore[assignment]  # the same attributes, another forward
    config = getattr(module, "config", None)
    if getattr(module, "num_key_value_groups", 1) > 1 and getattr(config, "_attn_implementation", None) == "sdpa":
        twin.__dict__["config"] = own = copy.copy(config)
        own._attn_implementation_internal = SHARED_KV  # this config's own, not that of configs inside it
    return twin


# Keyed by the weight: its packed copy, and the version of the weight that was packed.
_packed = WeakIdKeyDictionary()


class PackedHead:
    """`nn.Linear` for the CPU in float32 through oneDNN's packed weights, a second copy of the weight.

    Plain `F.linear` is slow at 4 to 12 rows: on two cores a head of 49152 x 576 takes 13 ms at 8 rows, packed 5 ms.
    The weight itself is not touched; one that changes is packed again, except through `.data`, which leaves no trace:
    see `forget`.

    Attributes:
        weight: the linear layer's own.

    Example:
        >>> linear = nn.Linear(16, 64)
        >>> head = PackedHead.of(linear)                                        # None where the kernel is missing
        >>> head is None or torch.allclose(head(torch.ones(3, 16)), linear(torch.ones(3, 16)), atol=1e-5)
        True
    """

    def __init__(self, linear: nn.Linear):
        self.weight, self.bias = linear.weight, linear.bias
        state = (self.weight.data_ptr(), self.weight._version)
        packed = _packed.get(self.weight)
        if packed is None or packed[0] != state:
            packed = state, torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
            _packed[self.weight] = packed
        self._packed = packed[1]

    @classmethod
    def of(cls, module: nn.Module | None) -> "PackedHead | None":
        """The packed form of a plain linear layer on the CPU in float32; None for any other head."""
        plain = type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks
        plain = plain and type(module.weight) is nn.Parameter  # quantized and distributed ones are subclasses
        if not plain or hasattr(module, "_hf_hook") or not torch.backends.mkldnn.is_available():
            return None
        weight = module.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.is_inference():
            return None
        return cls(module)  # type: ignore[arg-type]  # plain: an nn.Linear

    @staticmethod
    def forget(module: nn.Module) -> None:
        """Drop the packed copy of a layer's weight, if there is one."""
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            _packed.pop(module.weight, None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return out.view(*hidden.shape[:-1], -1)
