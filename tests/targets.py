"""Tiny random targets, one a family, for tests that need breadth and no download.

`make_target(family)` builds one in a fraction of a second; the same family, seed and overrides give the same
weights. Every family shares VOCAB, HIDDEN, NUM_LAYERS and the special ids, so one tiny drafter fits them all.
Greedy text is varied and never holds a special id; there is no EOS unless a test asks for one.

In float32 a forward pass of another shape moves logits by about 1e-5, so one greedy choice in tens of
thousands is a near-tie that may flip. In float64 they move by 1e-14 (Gemma 2, with a float32 softmax: 1e-6).
"""

import copy

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 64
HIDDEN = 32
NUM_LAYERS = 5
WINDOW = 8  # of every sliding layer: shorter than a prompt and two blocks
PAD, BOS, EOS, MASK, IMAGE, VIDEO, VISION_START, VISION_END = range(8)
FIRST_TEXT_ID = 8  # ids from here on are words

# What most decoders agree on. Four query heads share two key/value heads.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
}
GEMMA = {
    "head_dim": 16,  # not hidden / heads
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
}

# family -> (config class, model class, what differs from COMMON; None drops a name the family does not have)
_TABLE: dict[str, tuple[str, str, dict]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),  # biases on q, k and v
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "initializer_range": 0.3,
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),  # every layer slides
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        # Caps low enough to matter at this size.
        {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**GEMMA, "sliding_window_pattern": 3},  # every third layer is full
    ),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"sliding_window": WINDOW},
    ),  # fused projections; every layer slides
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),  # norms after the sub-layers
    "smollm3": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"no_rope_layer_interval": 2},
    ),  # layers 1 and 3 are NoPE
    "gpt_neox": (  # attention and MLP in parallel, half of each head rotated
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {"num_key_value_heads": None, "rotary_pct": 0.5},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "n_inner": 48,
            "max_position_embeddings": 256,  # a learned table: position 256 does not exist
            "initializer_range": 0.4,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
    ),
}
FAMILIES = tuple(_TABLE)
VLM_FAMILIES = ("qwen2_5_vl",)
TEXT_FAMILIES = tuple(family for family in FAMILIES if family not in VLM_FAMILIES)

_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.25,
}

_QUERIES = ("q_proj.weight", "qkv_proj.weight", "query_key_value.weight", "c_attn.weight")


def make_target(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> PreTrainedModel:
    """A tiny random target in eval mode.

    `overrides` go to the (text) config, e.g. `num_hidden_layers=8`, `sliding_window=None`, `eos_token_id=9`;
    `attn_implementation` and `experts_implementation` choose kernels. The caller's RNG is left as it was.
    """
    config_name, model_name, changes = _TABLE[family]
    kernels = {k: overrides.pop(k) for k in ("attn_implementation", "experts_implementation") if k in overrides}
    if dtype == torch.float64:
        kernels.setdefault("experts_implementation", "eager")  # grouped_mm takes no float64
    fields = copy.deepcopy({**COMMON, **changes, **overrides})  # a config changes the dicts it is given
    for name, value in changes.items():
        if value is None and name not in overrides:
            del fields[name]
    if family in VLM_FAMILIES:
        special = {"image_token_id": IMAGE, "video_token_id": VIDEO}
        special |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
        fields = {"text_config": fields, "vision_config": dict(_VISION), **special}
    config = getattr(transformers, config_name)(**fields)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)._from_config(config, dtype=torch.float32, **kernels)
        _roughen(model)
    # Like from_pretrained(dtype=...): parameters are cast, RoPE buffers stay float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for part in (model.config, model.config.get_text_config()):
        part.dtype = dtype
    return model.eval()


@torch.no_grad()
def _roughen(model: PreTrainedModel) -> None:
    """From transformers' initial weights to ones whose every parameter counts and whose text is varied."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms away from 1, biases away from 0
            spread = 0.2 if name.endswith("bias") else 0.5
            parameter.add_(spread * torch.randn_like(parameter))
        # Sharper attention makes the text depend on more than its last word.
        if name.endswith("q_norm.weight"):
            parameter.add_(2)
        elif name.endswith(_QUERIES):
            parameter.mul_(1.5)
    head = model.get_output_embeddings().weight
    if head is model.get_input_embeddings().weight:
        # A tied head favours the word just read; with half the signs of the final norm turned, it does not.
        decoder = model.get_decoder()
        norm = (decoder.ln_f if hasattr(decoder, "ln_f") else decoder.norm).weight
        one = 1 if model.config.model_type.startswith("gemma") else 0  # Gemma's norms multiply by 1 + weight
        norm[::2] = -(norm[::2] + one) - one
    # Special ids have a zero row in the head, so the best of the words always beats them.
    head[:FIRST_TEXT_ID] = 0


def prompt_ids(batch: int = 1, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random words [batch, length], without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TEXT_ID, VOCAB, (batch, length), generator=generator)


def vlm_inputs(
    model: PreTrainedModel, batch: int = 1, grid: tuple[int, int] = (4, 6), length: int = 8, seed: int = 0
) -> dict[str, torch.Tensor]:
    """What a processor would give for one image a row: `model.generate(**vlm_inputs(model))`.

    The image is `grid` patches high and wide, each merged square of them one placeholder token, between the
    halves of a `length`-word text. Without `mm_token_type_ids` the image gets no 3-D positions.
    """
    vision = model.config.vision_config
    merge, (high, wide) = vision.spatial_merge_size, grid
    placeholders = (high // merge) * (wide // merge)
    image = torch.tensor([VISION_START, *[IMAGE] * placeholders, VISION_END]).expand(batch, -1)
    words = prompt_ids(batch, length, seed)
    input_ids = torch.cat([words[:, : length // 2], image, words[:, length // 2 :]], dim=1)

    generator = torch.Generator().manual_seed(seed + 1)
    patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(batch * high * wide, patch_values, generator=generator)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == IMAGE).int(),
        "pixel_values": pixels.to(model.dtype),
        "image_grid_thw": torch.tensor([[1, high, wide]]).repeat(batch, 1),
    }
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}
