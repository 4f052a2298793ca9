"""Cycle efficiency: how much of a measured cycle is the two passes that no loop can do without."""

import copy
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache

from ..drafter.cache import DFlashContextCache
from .probe import Clock

PADDED_ROWS = 16  # float32 on the CPU: sixteen rows take a faster kernel than four to twelve do


@torch.no_grad()
def cycle_efficiency(
    target,
    drafter,
    cycle_s: float,
    *,
    batch_size: int = 1,
    context: int = 128,
    committed: int = 2,
    passes: int = 30,
) -> dict:
    """(bare target pass on the block + bare drafter and head pass) / measured cycle.

    The bare passes are timed on random ids behind a random context: the target on `[anchor, drafts]` with the hidden
    states captured that the drafter reads, and the drafter on `committed` new context features and a block, the head
    on its drafts. Each is timed as it is and with the fastest kernel for every shape of its linear layers
    (`best_kernels`); the smaller median counts.

    Args:
        target, drafter: the pair; both are left as they were.
        cycle_s: seconds of one measured cycle, drafting and verifying a full block.
        batch_size: sequences in a pass.
        context: positions in the target's cache.
        committed: new context features in a drafter pass.
        passes: timed passes of each kind.

    Returns:
        `efficiency`, `cycle_s`, and for target, drafter and head together `target_s`, `drafter_s` (the best), and
        under `as_it_is` and `best_kernels` both medians, with the names of the `kernels` chosen by shape.

    Raises:
        ValueError: `cycle_s` is not positive, or `committed` not below `context`.

    Example:
        >>> run = drafter.last_run                                                             # doctest: +SKIP
        >>> cycle_efficiency(target, drafter, (run.drafting_s + run.verifying_s) / run.cycles) # doctest: +SKIP
    """
    if cycle_s <= 0:
        raise ValueError(f"cycle_s must be the positive seconds of a measured cycle, got {cycle_s}.")
    if not 0 < committed < context:
        raise ValueError(f"Expected 0 < committed < context, got {committed} and {context}.")
    config, device = drafter.config, target.device
    features = config.target_layer_ids
    generator = torch.Generator().manual_seed(0)

    def random_ids(length):
        return torch.randint(0, config.vocab_size, (batch_size, length), generator=generator).to(device)

    cache = DynamicCache(config=target.config.get_text_config())
    cache.activate_past_recording()  # otherwise sliding layers could not be cropped
    target(random_ids(context), cache=cache, use_cache=True, logits_to_keep=1)
    cache.crop(0)
    block = random_ids(config.num_drafts + 1)

    def verify():
        target(block, cache=cache, use_cache=True, output_hidden_states=[i + 1 for i in features])

    def take_back():
        cache.crop(-block.shape[1])

    width = len(features) * config.target_hidden_size
    states = torch.randn(batch_size, context, width, generator=generator).to(drafter.device, drafter.dtype)
    block_ids = torch.full((batch_size, config.block_size), config.mask_token_id, device=device)
    table, head = target.get_input_embeddings(), target.get_output_embeddings()

    def draft(start=context - committed, stop=context):
        positions = torch.arange(start, stop + config.block_size, device=drafter.device).expand(batch_size, -1)
        drafter_cache.set_previous_accepted_tokens(stop - start)
        hidden = drafter(
            drafter.embed_block(block_ids, table), states[:, start:stop], position_ids=positions, cache=drafter_cache
        ).last_hidden_state
        drafter.compute_logits(hidden[:, config.block_size - config.num_drafts :], head, config.vocab_size)

    drafter_cache = DFlashContextCache(config.num_hidden_layers)
    draft(0, context - committed)
    filled = copy.deepcopy(drafter_cache)

    def take_back_context():
        nonlocal drafter_cache
        drafter_cache = copy.deepcopy(filled)

    take_back_context()
    clock = Clock(device)
    result = {"cycle_s": cycle_s, "context": context, "committed": committed, "batch_size": batch_size}
    as_it_is = {"target_s": _median_time(clock, verify, take_back, passes)}
    as_it_is["drafter_s"] = _median_time(clock, draft, take_back_context, passes)
    chosen: dict[str, str] = {}
    with best_kernels([target], batch_size * block.shape[1]) as kernels:
        chosen |= {f"target {shape}": name for shape, name in kernels.items()}
        fastest = {"target_s": _median_time(clock, verify, take_back, passes)}
    modules = [drafter] if drafter.lm_head is not None else [drafter, head]
    with best_kernels(modules, batch_size * config.block_size) as kernels:
        chosen |= {f"drafter {shape}": name for shape, name in kernels.items()}
        fastest["drafter_s"] = _median_time(clock, draft, take_back_context, passes)
    best = {name: min(as_it_is[name], fastest[name]) for name in as_it_is}
    return {
        "efficiency": (best["target_s"] + best["drafter_s"]) / cycle_s,
        **result,
        **best,
        "as_it_is": as_it_is,
        "best_kernels": fastest,
        "kernels": chosen,
    }


def _median_time(clock: Clock, work, reset, passes: int) -> float:
    seconds = []
    for number in range(passes + 3):
        clock.wait()
        start = clock.now()
        work()
        end = clock.now()
        clock.wait()
        if number >= 3:
            seconds.append(clock.seconds(start, end))
        reset()
    return median(seconds)


def _linear(weight, bias, rows):
    return lambda x: F.linear(x, weight, bias)


def _padded(weight, bias, rows):
    def forward(x):
        flat = x.reshape(-1, x.shape[-1])
        if flat.shape[0] >= PADDED_ROWS:
            return F.linear(x, weight, bias)
        padded = F.linear(F.pad(flat, (0, 0, 0, PADDED_ROWS - flat.shape[0])), weight, bias)
        return padded[: flat.shape[0]].view(*x.shape[:-1], -1)

    return forward


def _mkl(weight, bias, rows):
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, bias, x.numel() // x.shape[-1])


def _onednn(weight, bias, rows):
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _kernels(weight: torch.Tensor) -> dict:
    """Ways of computing a linear layer on this machine, by name: float32 on the CPU has several."""
    kernels = {"linear": _linear}
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        kernels["padded"] = _padded
        if torch.backends.mkl.is_available():
            kernels["mkl"] = _mkl
        if torch.backends.mkldnn.is_available():
            kernels["onednn"] = _onednn
    return kernels


@contextmanager
def best_kernels(models: list[nn.Module], rows: int):
    """Run the linear layers of `models` with the kernel that is fastest for their shape at `rows` rows.

    Yields the chosen kernels by weight shape. Weights are packed into copies meanwhile; afterwards everything is as
    it was. Subclasses of `nn.Linear` (quantized ones, say) are left alone.
    """
    chosen, replaced = {}, []
    linears = {id(m): m for model in models for m in model.modules() if type(m) is nn.Linear}
    try:
        for module in linears.values():
            weight, bias, shape = module.weight.detach(), module.bias, tuple(module.weight.shape)
            kernels = _kernels(weight)
            if len(kernels) == 1:
                continue
            if shape not in chosen:
                chosen[shape] = _fastest(kernels, weight, bias, rows)
            module.forward = kernels[chosen[shape]](weight, bias, rows)  # type: ignore[method-assign]  # for a while
            replaced.append(module)
        yield {" x ".join(map(str, shape)): name for shape, name in chosen.items()}
    finally:
        for module in replaced:
            del module.forward


def _fastest(kernels: dict, weight: torch.Tensor, bias, rows: int) -> str:
    x = torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    times = {}
    for name, make in kernels.items():
        forward = make(weight, bias, rows)
        times[name] = _median_time(Clock(weight.device), partial(forward, x), lambda: None, 15)
    return min(times, key=times.__getitem__)
