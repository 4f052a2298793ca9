"""Matrix products on the CPU for the few rows that blocks have: no copy for linear layers, a packed LM head."""

from typing import TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Model = TypeVar("Model", bound=nn.Module)

# Rows for which MKL multiplies weight by input faster than input by weight: a whole pass of a small model takes 1.05
# times less at 4 to 8 rows, 1.6 times less at 16. Up to 3 rows take its matrix-vector kernel, which is faster still.
FEW_ROWS = range(4, 49)


class FewRowsLinear(nn.Linear):
    """`nn.Linear` as W x^T where that is the faster of the two orders. The layers of `with_few_rows_kernels`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        num_rows = input.numel() // max(input.shape[-1], 1)
        if num_rows not in FEW_ROWS or torch.is_autocast_enabled("cpu"):  # which casts the bias in linear only
            return super().forward(input)
        out = torch.mm(self.weight, input.reshape(num_rows, -1).T).T.contiguous()
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], -1)


def with_few_rows_kernels(module: Model) -> Model:
    """A second object for the same module whose linear layers are fast at 4 to 48 rows; `module` stays as it is.

    Parameters, buffers and hooks are shared, not copied, so it costs no memory and follows their changes; modules that
    are added or replaced later are not. Layers that are not plain `nn.Linear` in float32 on the CPU are left as they
    are. transformers sets its hooks for hidden states on first use: let `module` return some before it has a twin, or
    both will set theirs.

    Example:
        >>> linear = nn.Linear(16, 64)
        >>> fast = with_few_rows_kernels(linear)
        >>> fast.weight is linear.weight, torch.allclose(fast(torch.ones(5, 16)), linear(torch.ones(5, 16)), atol=1e-5)
        (True, True)
    """
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {
        name: None if child is None else with_few_rows_kernels(child) for name, child in module._modules.items()
    }
    # An own `forward` (offloading, compilation) stands in the object and goes on to call the original.
    plain = type(module) is nn.Linear and torch.backends.mkl.is_available()
    if plain and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
        twin.__class__ = FewRowsLinear  # type: ignore[assignment]  # the same attributes, another forward
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
