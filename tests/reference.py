"""A second, slow and literal DFlash drafter, to hold the real one against.

Plain functions over a raw checkpoint (state dict with z-lab names, config.json as a dict). No cache: the
whole context comes at once, and every query meets every key through one explicit mask. Runs in the dtype of
its inputs, float32 or float64. S context tokens, L block tokens, D drafter width, d head_dim, n features,
V target vocabulary.
"""

import math

import torch


# --------------------------------------------------------------------------------------------- config readers
def option(config: dict, name: str, default=None):
    """An option lives in `dflash_config` (newer checkpoints) or at the top level (older); null is unset."""
    for place in (config.get("dflash_config") or {}, config):
        if place.get(name) is not None:
            return place[name]
    return default


def block_size(config: dict) -> int:
    return int(option(config, "block_size", 16))  # the paper's default


def mask_token_id(config: dict) -> int:
    return int(option(config, "mask_token_id"))


def target_layer_ids(config: dict) -> list[int]:
    """Ids count the target's decoder layers from 0: id i is the OUTPUT of layer i, `hidden_states[i + 1]`."""
    ids = option(config, "target_layer_ids")
    if ids is not None:
        return [int(i) for i in ids]
    # Absent: spread from the second layer to the third-to-last; a single draft layer takes the middle one.
    n, target = config["num_hidden_layers"], config["num_target_layers"]
    if n == 1:
        return [target // 2]
    return [round(1 + k * (target - 4) / (n - 1)) for k in range(n)]


def layer_slides(config: dict, i: int) -> bool:
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    # use_swa makes every layer slide, but only where layer_types says nothing of sliding.
    if (config.get("dflash_config") or {}).get("use_swa") and "sliding_attention" not in types:
        return True
    return types[i] == "sliding_attention"


def layer_window(config: dict, i: int) -> int | None:
    """Of a sliding layer: swa_window_size, else the raw sliding_window, whatever use_sliding_window says."""
    if not layer_slides(config, i):
        return None
    window = (config.get("dflash_config") or {}).get("swa_window_size")
    return int(config["sliding_window"] if window is None else window)


def layer_causal(config: dict, i: int) -> bool:
    if config.get("is_causal") is not None:  # the config's own word comes first,
        return bool(config["is_causal"])
    causal = (config.get("dflash_config") or {}).get("causal")
    if causal is not None:  # then dflash_config's,
        return bool(causal)
    # else causal exactly where layer_types says sliding (sliding through use_swa alone is not causal).
    types = config.get("layer_types")
    return bool(types) and types[i] == "sliding_attention"


def layer_has_sink(config: dict, i: int) -> bool:
    """attention_sink_bias puts sinks on every layer, add_swa_attention_sink_bias on the sliding ones."""
    if option(config, "attention_sink_bias"):
        return True
    return bool(option(config, "add_swa_attention_sink_bias")) and layer_slides(config, i)


# ------------------------------------------------------------------------------------------------------- RoPE
def rope_frequencies(config: dict, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    """Radians a position, [d / 2] in float64, and the factor on cos and sin (1 but for yarn and longrope).

    `length` positions are in use; two kinds hang on it.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    freqs = theta ** (-2 * pairs / head_dim)
    if kind == "default":
        return freqs, 1.0
    if kind == "linear":  # positions are squeezed by the factor
        return freqs / scaling["factor"], 1.0
    if kind == "dynamic":  # beyond the trained length the base grows with the length (NTK-aware scaling)
        trained, factor = config["max_position_embeddings"], scaling["factor"]
        stretch = factor * max(length, trained) / trained - (factor - 1)
        return (theta * stretch ** (head_dim / (head_dim - 2))) ** (-2 * pairs / head_dim), 1.0
    if kind == "llama3":
        # Llama 3.1: short waves stay, long ones are squeezed, between them the share of each is linear in how often
        # the wave fits into the trained length.
        turns = scaling["original_max_position_embeddings"] * freqs / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return freqs * kept + freqs / scaling["factor"] * (1 - kept), 1.0
    if kind == "longrope":  # LongRoPE (arXiv 2402.13753): a searched factor for every pair, one set for each range
        trained = scaling["original_max_position_embeddings"]
        factors = scaling["long_factor" if length > trained else "short_factor"]
        factor = scaling.get("factor") or config["max_position_embeddings"] / trained
        attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        return freqs / torch.tensor(factors, dtype=torch.float64), scaling.get("attention_factor") or attention
    if kind != "yarn":
        raise NotImplementedError(f"rope type {kind!r}")

    # YaRN (arXiv 2309.00071): pairs that turn often within the original length keep their frequency, pairs
    # that turn less than once are interpolated like linear scaling, a ramp over the pair index joins the two.
    trained = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = scaling.get("factor") or config["max_position_embeddings"] / trained

    def pair_turning(turns: float) -> float:  # the (fractional) pair that turns this often within that length
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(scaling.get("beta_fast") or 32), pair_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    interpolated = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
    freqs = freqs * (1 - interpolated) + freqs / factor * interpolated

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        own, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = mscale(own) / mscale(all_dim) if own and all_dim else mscale(1.0)
    return freqs, attention


def rotate(x: torch.Tensor, positions: torch.Tensor, config: dict) -> torch.Tensor:
    """Rotate [T, heads, d] by its positions. Pair i is (i, i + d/2), or (2i, 2i + 1) when not neox style."""
    freqs, attention = rope_frequencies(config, x.shape[-1], int(positions.max()) + 1)
    angles = positions.to(torch.float64)[:, None] * freqs  # [T, d / 2]
    cos = (angles.cos() * attention).to(x.dtype)[:, None]
    sin = (angles.sin() * attention).to(x.dtype)[:, None]
    half = x.shape[-1] // 2
    neox = config.get("is_neox_style", True)
    first, second = (slice(0, half), slice(half, None)) if neox else (slice(0, None, 2), slice(1, None, 2))
    out = torch.empty_like(x)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


# -------------------------------------------------------------------------------------------------- the model
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(sd: dict, config: dict, i: int, features, hidden, context_positions, block_positions):
    """Queries from the block only; keys and values from the context features, then the block. [L, D]"""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    eps, name = config["rms_norm_eps"], f"layers.{i}.self_attn."

    def project(x, which, count=None):
        y = x @ sd[f"{name}{which}_proj.weight"].T
        if config.get("attention_bias"):  # biases on q, k, v and o
            y = y + sd[f"{name}{which}_proj.bias"]
        return y if count is None else y.view(len(x), count, head_dim)

    source = torch.cat([features, hidden])  # [S + L, D]: one W_K and one W_V for both
    positions = torch.cat([context_positions, block_positions])
    # Every q and k head goes through its RMSNorm before RoPE.
    q = rms_norm(project(hidden, "q", heads), sd[name + "q_norm.weight"], eps)
    k = rms_norm(project(source, "k", kv_heads), sd[name + "k_norm.weight"], eps)
    v = project(source, "v", kv_heads)
    q, k = rotate(q, block_positions, config), rotate(k, positions, config)

    distance = block_positions[:, None] - positions[None, :]  # [L, S + L], positive looks back
    visible = torch.ones_like(distance, dtype=torch.bool)
    causal, window = layer_causal(config, i), layer_window(config, i)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance < window  # keys at positions > p - window
        if not causal:
            visible &= distance > -window  # and < p + window

    out = []
    for h in range(heads):
        group = h // (heads // kv_heads)  # GQA: neighbouring query heads share a key/value head
        logits = (q[:, h] @ k[:, group].T / math.sqrt(head_dim)).masked_fill(~visible, -math.inf)
        value = v[:, group]
        if layer_has_sink(config, i):  # one more logit in the softmax, whose value vector is zero
            sink = sd[name + "attention_sink_bias"][h].to(logits.dtype)
            logits = torch.cat([logits, sink.expand(len(logits), 1)], dim=1)
            value = torch.cat([value, torch.zeros_like(value[:1])])
        out.append(logits.softmax(-1) @ value)
    return project(torch.cat(out, dim=-1), "o")


def reference_draft_hidden(
    state_dict: dict, config: dict, context, block_embeds, context_positions, block_positions
) -> torch.Tensor:
    """From [S, n * D_target] context states and [L, D] embeddings to [L, D] hidden after the final norm."""
    sd, eps = state_dict, config["rms_norm_eps"]
    # One projection and one norm make the context features; they skip residual stream, W_Q, W_O and MLP.
    features = rms_norm(context @ sd["fc.weight"].T, sd["hidden_norm.weight"], eps)
    hidden = block_embeds
    for i in range(config["num_hidden_layers"]):
        name = f"layers.{i}."
        normed = rms_norm(hidden, sd[name + "input_layernorm.weight"], eps)
        hidden = hidden + attention(sd, config, i, features, normed, context_positions, block_positions)
        normed = rms_norm(hidden, sd[name + "post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(normed @ sd[name + "mlp.gate_proj.weight"].T)  # hidden_act: silu
        up = normed @ sd[name + "mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ sd[name + "mlp.down_proj.weight"].T
    return rms_norm(hidden, sd["norm.weight"], eps)


def reference_block_embeds(state_dict: dict, config: dict, table, ids, mask_embedding=None) -> torch.Tensor:
    """Rows of the target's RAW table [V, D] for ids [L]; own embed_tokens instead if shipped."""
    embeds = state_dict.get("embed_tokens.weight", table)[ids]
    if mask_embedding is not None:  # stands in for the mask token's row
        embeds = torch.where((ids == mask_token_id(config))[:, None], mask_embedding.to(embeds), embeds)
    return embeds * option(config, "input_embedding_scale", 1.0)


def reference_logits(state_dict: dict, config: dict, hidden, table_head) -> torch.Tensor:
    """[L, V] logits through the target's head [V, D], or through an own lm_head if shipped."""
    logits = hidden @ state_dict.get("lm_head.weight", table_head).T
    logits = logits * option(config, "output_multiplier", 1.0)
    cap = option(config, "final_logit_softcapping")
    if cap is not None and cap > 0:  # after the multiplier
        logits = cap * torch.tanh(logits / cap)
    d2t = state_dict.get("d2t")
    if d2t is None:
        return logits
    # Reduced vocabulary: draft id j is target id j + d2t[j]; target ids without one are never proposed.
    spread = logits.new_full((*logits.shape[:-1], len(table_head)), -math.inf)
    spread[..., torch.arange(len(d2t)) + d2t] = logits
    return spread
