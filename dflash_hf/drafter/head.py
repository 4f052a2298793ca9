"""The target's LM head, repacked once for a CPU kernel that is fast at the few rows a block has."""

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# Keyed by the weight: its packed copy, and the version of the weight that was packed.
_packed = WeakIdKeyDictionary()


class PackedHead:
    """`nn.Linear` for the CPU in float32 through oneDNN's packed weights, a second copy of the weight.

    Plain `F.linear` is slow at 4 to 12 rows: on two cores a head of 49152 x 576 takes 13 ms at 8 rows, packed 5 ms.
    The weight itself is not touched; one that changes is packed again.

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

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return out.view(*hidden.shape[:-1], -1)
