"""The two caches of the decode loop: the drafter's context K/V, and the target's K/V while rows differ in length.

Both are keyed by slot, a fixed place a position: what a rejected draft left behind is overwritten or masked out, so
nothing is cropped, concatenated or shuffled.
"""

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def from_host(values, device) -> torch.Tensor:
    """A list of numbers (or a CPU tensor) on `device`, without making the host wait for a GPU's queue."""
    values = torch.as_tensor(values)
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def _room(num_slots: int) -> int:
    """How many slots to allocate when `num_slots` are needed: a quarter more, so that growing is rare."""
    return num_slots + max(64, num_slots // 4)


def _new(like: torch.Tensor, *shape: int) -> torch.Tensor:
    # Zeros, because a masked slot still meets a weight of 0, and 0 times what memory happens to hold may be nan.
    # An inference tensor could not be written to by a later turn outside inference mode.
    with torch.inference_mode(False):
        return like.new_zeros(shape)


class DFlashContextCache:
    """K/V of the context features, one growing buffer a layer; the block's K/V are overwritten by the next call.

    A drafter pass hands over the new context features' K/V followed by the block's. With one row, or rows that all
    take in equally many, they are written behind the `length` positions that are already there. Rows that differ are
    announced with `place`: every entry gets a slot of its own, and attention sees a row's `num_filled` first slots.

    Attributes:
        length: context positions kept so far; of the longest row where they differ.
        num_filled: `[B]` long, slots in use by context and block of each row; None where rows do not differ.

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
        self.num_filled: torch.Tensor | None = None
        self._past = 0
        self._slots: torch.Tensor | None = None
        self._num_visible = 0
        self._buffers: list[torch.Tensor | None] = [None] * num_layers

    def set_previous_accepted_tokens(self, number_of_accepted_tokens: int) -> None:
        """Say how many context positions come with the next pass (the name is transformers' DFlashCache's)."""
        self._past = self.length
        self.length += number_of_accepted_tokens
        self._slots = self.num_filled = None

    def place(self, slots: torch.Tensor, num_filled: list[int], length: int) -> None:
        """Say where the next pass's keys go.

        Args:
            slots: `[B, context + block]` long; entries that carry nothing point at the slot `max(num_filled)`.
            num_filled: slots of each row that then hold something.
            length: context positions of the longest row then.
        """
        self._past, self.length = self.length, length
        self._slots, self.num_filled = slots, from_host(num_filled, slots.device)
        self._num_visible = max(num_filled)

    def get_seq_length(self) -> int:
        """Context positions that were there before the ones that come with the next (or present) pass."""
        return self._past

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Go on with these rows (`[n]` long) only."""
        self._buffers = [None if buffer is None else buffer[:, rows] for buffer in self._buffers]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K/V `[B, H_kv, context + block, head_dim]`; return all K and V `[B, H_kv, total, head_dim]`."""
        total = self._past + keys.shape[2] if self._slots is None else self._num_visible
        buffer = self._buffers[layer_idx]
        if buffer is None or buffer.shape[3] <= total:
            grown = _new(keys, 2, keys.shape[0], keys.shape[1], _room(total + 1), keys.shape[3])
            if buffer is not None:
                grown[:, :, :, : buffer.shape[3]] = buffer
            self._buffers[layer_idx] = buffer = grown
        if self._slots is None:
            buffer[0, :, :, self._past : total] = keys
            buffer[1, :, :, self._past : total] = values
        else:
            rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
            buffer[0][rows, :, self._slots] = keys.transpose(1, 2)
            buffer[1][rows, :, self._slots] = values.transpose(1, 2)
        return buffer[0, :, :, :total], buffer[1, :, :, :total]


class SlotLayer(DynamicLayer):
    """One layer of the target's cache while drafts are checked: K/V `[B, H_kv, slots, head_dim]`, written in place.

    A full-attention layer keeps every column in the slot of its number. A sliding layer is a ring: column c lies in
    slot c modulo its size, window + block, which is large enough that a rejected draft only ever replaces a column
    that no later query sees.

    Args:
        layer: a `DynamicLayer` or `DynamicSlidingWindowLayer` that holds the prompt's K/V.
        num_columns: columns the prompt has.
        block_size: columns a pass adds at most.
    """

    def __init__(self, layer: DynamicLayer, num_columns: int, block_size: int):
        super().__init__()
        self.window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        self.is_sliding = self.window is not None
        self.ring = None if self.window is None else self.window + block_size
        self.original = layer
        self.is_initialized, self.device = True, layer.keys.device
        size = _room(num_columns) if self.ring is None else self.ring
        held = min(layer.keys.shape[2], size)  # a sliding layer holds the last columns only
        self._keys = _new(layer.keys, *layer.keys.shape[:2], size, layer.keys.shape[3])
        self._values = _new(layer.values, *layer.values.shape[:2], size, layer.values.shape[3])
        slots = torch.arange(num_columns - held, num_columns, device=self.device)
        if self.ring is not None:
            slots = slots % self.ring
        self._keys[:, :, slots] = layer.keys[:, :, layer.keys.shape[2] - held :]
        self._values[:, :, slots] = layer.values[:, :, layer.values.shape[2] - held :]
        self._columns: torch.Tensor | None = None
        self._first: int | None = None
        self._total = num_columns

    def expect(self, columns: torch.Tensor, first: int | None, total: int) -> None:
        """Say where the next pass writes.

        Args:
            columns: `[B, L]` long, consecutive in each row.
            first: the first column where all rows have the same, else None.
            total: one more than the largest column.
        """
        self._columns, self._first, self._total = columns, first, total

    def update(self, key_states, value_states, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pass's K/V; returns all slots in use."""
        size, length = self._keys.shape[2], key_states.shape[2]
        if self.ring is None and size < self._total:
            for name in ("_keys", "_values"):
                old = getattr(self, name)
                grown = _new(old, *old.shape[:2], _room(self._total), old.shape[3])
                grown[:, :, :size] = old
                setattr(self, name, grown)
        start = self._first if self.ring is None or self._first is None else self._first % self.ring
        if start is not None and (self.ring is None or start + length <= self.ring):
            self._keys[:, :, start : start + length] = key_states
            self._values[:, :, start : start + length] = value_states
        else:
            slots = self._columns if self.ring is None else self._columns % self.ring
            rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
            self._keys[rows, :, slots] = key_states.transpose(1, 2)
            self._values[rows, :, slots] = value_states.transpose(1, 2)
        num_slots = self.num_slots
        return self._keys[:, :, :num_slots], self._values[:, :, :num_slots]

    @property
    def num_slots(self) -> int:
        """Slots that attention reads in this pass."""
        return self._total if self.ring is None else min(self._total, self.ring)

    def visible(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which column each query may see: `[B, L, num_slots]` bool for the causal part, and the columns themselves.

        Returns:
            visible `[B, L, num_slots]` bool, and the column that each slot holds `[B or 1, num_slots]` long (below 0:
            none yet).
        """
        queries = self._columns[:, :, None]
        columns = torch.arange(self.num_slots, device=queries.device)[None]
        if self.ring is not None:
            last = self._columns[:, -1:]
            columns = last - (last - columns) % self.ring  # the newest column at or before `last` of that remainder
        seen = columns[:, None] <= queries
        if self.window is not None:
            seen = seen & (columns[:, None] > queries - self.window)
        return seen, columns

    def get_seq_length(self) -> int:
        return self._total

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_slots, 0

    def keep_rows(self, rows: torch.Tensor) -> None:
        self._keys, self._values = self._keys[rows], self._values[rows]

    def columns_of(self, row: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[H_kv, n, head_dim]` of a row's columns below `stop`: all, or the last window - 1."""
        if self.ring is None:
            return self._keys[row, :, :stop], self._values[row, :, :stop]
        slots = torch.arange(max(stop - self.window + 1, 0), stop, device=self._keys.device) % self.ring
        return self._keys[row][:, slots], self._values[row][:, slots]

    def restore(self, rows: list[tuple[torch.Tensor, torch.Tensor]], stops: list[int]) -> DynamicLayer:
        """transformers' own layer again, filled with what `columns_of` gave for each row; zeros behind shorter rows.

        Args:
            rows: K and V of each row, up to the row's own end.
            stops: that end, in columns.
        """
        layer, num_columns = self.original, max(stops)
        if self.window is not None:
            layer.cumulative_length = num_columns
        if len(rows) == 1:
            layer.keys, layer.values = rows[0][0][None], rows[0][1][None]
            return layer
        first = 0 if self.window is None else max(num_columns - self.window + 1, 0)
        filled = []
        for which in (0, 1):
            heads, _, dim = rows[0][which].shape
            whole = rows[0][which].new_zeros(len(rows), heads, num_columns - first, dim)
            for i, (row, stop) in enumerate(zip(rows, stops, strict=True)):
                kept = max(stop - first, 0)
                whole[i][:, :kept] = row[which][:, row[which].shape[1] - kept :]
            filled.append(whole)
        layer.keys, layer.values = filled
        return layer
