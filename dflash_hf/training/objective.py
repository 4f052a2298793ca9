"""The training objective (paper, section 4): blocks at random anchors, one masked drafter pass, a weighted loss.

Sequences are packed: the contexts of all sequences in a batch stand in one row of T positions, their N blocks of L
tokens in another. Block n sees the context positions `visible[n] = [start, stop)`, which are its own sequence's tokens
before its anchor, and itself; blocks never see each other. With K drafts a block, draft d (from 0) is about the token
d + 1 places behind the anchor.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "blocks_at_anchors"  # the drafter refuses names with "flash" in them
IGNORE = -100
# Queries of one call of sdpa on a CPU: its mask has this many rows, and a group's keys end at its last anchor.
QUERIES_IN_A_GROUP = 128
# Logits that are there at a time: 16 MB in float32, which a CPU's caches hold better than more, but at least so many
# rows that reading the head's weight is worth it: 64, and 256 on CUDA, which is 156 MB for 152k tokens. Together with
# what their loss needs it is up to six times that.
LOGITS_IN_A_CHUNK, ROWS_IN_A_CHUNK, ROWS_ON_CUDA = 2**22, 64, 256
TILE = 128  # queries and keys of one tile of FlexAttention, its default


def loss_decay(block_size: int) -> float:
    """The paper's gamma (equation 4): 4, 5 and 7 for blocks of 8, 10 and 16.

    Between and beyond those it is ours: linear, and half the block below 8.

    >>> [loss_decay(size) for size in (4, 8, 10, 13, 16)]
    [2.0, 4.0, 5.0, 6.0, 7.0]
    """
    if block_size <= 10:
        return block_size / 2
    return 5 + (block_size - 10) / 3


def slot_weights(num_drafts: int, gamma: float) -> torch.Tensor:
    """`[K]` float32: exp(-(k - 1) / gamma) for the k-th draft, counted from 1 (equation 4).

    >>> slot_weights(3, 4.0)
    tensor([1.0000, 0.7788, 0.6065])
    """
    return torch.exp(-torch.arange(num_drafts) / gamma)


def possible_anchors(spans: list[tuple[int, int]]) -> list[int]:
    """Positions in an answer that have a token of the same answer behind them, as every anchor in generation has.

    >>> possible_anchors([(3, 6), (9, 10)])
    [3, 4]
    """
    return [position for start, stop in spans for position in range(start, stop - 1)]


def draw_anchors(
    spans: list[tuple[int, int]], count: int, seed: int, epoch: int, sample_id: str, occurrence: int = 0
) -> list[int]:
    """At most `count` different anchors, in order; the same for the same seed, epoch and sample on every process.

    Args:
        occurrence: counts the places of a data set that hold the sample, from 0: each draws its own anchors.
    """
    anchors = possible_anchors(spans)
    if len(anchors) > count:
        which = f"{seed}/{epoch}/{sample_id}" + (f"/{occurrence}" if occurrence else "")
        anchors = sorted(random.Random(which).sample(anchors, count))
    return anchors


# -- batches --


@dataclass
class Blocks:
    """Packed sequences and their blocks; T context positions, N blocks of L tokens, K drafts a block.

    Attributes:
        features: `[1, T, F * D_t]`, or None while they are still to be computed.
        final: `[T, D_t]` final hidden states of the target, for distillation, or None.
        block_ids: `[1, N * L]` long, anchor and mask tokens.
        position_ids: `[1, T + N * L]` long, of the context and then the blocks, counted in each sequence.
        visible: `[N, 2]` long, the context positions that a block sees.
        labels: `[N, K]` long, `IGNORE` behind the end of the answer.
        teachers: `[N, K]` long, rows of `final` from which the target predicts those labels.
        owners: `[N]` long, the sequence that each block belongs to.
    """

    features: torch.Tensor | None
    final: torch.Tensor | None
    block_ids: torch.Tensor
    position_ids: torch.Tensor
    visible: torch.Tensor
    labels: torch.Tensor
    teachers: torch.Tensor
    owners: torch.Tensor


def pack(items: list[dict], anchors: list[list[int]], config) -> Blocks:
    """Put sequences side by side, each with a block at every anchor.

    Args:
        items: dicts with `ids` `[S]` long, `spans`, and where they are known `features` `[S, F * D_t]` and `final`
            `[S, D_t]`.
        anchors: of each item, in order.
        config: the drafter's.
    """
    L, K = config.block_size, config.num_drafts
    starts = [0]
    for item in items:
        starts.append(starts[-1] + len(item["ids"]))
    ids = torch.cat([item["ids"] for item in items])
    device = ids.device
    owners = torch.tensor([n for n, of in enumerate(anchors) for _ in of], dtype=torch.long, device=device)
    local = torch.tensor([anchor for of in anchors for anchor in of], dtype=torch.long, device=device)
    begin = torch.tensor(starts, dtype=torch.long, device=device)[owners]  # [N]
    stops = []  # of the answer that each anchor is in, in the row
    for n, (item, of) in enumerate(zip(items, anchors, strict=True)):
        for anchor in of:
            stop = next((stop for start, stop in item["spans"] if start <= anchor < stop), 0)  # 0: no labels
            stops.append(starts[n] + stop)
    ends = torch.tensor(stops, dtype=torch.long, device=device)
    row = begin + local  # [N] the anchors in the row
    block_ids = torch.full((len(row), L), config.mask_token_id, dtype=torch.long, device=device)
    block_ids[:, 0] = ids[row]
    about = row[:, None] + torch.arange(1, K + 1, device=device)  # [N, K] what the drafts are about
    labels = torch.where(about < ends[:, None], ids[about.clamp(max=len(ids) - 1)], IGNORE)
    positions = torch.cat([torch.arange(len(item["ids"]), device=device) for item in items])
    block_positions = local[:, None] + torch.arange(L, device=device)
    has = {name: all(item.get(name) is not None for item in items) for name in ("features", "final")}
    return Blocks(
        features=torch.cat([item["features"] for item in items])[None] if has["features"] else None,
        final=torch.cat([item["final"] for item in items]) if has["final"] else None,
        block_ids=block_ids.view(1, -1),
        position_ids=torch.cat([positions, block_positions.flatten()])[None],
        visible=torch.stack([begin, row], dim=1),
        labels=labels,
        teachers=(about - 1).clamp(max=len(ids) - 1),
        owners=owners,
    )


def weight_of(labels: torch.Tensor, gamma: float) -> torch.Tensor:
    """`[N, K]` float32: the weight of every label, 0 where there is none."""
    return slot_weights(labels.shape[1], gamma).to(labels.device) * (labels != IGNORE)


# -- attention --


def visibility(
    visible: torch.Tensor, block_size: int, first: int, stop: int, *, causal: bool, window: int | None
) -> torch.Tensor:
    """Who sees whom: bool `[n * L, (stop - first) + n * L]` for n blocks over context `[first, stop)` and themselves.

    The rule is that of `block_mask` in the drafter. Context stands before the anchor, so causality only matters
    inside the block.

    Args:
        visible: `[n, 2]` of these blocks.
    """
    n, L, device = len(visible), block_size, visible.device
    slots = torch.arange(L, device=device)
    begin, anchor = visible.repeat_interleave(L, dim=0).unbind(1)  # [n * L]
    query = anchor + slots.repeat(n)  # where each query stands, in the row
    keys = torch.arange(first, stop, device=device)
    context = (keys >= begin[:, None]) & (keys < anchor[:, None])
    inside = torch.ones(L, L, dtype=torch.bool, device=device)
    if causal:
        inside = inside & (slots <= slots[:, None])
    if window is not None:
        context = context & (keys > query[:, None] - window)
        inside = inside & (slots > slots[:, None] - window) & (slots < slots[:, None] + window)
    block = torch.arange(n, device=device).repeat_interleave(L)
    own = (block == block[:, None]) & inside.repeat(n, n)
    return torch.cat([context, own], dim=1)


def _groups(visible: torch.Tensor, block_size: int) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring blocks of one sequence, about QUERIES_IN_A_GROUP queries each."""
    begins, most = visible[:, 0].tolist(), max(1, QUERIES_IN_A_GROUP // block_size)
    start = 0
    for n in range(1, len(begins) + 1):
        if n == len(begins) or begins[n] != begins[start] or n - start == most:
            yield start, n
            start = n


def block_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Attention function of transformers' registry: blocks over packed contexts; with any other mask it is sdpa.

    Args:
        module: a `DFlashAttention`, whose `causal` and `window` count.
        query: `[1, H, N * L, head_dim]`.
        key, value: `[1, H_kv, T + N * L, head_dim]`.
        attention_mask: `Blocks.visible` as `[1, 1, N, 2]`, long. Blocks that follow each other should be of one
            sequence, in the order of their anchors.

    Returns:
        `[1, N * L, H, head_dim]` and None.
    """
    if attention_mask is None or attention_mask.is_floating_point() or attention_mask.dtype == torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    visible = attention_mask[0, 0]
    L = query.shape[2] // len(visible)
    T = key.shape[2] - query.shape[2]
    if query.device.type == "cuda":
        return _flex(module, query, key, value, attention_mask, L, T, scaling), None
    groups = list(_groups(visible, L))
    # Split into sequences and groups at once: the gradient of a slice is as large as all that it is cut from.
    begins = sorted({0, *visible[:, 0].tolist()})
    starts = [start * L for start, _ in groups]
    (context_k, own_k), (context_v, own_v) = (part.split([T, len(visible) * L], dim=2) for part in (key, value))
    context_k, context_v = (dict(zip(begins, _split(part, begins), strict=True)) for part in (context_k, context_v))
    queries, own_k, own_v = (_split(part, starts) for part in (query, own_k, own_v))
    found = []
    for n, (start, stop) in enumerate(groups):
        mine = visible[start:stop]
        first, last = int(mine[0, 0]), int(mine[:, 1].max())
        mask = visibility(mine, L, first, last, causal=module.causal, window=module.window)
        k = torch.cat([context_k[first][:, :, : last - first], own_k[n]], dim=2)
        v = torch.cat([context_v[first][:, :, : last - first], own_v[n]], dim=2)
        out, _ = sdpa_attention_forward(module, queries[n], k, v, mask[None, None], dropout, scaling)
        found.append(out)
    return torch.cat(found, dim=1), None


def _split(tensor: torch.Tensor, starts: list[int]) -> tuple[torch.Tensor, ...]:
    """The parts of `[1, H, S, head_dim]` that begin at `starts`, of which the first is 0."""
    return tensor.split([stop - start for start, stop in itertools.pairwise([*starts, tensor.shape[2]])], dim=2)


def _flex(module, query, key, value, attention_mask, block_size: int, T: int, scaling) -> torch.Tensor:
    """The same by FlexAttention, which skips the tiles that are hidden. No mask of every pair is ever there."""
    from torch.nn.attention.flex_attention import flex_attention

    # The layers of one pass share a mask where their rule is the same; the tensor is theirs alone.
    masks = attention_mask.__dict__.setdefault("block_masks", {})
    rule = (module.causal, module.window)
    if rule not in masks:
        masks[rule] = tiles(attention_mask[0, 0], block_size, T, causal=module.causal, window=module.window)
    # Under autocast the norms and RoPE leave queries and keys in float32; FlexAttention wants one dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    attend = _compiled(flex_attention) if query.device.type == "cuda" else flex_attention
    out = attend(query, key, value, block_mask=masks[rule], scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2)


def tiles(visible: torch.Tensor, block_size: int, T: int, *, causal: bool, window: int | None):
    """The rule of `visibility` as a `BlockMask`, for all blocks over a context of T.

    A query sees two ranges of keys, of its context and of its own block. `create_block_mask` would ask about every
    pair of query and key first (1 byte each, twice); comparing the ranges with the tiles takes one for every pair of
    query and tile.

    Args:
        visible: `[N, 2]`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    L, device = block_size, visible.device
    Q, K = len(visible) * L, T + len(visible) * L
    begin, anchor = visible.repeat_interleave(L, dim=0).unbind(1)  # [Q]
    query = torch.arange(Q, device=device)
    slot = query % L
    block = T + query - slot  # the first key of the query's own block
    low, high = torch.zeros_like(slot), torch.full_like(slot, L)  # of the slots that it sees there, [low, high)
    if causal:
        high = slot + 1
    if window is not None:
        begin = torch.maximum(begin, anchor + slot - window + 1)
        low, high = (slot - window + 1).clamp(min=0), torch.minimum(high, slot + window)
    low, high = block + low, block + high

    def sees(batch, head, q, k):
        return ((k >= begin[q]) & (k < anchor[q])) | ((k >= low[q]) & (k < high[q]))

    def by_tile(of_queries: torch.Tensor) -> torch.Tensor:
        """`[Q, n]` to `[tiles of queries, TILE, n]`."""
        return torch.nn.functional.pad(of_queries, (0, 0, 0, -Q % TILE)).unflatten(0, (-1, TILE))

    first = torch.arange(0, K, TILE, device=device)  # keys of the tiles
    last = first + TILE
    touched = full = torch.zeros((), dtype=torch.bool, device=device)
    # Between the ranges lies the anchor's own position, which no query sees: no tile is full of both together.
    for start, stop in ((begin[:, None], anchor[:, None]), (low[:, None], high[:, None])):
        touched = touched | by_tile((start < stop) & (start < last) & (stop > first)).any(1)
        full = full | by_tile((start <= first) & (stop >= last)).all(1)

    def in_order(which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `BlockMask` wants it: how many tiles a row has, and their numbers before all others."""
        which = which[None, None].int()
        return which.sum(-1).int(), which.argsort(dim=-1, descending=True, stable=True).int()

    return BlockMask.from_kv_blocks(
        *in_order(touched & ~full), *in_order(full), BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(Q, K)
    )


@functools.cache
def _compiled(function):
    return torch.compile(function)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, block_attention)


def _whole_mask(module, args, kwargs):
    """A sink is one more key with a bias, which needs the whole mask of the sequences in this batch."""
    masks, queries = kwargs["masks"], args[0].shape[1]

    def whole(causal: bool, window: int | None, num_keys: int) -> torch.Tensor | None:
        mask = masks(causal, window, num_keys)
        if mask is None or mask.dtype != torch.long:
            return mask
        visible = mask[0, 0]
        L = queries // len(visible)
        return visibility(visible, L, 0, num_keys - queries, causal=causal, window=window)[None, None]

    return args, kwargs | {"masks": whole}


def use_block_attention(drafter) -> None:
    """Let a drafter take `Blocks.visible` as its attention mask. Other masks work as before, by sdpa."""
    if drafter.config._attn_implementation == ATTENTION:
        return
    drafter.config._attn_implementation = ATTENTION
    for layer in drafter.layers:
        if layer.self_attn.attention_sink_bias is not None:
            layer.self_attn.register_forward_pre_hook(_whole_mask, with_kwargs=True)


def block_states(model, drafter, blocks: Blocks, target_embeddings) -> torch.Tensor:
    """One drafter pass: the states `[N, K, D]` of the slots that draft, ready for the LM head.

    Args:
        model: the drafter, or what wraps it (DDP, FSDP, peft).
        drafter: the drafter inside, after `use_block_attention`.
        blocks: with features.
        target_embeddings: the target's embedding module; not trained, nor is a drafter's own.
    """
    config = drafter.config
    with torch.no_grad():
        noise = drafter.embed_block(blocks.block_ids, target_embeddings)
    states = model(
        noise_embeds=noise,
        context_hidden_states=blocks.features,
        position_ids=blocks.position_ids,
        attention_mask=blocks.visible[None, None],
    ).last_hidden_state
    return states.view(-1, config.block_size, states.shape[-1])[:, config.block_size - config.num_drafts :]


# -- loss --


class _Chunked(torch.autograd.Function):
    """Sum of a loss over rows, a chunk at a time; the gradient is taken with the loss, so no logits are kept."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, loss_of: Callable, rows: int, wants_gradient: bool) -> torch.Tensor:
        total = states.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(states) if wants_gradient else None
        for start in range(0, len(states), rows):
            part = slice(start, start + rows)
            loss, of_part = loss_of(states[part].detach(), part, wants_gradient)
            if gradient is not None:
                gradient[part] = of_part
            total += loss
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output.to(gradient.dtype), None, None, None


def weighted_loss(
    states: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    teacher: Callable[[torch.Tensor], torch.Tensor] | None = None,
    teachers: torch.Tensor | None = None,
    distillation_weight: float = 0.0,
) -> torch.Tensor:
    """Sum over rows of weight x ((1 - a) cross-entropy + a KL(target || drafter)), a the distillation weight.

    Args:
        states: `[M, D]`, of slots that have a label.
        labels: `[M]` long, here and below on the device of `states`.
        weights: `[M]` float32.
        head: frozen; states `[m, D]` to logits `[m, V]`, row by row, on its own device. Tokens that it never gives are
            -inf in every row.
        vocab_size: V, which says how many rows are done at a time.
        teacher: positions `[u]` to the target's logits `[u, V]`; needed where `distillation_weight` is above 0.
        teachers: `[M]` long, the position from which the target predicts each label. Blocks overlap, so a position
            occurs several times in a chunk; the teacher is asked for it once.

    Returns:
        A float32 scalar on the device of `states`.
    """
    a = distillation_weight

    def loss_of(chunk, part, wants_gradient):
        with torch.set_grad_enabled(wants_gradient):
            chunk = chunk.requires_grad_(wants_gradient)
            logits = head(chunk).float()
        with torch.no_grad():
            right = labels[part, None].to(logits.device)  # the head may be the target's, on another device
            log_q = logits.log_softmax(-1)
            losses = (a - 1) * log_q.gather(1, right)[:, 0]
            mass = None  # of the target's distribution on the tokens that the head gives, where it is not 1
            if a > 0:
                positions, which = teachers[part].unique(return_inverse=True)
                log_p, which = teacher(positions).to(logits).log_softmax(-1), which.to(logits.device)
                p, known = log_p.exp(), log_q
                negentropy = (p * log_p).sum(-1)
                absent = logits[0] == float("-inf")
                if absent.any():  # a reduced draft vocabulary: tokens that it does not hold leave the divergence
                    p, known = p.masked_fill(absent, 0.0), log_q.masked_fill(absent, 0.0)
                    negentropy, mass = (p * log_p).sum(-1), p.sum(-1)[which, None]
                p = p[which]
                losses = losses + a * (negentropy[which] - torch.linalg.vecdot(p, known))
            total = (losses.to(chunk.device) * weights[part]).sum()
            if not wants_gradient:
                return total, None
            # By the logits: softmax minus the distribution that is wanted. In place, as memory traffic is what costs.
            gradient = log_q.exp_()
            if a > 0:
                if mass is not None:
                    gradient.mul_(1 - a + a * mass)
                gradient.sub_(p, alpha=a)
            gradient.scatter_add_(1, right, torch.full_like(losses, a - 1)[:, None])
        (of_states,) = torch.autograd.grad(logits, chunk, gradient)
        return total, of_states * weights[part, None].to(of_states)

    least = ROWS_ON_CUDA if states.device.type == "cuda" else ROWS_IN_A_CHUNK
    rows = max(least, LOGITS_IN_A_CHUNK // vocab_size)
    return _Chunked.apply(states, loss_of, rows, torch.is_grad_enabled() and states.requires_grad)
