"""Held-out figures of a drafter by teacher forcing: the cycles of generation, without generating."""

import torch

from .objective import IGNORE, Blocks, block_states, pack, possible_anchors, weight_of


@torch.no_grad()
def walk(model, drafter, items: list[dict], head, target_embeddings, gamma: float) -> torch.Tensor:
    """Walk through the answers as greedy generation would: each cycle commits the drafts that are right and one token.

    All blocks of the answers are one drafter pass; the LM head is applied to those that the walk comes to. The token
    that the prefill gives is not counted, as in `DFlashRun.tau`.

    Args:
        model: the drafter, or what wraps it.
        drafter: the drafter inside.
        items: dicts with `ids`, `spans` and `features`, as for `pack`.
        head: states `[m, D]` to logits `[m, V]`.
        target_embeddings: the target's embedding module.
        gamma: of the loss.

    Returns:
        `[len(items), 4 + 4 K]` float64, sums for each item: loss and weight of the blocks walked through, tokens
        committed, cycles; then for each draft slot: cycles that accepted it, cycles that offered it, labels that it
        had right on its own, labels.
    """
    K = drafter.config.num_drafts
    anchors = [possible_anchors(item["spans"]) for item in items]
    found = torch.zeros(len(items), 4 + 4 * K, dtype=torch.float64)
    if not any(anchors):
        anchors[0] = [0]  # no labels, but a pass: processes that share a sharded drafter make each one together
    blocks: Blocks = pack(items, anchors, drafter.config)
    states = block_states(model, drafter, blocks, target_embeddings)
    firsts = [0]  # of each item among the blocks
    for of in anchors:
        firsts.append(firsts[-1] + len(of))
    number = [{anchor: firsts[n] + i for i, anchor in enumerate(of)} for n, of in enumerate(anchors)]
    places = [(n, start, stop) for n, item in enumerate(items) for start, stop in item["spans"] if stop - start > 1]
    weights = weight_of(blocks.labels, gamma)
    while places:
        rows = torch.tensor([number[n][position] for n, position, _ in places], device=states.device)
        labels, weight = blocks.labels[rows], weights[rows]
        logits = head(states[rows].flatten(0, 1)).float()  # [m * K, V]
        losses = torch.nn.functional.cross_entropy(
            logits, labels.flatten(), reduction="none", ignore_index=IGNORE
        ).view_as(labels)
        right = (logits.argmax(-1).view_as(labels) == labels).cpu()
        there, losses = (labels != IGNORE).cpu(), (losses * weight).sum(1).double().cpu()
        further = []
        for i, (n, position, stop) in enumerate(places):
            # The last cycle is cut so that its drafts and the bonus token just fit, as generation does at max_length.
            offered = min(K, stop - position - 2)
            accepted = int(right[i, :offered].long().cumprod(0).sum())
            row = found[n]
            row[0] += losses[i]
            row[1] += weight[i].sum().double().cpu()
            row[2] += accepted + 1
            row[3] += 1
            row[4 : 4 + accepted] += 1
            row[4 + K : 4 + K + offered] += 1
            row[4 + 2 * K : 4 + 3 * K] += right[i] & there[i]
            row[4 + 3 * K :] += there[i]
            if position + accepted + 1 < stop - 1:
                further.append((n, position + accepted + 1, stop))
        places = further
    return found


def figures(rows: torch.Tensor) -> dict[str, float]:
    """Pool rows of `walk` into `loss`, `tau` and `accuracy_k` for every slot k from 1."""
    total = rows.sum(0).tolist()
    K = (len(total) - 4) // 4
    right, labels = total[4 + 2 * K : 4 + 3 * K], total[4 + 3 * K :]
    result = {"loss": total[0] / max(total[1], 1e-9), "tau": total[2] / max(total[3], 1.0)}
    for k in range(K):
        result[f"accuracy_{k + 1}"] = right[k] / max(labels[k], 1.0)
    return result
