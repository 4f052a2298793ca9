"""config.json of speculators' DFlash drafters (speculators 0.9.0, `models/dflash/config.py` and `core.py`).

The tensors have the same names in both layouts; what differs is the config, and what each side can hold.
"""

from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig

from ..drafter.configuration_dflash import DFlashConfig

VERSION = "0.9.0"
# Written by speculators for training only; taken from the target again when the drafter is loaded.
TRAINING_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")
# Keys of our config that say nothing about the transformer layers.
_NOT_LAYER_KEYS = (
    *("architectures", "auto_map", "block_size", "dflash_config", "draft_vocab_size", "dtype", "is_causal"),
    *("is_neox_style", "rope_scaling", "rope_theta", "target_architectures", "target_name_or_path"),
    "transformers_version",
)
# Knobs of a drafter that the layout has no place for, with the value that means the same as unset.
_NO_PLACE = {
    "assistant_confidence_threshold": 0.0,
    "num_assistant_tokens_schedule": "adaptive",
    "assistant_sampling": "coupled",
}
# Top-level keys that are read below, or that every transformers config has and a drafter does not need.
_READ = {
    *("architectures", "aux_hidden_state_layer_ids", "auto_map", "block_size", "draft_vocab_size", "dtype"),
    *("mask_token_id", "model_type", "sample_from_anchor", "sliding_window_non_causal", "speculators_config"),
    *("speculators_model_type", "speculators_version", "target_hidden_size", "tie_word_embeddings"),
    *("torch_dtype", "transformer_layer_config", "transformers_version"),
}


def read_config(raw: dict[str, Any]) -> tuple[DFlashConfig, int | None, list[str]]:
    """Turn a speculators config.json into `(config, draft tokens a pass or None for all, notes)`.

    The name and the architectures of the target become `config.target_name_or_path` and `.target_architectures`.

    Raises:
        ValueError: names what is missing, or what a DFlash drafter here cannot hold.
    """
    if raw.get("speculators_model_type") != "dflash":
        raise ValueError(
            f"Expected speculators_model_type 'dflash', got {raw.get('speculators_model_type')!r}; the others are "
            "drafters of another kind and cannot be converted."
        )
    layer, aux = raw.get("transformer_layer_config"), raw.get("aux_hidden_state_layer_ids")
    if not isinstance(layer, dict):
        raise ValueError(f"config.json: expected an object in transformer_layer_config, got {layer!r}.")
    if not (isinstance(aux, list) and aux and all(isinstance(i, int) for i in aux)):
        raise ValueError(f"config.json: expected a list of layer ids in aux_hidden_state_layer_ids, got {aux!r}.")
    if min(aux) < 1:
        raise ValueError(
            f"aux_hidden_state_layer_ids={aux}: id 0 is the target's embedding output, which z-lab's layer ids "
            "(outputs of layers, counted from 0) cannot name."
        )
    settings = _layer_settings(layer)
    nested = {"mask_token_id": raw.get("mask_token_id"), "target_layer_ids": [i - 1 for i in aux]}
    if raw.get("sample_from_anchor"):
        nested["sample_from_anchor"] = True
    slides = "sliding_attention" in (settings.get("layer_types") or ())
    if slides and raw.get("sliding_window_non_causal"):  # absent: causal, as speculators trains by default
        nested["causal"] = False
    notes = [
        f"config.json: {key}={value!r} is not known here and was left out"
        for key, value in raw.items()
        if key not in _READ and value not in (None, {}, [])
    ]
    if slides:
        notes.append(
            f"sliding_window={settings['sliding_window']}: speculators trains with it counted from the block's "
            "anchor, z-lab's layout counts it from each query; up to block_size of the oldest keys in it differ"
        )
    drafts, verifier = _read_speculators_config(raw.get("speculators_config") or {})
    for key in ("name_or_path", "architectures"):
        if verifier.get(key):
            settings[f"target_{key}"] = verifier[key]
    settings |= {"block_size": raw.get("block_size", 8), "dflash_config": nested}  # 8: speculators' default
    if raw.get("target_hidden_size") is not None:
        settings["target_hidden_size"] = raw["target_hidden_size"]
    if raw.get("draft_vocab_size") not in (None, settings["vocab_size"]):
        settings["draft_vocab_size"] = raw["draft_vocab_size"]
    if (dtype := raw.get("dtype") or raw.get("torch_dtype")) is not None:
        settings["dtype"] = dtype
    config = DFlashConfig(**settings)
    return config, None if drafts == config.num_drafts else drafts, notes


def _layer_settings(layer: dict[str, Any]) -> dict[str, Any]:
    """What the file says of the layers, and the defaults of the config class that speculators reads it with."""
    model_type = layer.get("model_type", "qwen3")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformer_layer_config: transformers does not know model_type={model_type!r}.")
    resolved = CONFIG_MAPPING[model_type](**layer).to_dict()
    fields = [name for name in DFlashConfig.__annotations__ if name in resolved]
    settings = {**layer, **{name: resolved[name] for name in fields}}
    for key in ("model_type", "architectures", "auto_map", "rope_theta", "rope_scaling", "transformers_version"):
        settings.pop(key, None)  # rope_parameters, resolved, says all of it
    if "sliding_attention" in (settings.get("rope_parameters") or {}):
        raise ValueError(
            "transformer_layer_config.rope_parameters differs by layer type, which a DFlash drafter here cannot hold."
        )
    if "sliding_attention" in (settings.get("layer_types") or ()) and settings.get("sliding_window") is None:
        raise ValueError(
            "transformer_layer_config has sliding layers and no window: expected use_sliding_window=true and "
            f"sliding_window, got {layer.get('use_sliding_window')!r} and {layer.get('sliding_window')!r}."
        )
    return settings


def _read_speculators_config(spec: dict[str, Any]) -> tuple[int | None, dict]:
    methods = spec.get("proposal_methods") or []
    method = next((m for m in methods if m.get("proposal_type") == spec.get("default_proposal_method")), None)
    if method is None:
        return None, spec.get("verifier") or {}
    if method["proposal_type"] != "greedy":
        raise ValueError(f"Expected the proposal method 'greedy', got {method['proposal_type']!r}.")
    for key, value in (("verifier_accept_k", 1), ("accept_tolerance", 0)):
        if method.get(key, value) != value:
            raise ValueError(
                f"proposal_methods: {key}={method[key]} accepts tokens that the target did not choose; DFlash here "
                f"is lossless. Set it to {value}."
            )
    return method.get("speculative_tokens"), spec.get("verifier") or {}


def unheld(
    config: DFlashConfig, tensor_names: set[str], *, mask_embedding: bool, knobs: GenerationConfig
) -> list[str]:
    """The options of a drafter that speculators' layout cannot hold, each with the reason; empty if it fits."""
    options, refused = dict(config.dflash_config or {}), []
    slides = [window is not None for window in config.layer_windows]
    causal = config.layer_causal
    if any(is_causal and not slide for is_causal, slide in zip(causal, slides, strict=True)):
        refused.append("is_causal/dflash_config.causal=true (its full-attention layers are bidirectional)")
    if any(config.layer_sinks):
        refused.append("attention_sink_bias (it has no attention sinks)")
    if not config.is_neox_style:
        refused.append("is_neox_style=false (it rotates by halves)")
    if config.target_hidden_size != config.hidden_size:
        refused.append(f"target_hidden_size={config.target_hidden_size} (it takes the drafter's hidden_size)")
    ids = config.target_layer_ids or []
    if len(set(ids)) < len(ids):
        refused.append(f"target_layer_ids={ids} (they must be distinct)")
    for name in ("input_embedding_scale", "output_multiplier"):
        if (value := config.option(name, 1.0)) != 1.0:
            refused.append(f"{name}={value}")
    if cap := config.option("final_logit_softcapping"):
        refused.append(f"final_logit_softcapping={cap}")
    if mask_embedding:
        refused.append("mask_embedding.pt (it embeds the mask token with the target's table)")
    for name, default in _NO_PLACE.items():
        if (value := getattr(knobs, name, None)) not in (None, default):
            refused.append(f"generation_config.{name}={value} (it has no place for it; unset it)")
    if "embed_tokens.weight" in tensor_names:
        refused.append("embed_tokens.weight (it loads the target's table in its place)")
    if config.num_drafts < 1:
        refused.append("block_size=1 (it wants at least one draft token)")
    reduced = _draft_vocab_size(config) != config.vocab_size
    if "lm_head.weight" in tensor_names and not reduced:
        refused.append("lm_head.weight of the full vocabulary (it loads the target's head in its place)")
    if "d2t" in tensor_names and not reduced:
        refused.append("d2t without a smaller draft_vocab_size (it ignores the mapping)")
    known = {
        *("mask_token_id", "target_layer_ids", "block_size", "target_hidden_size", "causal", "use_swa"),
        *("swa_window_size", "sample_from_anchor", "attention_sink_bias", "add_swa_attention_sink_bias"),
        *("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "attention_value_scale"),
        "draft_vocab_size",
    }
    refused += [f"dflash_config.{key}={value!r}" for key, value in options.items() if key not in known]
    return refused


def _draft_vocab_size(config: DFlashConfig) -> int:
    return config.option("draft_vocab_size", config.vocab_size)


def write_config(config: DFlashConfig, *, target: str, architectures: list[str], drafts: int | None) -> dict[str, Any]:
    """The speculators config.json of a drafter for which `unheld` found nothing.

    Args:
        target: name or path of the target.
        architectures: its model classes, as in its config.json.
        drafts: draft tokens a pass; None for all of the block.
    """
    layer = {k: v for k, v in config.to_diff_dict().items() if k not in _NOT_LAYER_KEYS}
    windows = config.layer_windows
    slides = any(window is not None for window in windows)
    layer |= {
        "model_type": "qwen3",
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
        "use_sliding_window": slides,
    }
    causal = [c for c, window in zip(config.layer_causal, windows, strict=True) if window is not None]
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids or []],
        "block_size": config.block_size,
        "draft_vocab_size": _draft_vocab_size(config),
        "dtype": str(config.dtype).removeprefix("torch.") if config.dtype is not None else None,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": bool(config.option("sample_from_anchor", False)),
        "sliding_window_non_causal": slides and not any(causal),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": drafts or config.num_drafts,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": architectures, "name_or_path": target},
        },
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }
