"""The mistakes that people make with a drafter, each as the change of config.json that takes it back."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..drafter.configuration_dflash import default_target_layer_ids

ROPE_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 10_000_000.0)
WINDOWS = (64, 128, 256, 512, 1024, 2048, 4096)
MOST_MASK_TOKENS = 32
ALIKE = 0.98  # cosine of two ids' embeddings from which on drafts are the same with either
_IN_DFLASH_CONFIG = ("input_embedding_scale", "use_swa", "swa_window_size", "causal")


@dataclass(frozen=True)
class Probe:
    """One reading of a config to try.

    Attributes:
        kind: what the mistake is about, as in docs/troubleshooting.md.
        changes: entries of config.json and their values.
    """

    kind: str
    changes: dict


def variant(drafter, changes: dict):
    """The drafter as it would be with other entries in its config.json. Weights are shared, the rest is its own."""
    shared = [*drafter.parameters(), *drafter.buffers()]
    twin = copy.deepcopy(drafter, {id(tensor): tensor for tensor in shared})
    config = twin.config
    for name, value in changes.items():
        if name in _IN_DFLASH_CONFIG:
            config.dflash_config[name] = value
        else:
            setattr(config, name, value)
    for index, layer in enumerate(twin.layers):
        layer.self_attn.causal = config.layer_causal[index]
        layer.self_attn.window = config.layer_windows[index]
    if "rope_parameters" in changes:
        twin.rotary_emb = type(twin.rotary_emb)(config).to(twin.device)
    if "flash" in config._attn_implementation:
        config._attn_implementation = "sdpa"  # which takes every mask
    return twin


def value_of(config, name: str):
    """What a config has for an entry that `Probe.changes` names."""
    return config.dflash_config.get(name) if name in _IN_DFLASH_CONFIG else getattr(config, name, None)


def probes(drafter, target, *, longest: int, tokenizer=None) -> list[Probe]:
    """Readings of the config that are worth trying, those left out that change nothing on these texts.

    Args:
        longest: tokens of the longest text.
        tokenizer: the target's, for the ids that may be its mask token.
    """
    text, config = target.config.get_text_config(), drafter.config
    every = [
        *_feature_layers(config, text),
        *_mask_tokens(drafter, target, tokenizer),
        *_embedding_scales(config, target),
        *_windows(config, longest),
        *_causality(config),
        *_rope(config, text),
    ]
    now, found, seen = _meaning(config, longest), [], []
    for probe in every:
        meaning = _meaning(variant(drafter, probe.changes).config, longest)
        if meaning != now and meaning not in seen:
            seen.append(meaning)
            found.append(probe)
    return found


def _meaning(config, longest: int) -> tuple:
    """What a config says, whatever it is spelt like. A window beyond all texts is none."""
    windows = [None if window is None or window >= longest + config.block_size else window
               for window in config.layer_windows]  # fmt: skip
    return (
        list(config.target_layer_ids),
        config.mask_token_id,
        config.option("input_embedding_scale", 1.0),
        windows,
        config.layer_causal,
        config.rope_parameters,
        config.is_neox_style,
    )


def _feature_layers(config, text) -> Iterator[Probe]:
    """All layers shifted by one, those of a checkpoint that names none, and one layer shifted."""
    ids, last = list(config.target_layer_ids), text.num_hidden_layers - 1
    default = default_target_layer_ids(text.num_hidden_layers, len(ids))
    single = [[*ids[:place], ids[place] + shift, *ids[place + 1 :]] for shift in (-1, 1) for place in range(len(ids))]
    for other in ([i - 1 for i in ids], [i + 1 for i in ids], default, *single):
        if min(other) >= 0 and max(other) <= last:
            yield Probe("feature layers", {"target_layer_ids": other})


def _mask_tokens(drafter, target, tokenizer) -> Iterator[Probe]:
    """Ids that stand in no text: special tokens, rows of the table without a token, and its ends.

    Of ids with the same embedding, as untrained ones have, only the first is tried.
    """
    if drafter.mask_embedding is not None:  # then the id's own row is never read
        return
    text, candidates = target.config.get_text_config(), []
    if tokenizer is not None:
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        named = [i for i in special if "mask" in str(tokenizer.added_tokens_decoder[i]).lower()]
        candidates = [*named, len(tokenizer), *special]
    for ids in (text.pad_token_id, text.eos_token_id, text.bos_token_id, text.vocab_size - 1, 0):
        candidates += ids if isinstance(ids, list) else [ids]
    usable = [i for i in dict.fromkeys(candidates) if i is not None and 0 <= i < text.vocab_size]
    ids = torch.tensor([[drafter.config.mask_token_id, *usable[:MOST_MASK_TOKENS]]])
    rows = torch.nn.functional.normalize(drafter.embed_block(ids, target.get_input_embeddings())[0].float(), dim=-1)
    alike = (rows @ rows.T > ALIKE).tolist()
    for n, token in enumerate(ids[0].tolist()):
        if not any(alike[n][:n]):
            yield Probe("mask token", {"mask_token_id": token})


def _embedding_scales(config, target) -> Iterator[Probe]:
    scales = [1.0, getattr(target.get_input_embeddings(), "embed_scale", None), math.sqrt(config.target_hidden_size)]
    for scale in scales:
        if scale is not None:
            yield Probe("embedding scale", {"input_embedding_scale": round(float(scale), 6)})


def _windows(config, longest: int) -> Iterator[Probe]:
    full, sliding = ["full_attention"] * config.num_hidden_layers, ["sliding_attention"] * config.num_hidden_layers
    yield Probe("window", {"layer_types": full, "use_swa": False})
    named = [config.option("swa_window_size"), config.sliding_window]
    for window in dict.fromkeys(w for w in (*named, *WINDOWS) if w is not None and w < longest):
        size = {"sliding_window": window, "swa_window_size": window}
        for layer_types in (config.layer_types, sliding, [*sliding[:-1], full[0]]):
            if "sliding_attention" in layer_types:
                yield Probe("window", {"layer_types": layer_types, "is_causal": None} | size)
                yield Probe("window", {"layer_types": layer_types, "is_causal": False} | size)


def _causality(config) -> Iterator[Probe]:
    for causal in (False, True, None):
        changes = {"is_causal": causal}
        if causal is None and "causal" in config.dflash_config:
            changes["causal"] = None
        yield Probe("causality", changes)


def _rope(config, text) -> Iterator[Probe]:
    yield Probe("RoPE style", {"is_neox_style": not config.is_neox_style})
    now = config.rope_parameters
    of_target = getattr(text, "rope_parameters", None) or {}
    of_target = of_target.get("full_attention", of_target)  # targets with a base for each kind of layer
    if "rope_theta" in of_target:
        for base in dict.fromkeys([of_target["rope_theta"], *ROPE_BASES]):
            yield Probe("RoPE base", {"rope_parameters": now | {"rope_theta": float(base)}})
        yield Probe("RoPE scaling", {"rope_parameters": dict(of_target)})
    if now.get("rope_type", "default") != "default":
        plain = {"rope_type": "default", "rope_theta": now["rope_theta"]}
        yield Probe("RoPE scaling", {"rope_parameters": plain})
