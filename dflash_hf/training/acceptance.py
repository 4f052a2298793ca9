"""Held-out figures of a drafter by teacher forcing: the cycles of generation, without generating."""

import torch

from .objective import IGNORE, block_states, pack, possible_anchors, weight_of

BLOCKS_IN_A_PASS = 256  # of the drafter, over all items of a batch
ROWS_OF_LOGITS = 256  # at a time


def num_passes(items: list[dict]) -> int:
    """Drafter passes that `walk` makes for these items, one at the least."""
    longest = max(len(possible_anchors(item["spans"])) for item in items)
    return max(1, -(-longest // _window(items)))


def _window(items: list[dict]) -> int:
    """Anchors of each item in a pass."""
    return max(1, BLOCKS_IN_A_PASS // len(items))


def _up_to(item: dict, stop: int) -> dict:
    """As much of an item as blocks and labels before `stop` need."""
    return {"ids": item["ids"][:stop], "spans": item["spans"], "features": item["features"][:stop]}


@torch.no_grad()
def walk(
    model, drafter, items: list[dict], head, target_embeddings, gamma: float, passes: int | None = None
) -> torch.Tensor:
    """Walk through the answers as greedy generation would: each cycle commits the drafts that are right and one token.

    A drafter pass makes the blocks of the next anchors of every item, BLOCKS_IN_A_PASS in all; the LM head is applied
    to those that the walk comes to, ROWS_OF_LOGITS states at a time. The token that the prefill gives is not counted,
    as in `DFlashRun.tau`.

    Args:
        model: the drafter, or what wraps it.
        drafter: the drafter inside.
        items: dicts with `ids`, `spans` and `features`, as for `pack`.
        head: states `[m, D]` to logits `[m, V]`.
        target_embeddings: the target's embedding module.
        gamma: of the loss.
        passes: make so many, of which the last may find nothing: processes that share a sharded drafter make each one
            together. Unset: `num_passes(items)`, the least.

    Returns:
        `[len(items), 4 + 4 K]` float64, sums for each item: loss and weight of the blocks walked through, tokens
        committed, cycles; then for each draft slot: cycles that accepted it, cycles that offered it, labels that it
        had right on its own, labels.
    """
    K, window = drafter.config.num_drafts, _window(items)
    anchors = [possible_anchors(item["spans"]) for item in items]
    found = torch.zeros(len(items), 4 + 4 * K, dtype=torch.float64)
    waiting = [(n, start, stop) for n, item in enumerate(items) for start, stop in item["spans"] if stop - start > 1]
    for number in range(num_passes(items) if passes is None else passes):
        of_items = {n: of[number * window :][:window] for n, of in enumerate(anchors)}
        of_items = {n: of for n, of in of_items.items() if of} or {0: [0]}
        seen = [_up_to(items[n], of[-1] + K + 1) for n, of in of_items.items()]
        blocks = pack(seen, list(of_items.values()), drafter.config)
        states = block_states(model, drafter, blocks, target_embeddings)
        labels, weights = blocks.labels.cpu(), weight_of(blocks.labels, gamma).cpu()
        rows = {place: row for row, place in enumerate((n, anchor) for n, of in of_items.items() for anchor in of)}
        here = [place for place in waiting if place[:2] in rows]
        waiting = [place for place in waiting if place[:2] not in rows]
        while here:
            places, here = here[: max(1, ROWS_OF_LOGITS // K)], here[max(1, ROWS_OF_LOGITS // K) :]
            chosen = [rows[place[:2]] for place in places]
            label, weight = labels[chosen], weights[chosen]  # [m, K]
            logits = head(states[chosen].flatten(0, 1)).float()  # [m * K, V], on the head's device
            losses = torch.nn.functional.cross_entropy(
                logits, label.flatten().to(logits.device), reduction="none", ignore_index=IGNORE
            ).view_as(label)
            right, there = logits.argmax(-1).view_as(label).cpu() == label, label != IGNORE
            # A reduced vocabulary cannot say every token: as in training, those count for tau and not for the loss.
            sayable = logits.gather(1, label.flatten()[:, None].clamp(min=0).to(logits.device)) != -torch.inf
            weight = weight * sayable.view_as(label).cpu()
            losses = torch.where(weight > 0, losses.cpu() * weight, 0.0).sum(1).double()
            for i, (n, position, stop) in enumerate(places):
                # The last cycle is cut so that its drafts and the bonus token just fit, as generation at max_length.
                offered = min(K, stop - position - 2)
                accepted = int(right[i, :offered].long().cumprod(0).sum())
                row = found[n]
                row[0] += losses[i]
                row[1] += weight[i].sum().double()
                row[2] += accepted + 1
                row[3] += 1
                row[4 : 4 + accepted] += 1
                row[4 + K : 4 + K + offered] += 1
                row[4 + 2 * K : 4 + 3 * K] += right[i] & there[i]
                row[4 + 3 * K :] += there[i]
                if position + accepted + 1 < stop - 1:
                    place = (n, position + accepted + 1, stop)
                    (here if place[:2] in rows else waiting).append(place)
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
