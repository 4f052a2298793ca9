"""DFlashDraftModel: the block-diffusion drafter of arXiv 2602.06036.

Shapes: B sequences, S new context positions, L tokens in the block, D the drafter's width, D_t the target's,
F context features a position, V the target's vocabulary.
"""

from .configuration_dflash import OPTIONS, DFlashConfig  # isort: skip  (first: refuses a transformers that is too old)

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, _add_variant
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import GENERATION_CONFIG_NAME, cached_file, logging

from .candidates import DFlashCandidateGenerator, DFlashRun, last_run
from .configuration_dflash import default_target_layer_ids
from .decoding import decode
from .dispatch import NOT_FOR_DECODE, PROTOCOL, install
from .passes import REPLAYED

logger = logging.get_logger(__name__)

# Tensors that a checkpoint may or may not ship; config.json does not say which, the file does.
_OWN_TENSORS = ("embed_tokens.weight", "lm_head.weight", "d2t")


def _deinterleave(x: torch.Tensor) -> torch.Tensor:
    """Reorder `[..., head_dim]` from pairs side by side to halves. Done to q and k alike it leaves q.k unchanged."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def block_mask(
    query_positions: torch.Tensor,
    num_keys: int,
    *,
    causal: bool,
    window: int | None,
    padding_mask: torch.Tensor | None,
    num_filled: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Who sees whom: bool `[B, 1, L, num_keys]`, or None where everything is visible.

    A query at position p sees keys at k > p - window, not beyond itself if causal, and k < p + window if not. Keys are
    consecutive positions; a row's last one is the block's last one, and what lies behind it is not looked at.

    Args:
        query_positions: `[B, L]` long.
        padding_mask: `[B, num_keys]`, nonzero where there is a key.
        num_filled: `[B]` long, how many keys a row has; None where all rows have all `num_keys`.
    """
    if not causal and window is None and padding_mask is None and num_filled is None:
        return None
    q = query_positions[:, :, None]  # [B, L, 1]
    slots = torch.arange(num_keys, device=q.device)
    ends = num_keys if num_filled is None else num_filled[:, None]
    k = (query_positions[:, -1:] + 1 - ends + slots)[:, None, :]  # [B, 1, num_keys]
    visible = torch.ones(1, 1, 1, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible & (k <= q)
    if window is not None:
        visible = visible & (k > q - window)
        if not causal:
            visible = visible & (k < q + window)
    if num_filled is not None:
        visible = visible & (slots < ends)[:, None]
    if padding_mask is not None:
        visible = visible & padding_mask[:, None, -num_keys:].bool()
    return visible.expand(q.shape[0], q.shape[1], num_keys)[:, None]


class DFlashAttention(nn.Module):
    """Queries from the block, keys and values from context features and block (KV injection, paper section 3)."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False  # every mask is explicit; sdpa must not add one of its own
        self.causal = config.layer_causal[layer_idx]
        self.window = config.layer_windows[layer_idx]
        q_width, kv_width = (
            config.num_attention_heads * self.head_dim,
            config.num_key_value_heads * self.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.attention_sink_bias = (
            nn.Parameter(torch.zeros(config.num_attention_heads)) if config.layer_sinks[layer_idx] else None
        )

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, L, D] the block
        context: torch.Tensor,  # [B, S, D] the context features
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos, sin [B, S + L, head_dim]
        masks: Callable[[bool, int | None, int], torch.Tensor | None],  # (causal, window, number of keys) -> mask
        cache,
    ) -> torch.Tensor:
        B, L = hidden_states.shape[:2]
        kv_input = torch.cat([context, hidden_states], dim=1)  # [B, S + L, D]
        q = self.q_norm(self.q_proj(hidden_states).view(B, L, -1, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(kv_input).view(B, kv_input.shape[1], -1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(kv_input).view(B, kv_input.shape[1], -1, self.head_dim).transpose(1, 2)

        cos, sin = (table[:, None] for table in position_embeddings)
        if not self.config.is_neox_style:
            q, k = _deinterleave(q), _deinterleave(k)
        q = q * cos[:, :, -L:] + rotate_half(q) * sin[:, :, -L:]
        k = k * cos + rotate_half(k) * sin
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)

        mask = masks(self.causal, self.window, k.shape[2])
        implementation = self.config._attn_implementation
        if "flash" in implementation and (mask is not None or self.attention_sink_bias is not None):
            raise ValueError(
                f"Layer {self.layer_idx} of this drafter needs an attention mask or a sink, which {implementation} "
                'cannot take here; load it with attn_implementation="sdpa".'
            )
        if self.attention_sink_bias is not None:
            k, v, mask = self._with_sink(q, k, v, mask)
        elif mask is not None and mask.dtype == torch.bool and implementation == "eager":
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, torch.finfo(q.dtype).min)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        out, _ = attend(self, q, k, v, mask, dropout=dropout, scaling=self.scaling)
        return self.o_proj(out.reshape(B, L, -1))

    def _with_sink(self, q, k, v, mask):
        """Append one key whose logit is the head's sink and whose value is zero: the softmax then holds the sink."""
        B, H, L, num_keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
        bias = q.new_zeros(B, H, L, num_keys + 1)
        if mask is not None:
            hidden = ~mask if mask.dtype == torch.bool else mask < 0
            bias[..., :num_keys].masked_fill_(hidden, torch.finfo(q.dtype).min)
        bias[..., num_keys] = self.attention_sink_bias.to(q.dtype)[None, :, None]
        none = k.new_zeros(B, k.shape[1], 1, k.shape[3])
        return torch.cat([k, none], dim=2), torch.cat([v, none], dim=2), bias


class DFlashDecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU, as in Qwen3; the context enters through the attention's keys and values only."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **attention_inputs) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **attention_inputs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def _refuse_other_kinds(config: DFlashConfig) -> None:
    if "DFlash2DraftModel" in (config.architectures or []) or config.option("selector_rank") is not None:
        raise ValueError(
            "This is a DFlash 2 checkpoint (dynamic convolutions and a candidate selector), which is not supported "
            "yet; use a DFlash checkpoint (architectures: DFlashDraftModel)."
        )
    if getattr(config, "speculators_model_type", None) is not None:
        raise ValueError(
            "This checkpoint is in the speculators layout (speculators_model_type="
            f"{config.speculators_model_type!r}), which is not read here: `dflash-hf convert` writes it in z-lab's."
        )
    if config.option("attention_value_scale", 1.0) != 1.0:
        raise ValueError(
            f"dflash_config.attention_value_scale={config.option('attention_value_scale')} is not supported; drafts "
            "would be wrong without it."
        )
    if config.mask_token_id is None:
        raise ValueError(
            "config.json names no mask token: expected `dflash_config.mask_token_id` or a top-level `mask_token_id`. "
            "Set it to the id that the drafter was trained with; a wrong one makes it useless without an error."
        )
    if config.target_layer_ids is None:
        raise ValueError(
            "config.json names neither `dflash_config.target_layer_ids` nor `num_target_layers`; without one of them "
            "the target layers that feed the drafter are unknown."
        )


def _warn_of_unknown_options(config: DFlashConfig) -> None:
    if unknown := sorted(set(config.dflash_config) - set(OPTIONS)):
        logger.warning(
            f"config.json: nothing here reads these entries of dflash_config: {', '.join(unknown)}. If one of them is "
            f"misspelt, drafts are worse without an error; known are {', '.join(OPTIONS)}."
        )


def _is_count(value, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _refuse_odd_values(config: DFlashConfig) -> None:
    ids, options = config.target_layer_ids, config.dflash_config
    eps, most = config.rms_norm_eps, config.max_position_embeddings
    rules = [
        (
            "block_size",
            config.block_size,
            _is_count(config.block_size) and config.block_size <= most,
            f"a whole number from 1 to max_position_embeddings={most}",
        ),
        ("rms_norm_eps", eps, isinstance(eps, int | float) and eps >= 0, "a number from 0 on"),
        (
            "mask_token_id",
            config.mask_token_id,
            _is_count(config.mask_token_id, 0) and config.mask_token_id < config.vocab_size,
            f"an id of the vocabulary, 0 to {config.vocab_size - 1}",
        ),
        (
            "target_layer_ids",
            ids,
            isinstance(ids, list | tuple) and len(ids) > 0 and all(_is_count(i, 0) for i in ids),
            "a list of layer numbers, counted from 0",
        ),
        ("head_dim", config.head_dim, _is_count(config.head_dim) and config.head_dim % 2 == 0, "an even number"),
        (
            "num_attention_heads",
            config.num_attention_heads,
            config.num_attention_heads % config.num_key_value_heads == 0,
            f"a multiple of num_key_value_heads={config.num_key_value_heads}",
        ),
        (
            "layer_types",
            config.layer_types,
            len(config.layer_types) == config.num_hidden_layers,
            f"one entry for each of the {config.num_hidden_layers} layers",
        ),
    ]
    rules += [
        (name, options[name], options[name] is None or isinstance(options[name], bool), "true or false")
        for name in ("causal", "use_swa", "sample_from_anchor", "attention_sink_bias")
        if name in options
    ]
    for name, value, holds, wanted in rules:
        if not holds:
            raise ValueError(f"config.json: {name} must be {wanted}, got {value!r}.")
    for window in config.layer_windows:
        if window is not None and not _is_count(window):
            raise ValueError(f"config.json: the sliding window must be a whole number from 1 on, got {window!r}.")


class DFlashDraftModel(PreTrainedModel):
    """A DFlash drafter: give it to `target.generate(..., assistant_model=drafter)`.

    The target's embedding table and LM head are borrowed at run time: never saved, never trained. A checkpoint that
    ships its own (`embed_tokens.weight`, `lm_head.weight`, with `d2t` for a reduced draft vocabulary) uses those.

    `drafter.generation_config` holds the knobs: `num_assistant_tokens` (fewer drafts than the block; unset: all) and
    `assistant_confidence_threshold` (offer no slot where the drafter's top probability is lower, nor any behind it;
    unset: no threshold), `num_assistant_tokens_schedule` ("constant": always as many; "adaptive": as many as bring the
    most tokens a second; unset: adaptive where the clock may decide, i.e. not under rejection sampling) and
    `assistant_sampling` ("coupled": noise that drafter and target share; or "rejection"; unset: coupled). After a
    generate call `drafter.last_run` says what happened.

    On the CPU a repacked copy of the target's LM head (as large as the head in float32) makes passes over a few rows
    faster; `drafter.pack_head = False` does without.

    Example:
        >>> drafter = DFlashDraftModel.from_pretrained("model_cards/SmolLM2-135M-Instruct-DFlash")  # doctest: +SKIP
        >>> target.generate(**inputs, assistant_model=drafter, max_new_tokens=96)                   # doctest: +SKIP
        >>> print(drafter.last_run)                                                                 # doctest: +SKIP
    """

    config_class = DFlashConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    _no_split_modules = ["DFlashDecoderLayer"]  # noqa: RUF012  (transformers' convention)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = [r"^t2d$"]  # noqa: RUF012  (d2t says the same)
    dflash_protocol = PROTOCOL
    pack_head = True

    def __init__(self, config: DFlashConfig, own_tensors: dict[str, list] | None = None):
        """Build a drafter with fresh weights.

        Args:
            config: sizes and options.
            own_tensors: shapes of the tensors among `embed_tokens.weight`, `lm_head.weight` and `d2t` that the drafter
                has of its own; `from_pretrained` reads them off the checkpoint.

        Raises:
            ValueError: the config is of another kind (DFlash 2, speculators) or names no mask token or layers.
        """
        super().__init__(config)
        _refuse_other_kinds(config)
        _refuse_odd_values(config)
        _warn_of_unknown_options(config)
        own = own_tensors or {}
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.embed_tokens = nn.Embedding(*own["embed_tokens.weight"]) if "embed_tokens.weight" in own else None
        head = own.get("lm_head.weight")
        self.lm_head = nn.Linear(head[1], head[0], bias=False) if head else None
        self.register_buffer("d2t", torch.zeros(own["d2t"], dtype=torch.long) if "d2t" in own else None)
        self.register_buffer("mask_embedding", None, persistent=False)  # [D]; lives in mask_embedding.pt
        self.generation_config = GenerationConfig()
        self.post_init()

    # -- the drafter --

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache=None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """One drafter pass: denoise a block given the target's hidden states (paper, section 3).

        The arguments are those of transformers' own DFlash generator.

        Args:
            noise_embeds: `[B, L, D]`, embeddings of the anchor and the mask tokens.
            context_hidden_states: `[B, S, F * D_t]`, the target's hidden states of the positions that were committed
                since the last pass, features side by side; S may be 0.
            position_ids: `[B, S + L]` long, of the new context positions and then the block. Unset: they follow on
                what the cache holds.
            attention_mask: `[B, keys]`, 1 where there is a key (padding); or `[B, 1 or H, L, keys]` in the form that
                the attention backend takes, used as it is; or None.
            cache: context K/V of earlier passes: `DFlashContextCache`, or transformers' `DFlashCache`.

        Returns:
            `last_hidden_state` `[B, L, D]` after the final norm, in the drafter's dtype.
        """
        block = noise_embeds.to(self.dtype)
        context = self.hidden_norm(self.fc(context_hidden_states.to(self.dtype)))  # [B, S, D]
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            new = context.shape[1] + block.shape[1]
            position_ids = torch.arange(past, past + new, device=block.device)[None].expand(block.shape[0], -1)

        @functools.cache  # layers of the same kind share one mask
        def masks(causal: bool, window: int | None, num_keys: int) -> torch.Tensor | None:
            if attention_mask is not None and attention_mask.dim() == 4:
                return attention_mask
            return block_mask(
                position_ids[:, -block.shape[1] :],
                num_keys,
                causal=causal,
                window=window,
                padding_mask=attention_mask,
                num_filled=getattr(cache, "num_filled", None),
            )

        inputs = {
            "context": context,
            "position_embeddings": self.rotary_emb(block, position_ids),
            "masks": masks,
            "cache": cache,
        }
        for layer in self.layers:
            block = layer(block, **inputs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(block))

    def embed_block(self, ids: torch.Tensor, target_embeddings: Callable) -> torch.Tensor:
        """Embeddings `[B, L, D]` of block ids `[B, L]` from the drafter's own table, or the target's RAW one.

        Targets that scale or normalise their embeddings (Gemma) do so outside the drafter, which saw the bare table
        in training; `input_embedding_scale` says where that is not so.
        """
        module = target_embeddings if self.embed_tokens is None else self.embed_tokens
        weight = getattr(module, "weight", None)
        ids = ids.to(weight.device if weight is not None and weight.device.type != "meta" else ids.device)
        if weight is not None and weight.is_floating_point() and weight.dim() == 2 and weight.device.type != "meta":
            embeds = nn.functional.embedding(ids, weight)
        else:  # quantized or offloaded: only the module can read its own table, so undo the scale it applies
            embeds = module(ids)
            if (scale := getattr(module, "embed_scale", None)) is not None:
                embeds = embeds / scale
        embeds = embeds.to(self.device, self.dtype)
        if self.mask_embedding is not None:
            is_mask = (ids == self.config.mask_token_id)[..., None].to(self.device)
            embeds = torch.where(is_mask, self.mask_embedding.to(embeds), embeds)
        scale = self.config.option("input_embedding_scale", 1.0)
        return embeds if scale == 1.0 else embeds * scale

    def compute_logits(self, hidden: torch.Tensor, target_head: nn.Module | None, vocab_size: int) -> torch.Tensor:
        """Logits `[B, n, vocab_size]` of block slots `[B, n, D]`, through the drafter's own head or the target's.

        A reduced draft vocabulary is spread to the target's size: draft id i stands for target id `i + d2t[i]`, ids
        that it does not hold get -inf.
        """
        head = target_head if self.lm_head is None else self.lm_head
        weight = getattr(head, "weight", None)
        if weight is not None and weight.is_floating_point():
            hidden = hidden.to(weight.dtype)
        if weight is not None and weight.device.type != "meta":  # an offloaded head moves its own input
            hidden = hidden.to(weight.device)
        logits = head(hidden)
        multiplier = self.config.option("output_multiplier", 1.0)
        if multiplier != 1.0:
            logits = logits * multiplier
        if cap := self.config.option("final_logit_softcapping"):
            logits = torch.tanh(logits / cap) * cap
        if self.d2t is None:
            return logits
        ids = torch.arange(self.d2t.shape[0], device=logits.device) + self.d2t.to(logits.device)
        spread = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
        spread[..., ids] = logits
        return spread

    # -- what the hook in transformers asks --

    def check_target(self, target: PreTrainedModel, generation_config=None, generation_kwargs: dict | None = None):
        """Refuse, before any token, a target or a request that this drafter cannot serve.

        Raises:
            ValueError: names the two values that disagree, or the option and what to use instead.
        """
        config, text = self.config, target.config.get_text_config()
        if target.config.is_encoder_decoder:
            raise ValueError(
                f"DFlash drafters serve decoder-only targets; {type(target).__name__} is an encoder-decoder. "
                "Call generate() without assistant_model."
            )
        if text.vocab_size != config.vocab_size:
            raise ValueError(
                f"The drafter was made for a vocabulary of {config.vocab_size} tokens, the target has "
                f"{text.vocab_size}; use the drafter of this target."
            )
        if text.hidden_size != config.target_hidden_size:
            raise ValueError(
                f"The drafter reads target hidden states of width {config.target_hidden_size}, the target's are "
                f"{text.hidden_size} wide; use the drafter of this target."
            )
        if max(config.target_layer_ids) >= text.num_hidden_layers or min(config.target_layer_ids) < 0:
            raise ValueError(
                f"The drafter reads target layers {config.target_layer_ids}, the target has layers 0 to "
                f"{text.num_hidden_layers - 1}; use the drafter of this target."
            )
        if target._is_stateful and target.config.model_type not in REPLAYED:
            raise ValueError(
                f"{type(target).__name__} keeps a recurrent state that rejected drafts cannot be taken out of; of "
                f"such targets DFlash drafters serve {', '.join(REPLAYED)}. Call generate() without assistant_model."
            )
        borrows = [
            name for name, own in (("embedding table", self.embed_tokens), ("LM head", self.lm_head)) if own is None
        ]
        if borrows and config.hidden_size != text.hidden_size:
            raise ValueError(
                f"The drafter is {config.hidden_size} wide and would borrow the target's {' and '.join(borrows)}, "
                f"{text.hidden_size} wide; its checkpoint must ship them."
            )
        if self.lm_head is None and target.get_output_embeddings() is None:
            raise ValueError(
                f"The drafter borrows the target's LM head: {type(target).__name__}.get_output_embeddings() is None."
            )
        if generation_config is not None and generation_config.guidance_scale not in (None, 1, 1.0):
            raise ValueError(
                f"guidance_scale={generation_config.guidance_scale} runs the target a second time in a cache of its "
                "own, which cannot take drafts back; generate without assistant_model, or without guidance_scale."
            )
        if generation_config is not None and generation_config.use_cache is False:
            raise ValueError(
                "use_cache=False: a DFlash drafter needs the target's cache; pass use_cache=True, or call generate() "
                "without assistant_model."
            )
        tokenizers = generation_kwargs or {}
        # A pipeline asks for one where special ids differ; the target's own changes nothing.
        if tokenizers.get("assistant_tokenizer") not in (None, tokenizers.get("tokenizer")):
            raise ValueError("A DFlash drafter uses the target's tokenizer: leave out `assistant_tokenizer`.")

    def candidate_generator(self, target, **kwargs) -> DFlashCandidateGenerator:
        """The generator that drafts for one generate call on `target`; see `DFlashCandidateGenerator`."""
        return DFlashCandidateGenerator(self, target, **kwargs)

    def decode(self, target, input_ids, **kwargs):
        """The decode loop for one generate call on `target`; see `decoding.decode`.

        `generate(assistant_model=drafter)` comes here by itself, `generate(custom_generate=drafter.decode)` by hand.

        Raises:
            ValueError: as `decoding.decode`, or `synced_gpus` is set, whose lockstep this loop does not keep.
        """
        if kwargs.get("synced_gpus"):
            raise ValueError("synced_gpus=True needs transformers' loop: pass assistant_model=drafter instead.")
        kwargs = {name: value for name, value in kwargs.items() if name not in NOT_FOR_DECODE}
        return decode(target, input_ids, self, **kwargs)

    def assisted_decoding(self, target, input_ids, **kwargs):
        """transformers' own loop with this drafter's drafts: `generate(custom_generate=drafter.assisted_decoding)`.

        For comparison: it serves one sequence, the same number of drafts every cycle, and samples by rejection.
        """
        loop = GenerationMixin._assisted_decoding
        return getattr(loop, "__wrapped__", loop)(target, input_ids, assistant_model=self, **kwargs)

    @property
    def last_run(self) -> DFlashRun | None:
        """Figures of the newest generate call with this drafter; None before the first.

        While several threads generate with it, each reads its own.
        """
        return last_run(self)

    def __getattr__(self, name: str):
        if name == "generate":
            raise AttributeError(
                "A DFlash drafter does not generate by itself: call target.generate(..., assistant_model=drafter)."
            )
        return super().__getattr__(name)

    # -- making one --

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        num_layers: int = 5,
        block_size: int = 16,
        *,
        num_features: int = 5,
        mask_token_id: int | None = None,
        tokenizer=None,
        **overrides,
    ) -> "DFlashDraftModel":
        """Make an untrained drafter that fits a target: its width, heads, RoPE base and vocabulary (paper, section 4).

        Args:
            target: a decoder-only model.
            num_layers: decoder layers of the drafter.
            block_size: tokens in a block, the anchor included.
            num_features: target layers to read, spread from the second to the third-to-last.
            mask_token_id: an id that no text holds. Unset: chosen, and said in the log; with a tokenizer an id that it
                does not use or a special token that its chat template does not name, else the last id of the table.
            tokenizer: the target's.
            overrides: any other option of `DFlashConfig`, such as `intermediate_size` or `target_layer_ids`.

        Returns:
            A drafter in float32 on the target's device. Seed torch before to get the same weights again.

        Raises:
            ValueError: the target is an encoder-decoder, or no unused id was found.

        Example:
            >>> drafter = DFlashDraftModel.for_target(target, num_layers=3, block_size=8)          # doctest: +SKIP
        """
        text = target.config.get_text_config()
        if target.config.is_encoder_decoder:
            raise ValueError(
                f"DFlash drafters serve decoder-only targets; {type(target).__name__} is an encoder-decoder."
            )
        if mask_token_id is None:
            mask_token_id = _unused_token_id(text, tokenizer)
        rope = getattr(text, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or rope.get("full_attention", {}).get("rope_theta") or 10000.0
        spread = default_target_layer_ids(text.num_hidden_layers, num_features)  # few layers: ids that come twice
        settings = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None),
            "head_dim": getattr(text, "head_dim", None),
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 40960,
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "num_target_layers": text.num_hidden_layers,
            "target_layer_ids": [i for i in range(text.num_hidden_layers) if i in spread],
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "bos_token_id": text.bos_token_id,
            "eos_token_id": text.eos_token_id,
            "pad_token_id": text.pad_token_id,
        }
        return cls(DFlashConfig(**settings | overrides)).to(device=target.device, dtype=torch.float32)

    # -- embeddings that are usually borrowed --

    def get_input_embeddings(self) -> nn.Embedding | None:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear | None:
        return self.lm_head

    # -- files --

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs) -> "DFlashDraftModel":
        """Load a drafter in z-lab's layout from a folder or the Hub; arguments as in transformers.

        Raises:
            ValueError: the checkpoint is of another kind, a file of it is damaged (named), or it misses tensors or has
                tensors of unknown use (named).
        """
        options = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        hub: dict = {key: kwargs[key] for key in options if key in kwargs}
        path = pretrained_model_name_or_path

        def find(filename: str) -> str | None:
            return cached_file(
                path,
                filename,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_connection_errors=False,
                **hub,
            )

        if isinstance(config, PreTrainedConfig):
            if not isinstance(
                config, DFlashConfig
            ):  # another copy's class, or the Qwen3Config that the file calls itself
                config = DFlashConfig.from_dict(config.to_dict())
        else:
            source = path if config is None else config
            raw, _ = DFlashConfig.get_config_dict(source, **hub)
            if raw.get("model_type") == "muse_glimmer_assistant":
                raise ValueError(
                    "This is a Muse Glimmer assistant, which transformers runs itself: load it with AutoModel and "
                    'pass speculation_type="dflash" to generate().'
                )
            # The config would take the files' options for itself, and "auto" for a dtype.
            dtype = {key: kwargs.pop(key) for key in ("dtype", "torch_dtype") if key in kwargs}
            config, kwargs = DFlashConfig.from_pretrained(source, return_unused_kwargs=True, **kwargs)
            kwargs |= hub | dtype
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(
            path,
            *model_args,
            config=config,
            own_tensors=_own_tensor_shapes(find, kwargs.get("variant")),
            output_loading_info=True,
            **kwargs | {"ignore_mismatched_sizes": True},  # refused below, by name
        )
        if info["mismatched_keys"]:
            sizes = [
                f"{key}: {list(got)} in the file, {list(want)} by config.json"
                for key, got, want in info["mismatched_keys"]
            ]
            raise ValueError(f"The checkpoint {path} does not match its config.json: {'; '.join(sorted(sizes))}.")
        for problem in ("missing_keys", "unexpected_keys"):
            if info[problem]:
                raise ValueError(
                    f"The checkpoint {path} does not match its config.json: {problem.replace('_', ' ')} "
                    f"{sorted(info[problem])}. It is incomplete, damaged, or of another kind than DFlash."
                )
        _refuse_odd_own_tensors(model)
        if (file := find("mask_embedding.pt")) is not None:
            try:
                saved = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:
                raise ValueError(f"{file} cannot be read as tensors ({error}); fetch it again.") from error
            embedding = saved["embedding"] if isinstance(saved, dict) else saved
            mask_id = saved.get("mask_token_id") if isinstance(saved, dict) else None
            if embedding.numel() != config.hidden_size or mask_id not in (None, config.mask_token_id):
                raise ValueError(
                    f"mask_embedding.pt holds {embedding.numel()} values for token {mask_id}, config.json says width "
                    f"{config.hidden_size} and mask token {config.mask_token_id}; use the files of one checkpoint."
                )
            model.mask_embedding = embedding.flatten().to(model.device, model.dtype)
        if find(GENERATION_CONFIG_NAME) is not None:
            model.generation_config = GenerationConfig.from_pretrained(path, **hub)
        return (model, info) if wants_info else model  # type: ignore[return-value]  # as transformers does

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> None:
        """Write z-lab's layout and beside it the code that `trust_remote_code=True` runs (arguments: transformers).

        The folder loads with transformers alone, and holds what vLLM and SGLang read.
        """
        folder = Path(save_directory)
        if kwargs.get("is_main_process", True):
            if folder.is_file():
                raise ValueError(f"Expected a folder to save the drafter in, got the file {folder}.")
            folder.mkdir(parents=True, exist_ok=True)
            # Before the weights: with push_to_hub=True transformers uploads what is there when it has written them.
            self.generation_config.save_pretrained(folder)
            if self.mask_embedding is not None:
                saved = {"embedding": self.mask_embedding.cpu(), "mask_token_id": self.config.mask_token_id}
                torch.save(saved, folder / "mask_embedding.pt.new")
                os.replace(folder / "mask_embedding.pt.new", folder / "mask_embedding.pt")
            for source in Path(__file__).parent.glob("*.py"):
                if source.name != "__init__.py" and source.parent.resolve() != folder.resolve():
                    shutil.copyfile(source, folder / f"{source.name}.new")
                    os.replace(folder / f"{source.name}.new", folder / source.name)
        super().save_pretrained(save_directory, **kwargs)


def _unused_token_id(text: PreTrainedConfig, tokenizer) -> int:
    """An id that stands in no text, for the mask token."""
    taken = set()
    for ids in (text.bos_token_id, text.eos_token_id, text.pad_token_id):
        taken.update(ids if isinstance(ids, list) else [ids])
    candidates = [text.vocab_size - 1]
    if tokenizer is not None:
        template = tokenizer.chat_template or ""
        taken.update(tokenizer.convert_tokens_to_ids([str(token) for token in tokenizer.special_tokens_map.values()]))
        special = [(i, t) for i, t in tokenizer.added_tokens_decoder.items() if t.special]
        candidates = [*range(len(tokenizer), text.vocab_size), *(i for i, t in special if t.content not in template)]
    found = next((i for i in candidates if i not in taken), None)
    if found is None:
        raise ValueError("Found no id that is free to be the mask token: pass mask_token_id, one that no text holds.")
    named = "" if tokenizer is None else f" ({tokenizer.convert_ids_to_tokens(found)!r})"
    logger.warning(f"The drafter's mask token is {found}{named}; pass mask_token_id if texts can hold it.")
    return found


def _refuse_odd_own_tensors(model: DFlashDraftModel) -> None:
    vocab_size = model.config.vocab_size
    rows = vocab_size if model.lm_head is None else model.lm_head.out_features
    entries = vocab_size if model.d2t is None else len(model.d2t)
    if rows != entries:
        raise ValueError(
            f"The checkpoint's LM head gives {rows} tokens and its d2t maps {entries}: expected the same number "
            f"(without d2t, the vocabulary of {vocab_size}); it is incomplete, or of two checkpoints."
        )
    if model.d2t is not None and not model.d2t.is_meta:
        ids = torch.arange(entries, device=model.d2t.device) + model.d2t
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                f"The checkpoint's d2t points at target ids {int(ids.min())} to {int(ids.max())}, the vocabulary has "
                f"{vocab_size}; d2t holds offsets: target id = draft id + d2t[draft id]."
            )


def _own_tensor_shapes(find, variant: str | None) -> dict[str, list[int]]:
    """Shapes of the optional tensors that a checkpoint ships, read off its safetensors headers."""
    if (index := find(_add_variant("model.safetensors.index.json", variant))) is not None:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    else:
        names = [_add_variant("model.safetensors", variant)]
    shapes = {}
    for file in filter(None, map(find, names)):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in set(_OWN_TENSORS) & set(tensors.keys()):
                    shapes[name] = list(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or incomplete ({error}); fetch or write it again.") from error
    return shapes


install()

__all__ = ["DFlashDraftModel"]
