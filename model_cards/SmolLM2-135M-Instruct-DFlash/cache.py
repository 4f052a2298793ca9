"""The drafter's cache: keys and values of the context features, and room behind them for one block."""

import torch


class DFlashContextCache:
    """K/V of the context features, one growing buffer a layer; the block's K/V are overwritten by the next call.

    A drafter pass hands over the new context features' K/V followed by the block's. Both are written behind the
    `length` positions that are already there, attention reads one contiguous view of everything, and only the context
    part is kept. Nothing is concatenated; a full buffer doubles.

    Attributes:
        length: context positions kept so far.

    Example:
        >>> cache = DFlashContextCache(num_layers=1)
        >>> cache.set_previous_accepted_tokens(3)                     # 3 context positions come with this pass
        >>> k = torch.randn(1, 2, 3 + 8, 16)                          # [B, H_kv, context + block, head_dim]
        >>> cache.update(k, k, layer_idx=0)[0].shape
        torch.Size([1, 2, 11, 16])
        >>> cache.length
        3
    """

    def __init__(self, num_layers: int):
        self.length = 0
        self._past = 0
        self._buffers: list[torch.Tensor | None] = [None] * num_layers

    def set_previous_accepted_tokens(self, number_of_accepted_tokens: int) -> None:
        """Say how many context positions come with the next pass (the name is transformers' DFlashCache's)."""
        self._past = self.length
        self.length += number_of_accepted_tokens

    def get_seq_length(self) -> int:
        """Context positions that were there before the ones that come with the next (or present) pass."""
        return self._past

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K/V `[B, H_kv, context + block, head_dim]`; return all K and V `[B, H_kv, total, head_dim]`."""
        past, total = self._past, self._past + keys.shape[2]
        buffer = self._buffers[layer_idx]
        if buffer is None or buffer.shape[3] < total:
            capacity = max(256, 2 * total)
            # An inference tensor could not be written to by a later turn outside inference mode.
            with torch.inference_mode(False):
                grown = keys.new_empty(2, keys.shape[0], keys.shape[1], capacity, keys.shape[3])
            if buffer is not None:
                grown[:, :, :, :past] = buffer[:, :, :, :past]
            self._buffers[layer_idx] = buffer = grown
        buffer[0, :, :, past:total] = keys
        buffer[1, :, :, past:total] = values
        return buffer[0, :, :, :total], buffer[1, :, :, :total]
