"""How the target checks a block and takes rejected drafts back: in slots, by cropping, or by running again.

`SlotPass` serves any number of rows and is what the listed families get. `CropPass` serves one row of any target whose
cache transformers can crop, `ReplayPass` one row of a target with a recurrent state.
"""

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from .cache import SlotLayer, from_host
from .kernels import with_cpu_kernels

# Families whose masks `SlotPass` can make, each tested: a mask for each layer type, or a single one for all layers.
ONE_MASK_EACH_TYPE = ("gemma2", "gemma3_text", "gpt_oss", "qwen2", "qwen2_5_vl", "qwen3", "smollm3")
ONE_MASK = ("gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen3_moe")

# Hybrid families whose recurrent layers continue exactly from a state over several tokens (Bamba's and Jamba's do not
# in transformers 5.24), each tested.
REPLAYED = ("falcon_h1", "granitemoehybrid", "qwen3_5_text", "qwen3_next")

_OWN_INPUTS = ("attention_mask", "position_ids", "cache", "inputs_embeds", "input_ids", "token_type_ids",
               "mm_token_type_ids", "output_hidden_states", "logits_to_keep", "labels",
               *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)  # fmt: skip


def why_not_slots(target, cache) -> str | None:
    """Why `SlotPass` cannot serve this target and cache; None where it can."""
    kind, attention = target.config.model_type, target.config.get_text_config()._attn_implementation
    if kind not in ONE_MASK_EACH_TYPE + ONE_MASK:
        return f"the masks of {kind} targets are not known"
    if attention not in ("sdpa", "eager"):
        return f"{attention} takes no masks that differ by row"
    expected = [type(layer) for layer in DynamicCache(config=target.config).layers]
    found = [type(layer) for layer in cache.layers] or [DynamicLayer] * len(expected)  # layers are made on first use
    if getattr(cache, "offloading", False):
        return "rows of other lengths need a cache on the device, this one is offloaded"
    if found != expected:
        return f"rows of other lengths need a DynamicCache(config=target.config), got a {type(cache).__name__}"
    return None


class SlotPass:
    """The target's passes over rows of different lengths, K/V in `SlotLayer`s and masks made from columns.

    Args:
        target: a causal LM of a listed family.
        cache: its cache, holding the prompt.
        model_kwargs: of the generate call, as they were for the prefill.
        num_ids: columns of the ids; the cache may hold more (of an earlier turn, or of embeddings).
        max_length: no id is written at this column or behind it.
        block_size: most tokens that a pass takes.
    """

    def __init__(self, target, cache, model_kwargs, num_ids: int, max_length: int, block_size: int):
        # The prefill went through the target, so its hooks for hidden states are there for the twin to share.
        self.target, self.twin, self.cache = target, with_cpu_kernels(target), cache
        self.num_columns = int(cache.get_seq_length())
        self.offset = self.num_columns - num_ids  # from a column of the ids to one of the cache
        mask = model_kwargs.get("attention_mask")
        self.prompt_mask = None if mask is None or bool(mask.all()) else mask.bool()
        position_ids = model_kwargs.get("position_ids")
        if position_ids is None:
            batch = 1 if mask is None else mask.shape[0]
            last = torch.full((batch,), self.num_columns) if mask is None else mask.sum(-1)
            position_ids = (last.to(cache.layers[0].keys.device) - 1)[:, None]
        num_rows = cache.layers[0].keys.shape[0]
        self.last_position = position_ids[..., -1:]  # of the prompt [..., B, 1]
        self.last_position = self.last_position.expand(*self.last_position.shape[:-2], num_rows, 1)
        self.last_column = max_length - 1 + self.offset
        self.by_type = target.config.model_type in ONE_MASK_EACH_TYPE
        self.additive = target.config.get_text_config()._attn_implementation == "eager"
        self.inputs = {k: v for k, v in model_kwargs.items() if k not in _OWN_INPUTS}
        # GPT-2 embeds them, and plain `generate()` gives every new token the last one's.
        types = model_kwargs.get("token_type_ids") if target.config.model_type == "gpt2" else None
        self.token_types = None if types is None else types[:, -1:]  # [B, 1]
        slots: list[SlotLayer] = []
        try:
            for layer in cache.layers:
                slots.append(SlotLayer(layer, self.num_columns, block_size))
                layer.keys = layer.values = None  # one copy is enough; `close` gives them back
        except BaseException:  # no memory: the user's cache keeps the prompt
            for slot in slots:
                rows = [slot.columns_of(row, self.num_columns) for row in range(num_rows)]
                slot.restore(rows, [self.num_columns] * num_rows)
            raise
        cache.layers[:] = slots
        self.left: dict[int, list] = {}  # K/V of rows that are finished, by row of the call

    def run(self, block: torch.Tensor, starts: list[int], **inputs):
        """The target's outputs on `block` `[B, L]`, whose rows begin at the columns `starts` of the ids."""
        length, device = block.shape[1], block.device
        first = starts[0] + self.offset if min(starts) == max(starts) else None
        columns = from_host(starts, device)[:, None] + self.offset + torch.arange(length, device=device)
        total = max(starts) + self.offset + length
        for layer in self.cache.layers:
            layer.expect(columns.to(layer.device), first, total)
        # Columns behind the length limit carry nothing that will be used, but a learned position must exist.
        position_ids = self.last_position + columns.clamp_max(self.last_column) - (self.num_columns - 1)
        if self.token_types is not None:
            inputs["token_type_ids"] = self.token_types.expand(-1, length)
        with self.twin._optimize_model_for_decode():
            return self.twin(
                input_ids=block,
                attention_mask=self._masks(length, first, total),
                position_ids=position_ids,
                cache=self.cache,
                **self.inputs,
                **inputs,
                return_dict=True,
            )

    def _masks(self, length: int, first: int | None, total: int):
        masks = {layer.window: layer for layer in self.cache.layers}
        # Families with one mask get None too; from a window's width on they would make their own of it, which counts
        # this pass's column as held before it and hides the first one.
        in_sight = all(window is None or total < window for window in masks)
        if length == 1 and first is not None and self.prompt_mask is None and in_sight:
            # A token that sees every slot needs no mask, and kernels are faster without: K/V heads stay shared.
            return {"full_attention": None, "sliding_attention": None} if self.by_type else None
        masks = {window: self._mask(layer) for window, layer in masks.items()}
        if not self.by_type:
            return next(iter(masks.values()))
        sliding = next((mask for window, mask in masks.items() if window is not None), None)
        return {"full_attention": masks.get(None), "sliding_attention": sliding}

    def _mask(self, layer: SlotLayer) -> torch.Tensor:
        visible, columns = layer.visible()
        if self.prompt_mask is not None:
            prompt = self.prompt_mask.to(visible.device)
            width = prompt.shape[1]
            shown = prompt.gather(1, columns.clamp(0, width - 1).expand(prompt.shape[0], -1)) | (columns >= width)
            visible = visible & shown[:, None]
        if self.prompt_mask is not None or layer.ring is not None:
            visible = visible & (columns >= 0)[:, None]
        visible = visible[:, None]
        if not self.additive:
            return visible
        dtype = self.target.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )

    def commit(self, counts: list[int], length: int) -> None:
        """Nothing to take back: rejected drafts lie in slots that are written again or masked."""

    def leave(self, rows: dict[int, tuple[int, int]], keep: torch.Tensor) -> None:
        """Rows that are finished go: `{row of the call: (row of the batch, its length)}`, `keep` `[n]` long stay."""
        for row, (index, length) in rows.items():
            self._remember(row, index, length)
            # Not views: they would keep the whole batch's buffers.
            self.left[row][1] = [(keys.clone(), values.clone()) for keys, values in self.left[row][1]]
        for layer in self.cache.layers:
            layer.keep_rows(keep.to(layer.device))
        self.last_position = self.last_position.index_select(-2, keep.to(self.last_position.device))
        if self.prompt_mask is not None:
            self.prompt_mask = self.prompt_mask[keep]
        if self.token_types is not None:
            self.token_types = self.token_types[keep]

    def _remember(self, row: int, index: int, length: int) -> None:
        # The last token has not been through the target; before the first one came, the prompt has.
        stop = max(length + self.offset - 1, self.num_columns)
        self.left[row] = [stop, [layer.columns_of(index, stop) for layer in self.cache.layers]]

    def close(self, rows: dict[int, tuple[int, int]]) -> None:
        """Give the cache back as transformers knows it; `rows` as in `leave`, of those that are still here."""
        for row, (index, length) in rows.items():
            self._remember(row, index, length)
        order = sorted(self.left)
        stops = [self.left[row][0] for row in order]
        for i, layer in enumerate(self.cache.layers):  # one by one, so that only one of them is there twice
            self.cache.layers[i] = layer.restore([self.left[row][1][i] for row in order], stops)
            for row in order:
                self.left[row][1][i] = None


def _extend(model_kwargs: dict, count: int) -> dict:
    """The kwargs of a pass over `count` tokens more than have been committed."""
    extended = dict(model_kwargs)
    for key in ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"):
        value = model_kwargs.get(key)
        if value is None or count == 0:
            continue
        last = value[..., -1:]
        if key == "position_ids":
            more = last + torch.arange(1, count + 1, device=value.device)
        elif key == "attention_mask":
            more = value.new_ones(*value.shape[:-1], count)
        elif key == "mm_token_type_ids":
            more = value.new_zeros(*value.shape[:-1], count)  # generated tokens are text
        else:
            more = last.expand(*value.shape[:-1], count)
        extended[key] = torch.cat([value, more], dim=-1)
    return extended


class CropPass:
    """One row of any target: the cache, its masks and its inputs are the target's own, rejected drafts are cropped.

    Args:
        target: a causal LM.
        cache: its cache, holding the prompt.
        model_kwargs: of the generate call, as they were for the prefill.
        generation_config: of the call; says whether the forward pass is to be compiled (static caches).
    """

    def __init__(self, target, cache, model_kwargs, generation_config):
        self.target, self.cache, self.model_kwargs = target, cache, dict(model_kwargs)
        self.num_columns = int(cache.get_seq_length())
        self.forward = target.__call__
        if target._valid_auto_compile_criteria(model_kwargs, generation_config):
            self.forward = target.get_compiled_call(generation_config.compile_config)
        self._num_committed = 0

    def run(self, block: torch.Tensor, starts: list[int], **inputs):
        """The target's outputs on `block` `[1, L]`, which begins at the last committed token."""
        model_kwargs = {**_extend(self.model_kwargs, block.shape[1] - 1), **inputs}
        model_inputs = self.target.prepare_inputs_for_generation(
            block, next_sequence_length=block.shape[1], is_first_iteration=False, **model_kwargs
        )
        if "logits_to_keep" in model_inputs and "logits_to_keep" not in inputs:
            model_inputs["logits_to_keep"] = block.shape[1]
        with self.target._optimize_model_for_decode():
            return self.forward(**model_inputs)

    def commit(self, counts: list[int], length: int) -> None:
        """Keep the first `counts[0]` positions of the pass's `length`."""
        self.cache.crop(-(length - counts[0]))
        self.model_kwargs = _extend(self.model_kwargs, counts[0])
        self._num_committed += counts[0]

    def close(self, rows) -> None:
        """Leave committed positions only, also in layers that a pass which broke off had filled already."""
        for layer in self.cache.layers:
            if hasattr(layer, "get_seq_length"):
                extra = int(layer.get_seq_length()) - (self.num_columns + max(self._num_committed - 1, 0))
            else:  # a convolution: states beyond its kernel are the pass's
                extra = layer.conv_states[0].shape[-1] - layer.conv_kernel_size[0]
            if extra > 0:
                layer.crop(-extra)


class ReplayPass(CropPass):
    """One row of a hybrid target: after a rejection its state is put back and the accepted tokens run once more.

    Arguments are those of `CropPass`. A pass that accepts all of its drafts costs nothing more.
    """

    def run(self, block: torch.Tensor, starts: list[int], **inputs):
        self._before = _snapshot(self.cache)
        self._last = block, starts, inputs
        return super().run(block, starts, **inputs)

    def commit(self, counts: list[int], length: int) -> None:
        """Keep the first `counts[0]` positions of the pass's `length`."""
        if counts[0] < length:
            block, starts, inputs = self._last
            _put_back(self.cache, self._before)
            super().run(block[:, : counts[0]], starts, **inputs)
        self._before = None
        self.model_kwargs = _extend(self.model_kwargs, counts[0])
        self._num_committed += counts[0]

    def close(self, rows) -> None:
        """Undo a pass that broke off."""
        if getattr(self, "_before", None) is not None:
            _put_back(self.cache, self._before)


_STATES = ("conv_states", "recurrent_states", "has_previous_state")


def _snapshot(cache) -> list[dict]:
    """What the next pass changes in each layer: it replaces keys and values, and writes to recurrent states."""
    kept = []
    for layer in cache.layers:
        state = {name: getattr(layer, name) for name in ("keys", "values") if hasattr(layer, name)}
        for name in _STATES:
            values = getattr(layer, name, {})
            state[name] = {i: value.clone() if torch.is_tensor(value) else value for i, value in values.items()}
        kept.append(state)
    return kept


def _put_back(cache, kept: list[dict]) -> None:
    for layer, state in zip(cache.layers, kept, strict=True):
        for name, value in state.items():
            if name not in _STATES:
                setattr(layer, name, value)
            elif value:  # copies, as a pass that breaks off may have written to them
                copies = {i: state.clone() if torch.is_tensor(state) else state for i, state in value.items()}
                setattr(layer, name, copies)
