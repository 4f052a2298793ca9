"""Cycle efficiency: how much of a measured cycle is the two passes that no loop can do without."""

import copy
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache

from ..drafter.cache import DFlashContextCache
from ..drafter.kernels import FewRowsLinear, with_cpu_kernels
from .probe import Clock

PADDED_ROWS = 16  # float32 on the CPU: sixteen rows take a faster kernel than four to twelve do


@torch.no_grad()
def cycle_efficiency(
    target,
    drafter,
    cycle: Callable[[], float],
    *,
    batch_size: int = 1,
    context: int = 128,
    committed: int = 2,
    rounds: int = 9,
    passes: int = 5,
) -> dict:
    """(bare target pass on the block + bare drafter and head pass) / measured cycle.

    The bare passes are timed on random ids behind a random context: the target on `[anchor, drafts]` with the hidden
    states captured that the drafter reads, and the drafter on `committed` new context features and a block, the head
    on its drafts. Cycles and bare passes alternate, so that a machine that is busy for a while slows both.

    Bare passes come in three versions: as transformers runs them; with the fastest kernel for each shape of linear
    layer of those that need no copy of a target layer (the LM head and the drafter may be repacked); and with the
    fastest of all, for which the whole target would be kept in memory twice.

    Args:
        target, drafter: the pair; both are left as they are.
        cycle: makes some cycles that draft and verify full blocks, and returns the seconds of one.
        batch_size: sequences in a pass.
        context: positions in the target's cache.
        committed: new context features in a drafter pass.
        rounds: how often cycles and bare passes take turns.
        passes: of each kind and version in a round.

    Returns:
        `cycle_s`, and under `as_it_is`, `without_target_copies` and `best_kernels`: `target_s`, `drafter_s` (drafter
        and head), `efficiency` (the median over rounds of their sum over the cycle's seconds), and for the last two
        `kernels`, the names by shape. `efficiency` itself is that of `best_kernels`.

    Raises:
        ValueError: `committed` is not below `context`, or a cycle took no time.

    Example:
        >>> cycle_efficiency(target, drafter, one_cycle)["efficiency"]                         # doctest: +SKIP
        0.93
    """
    if not 0 < committed < context:
        raise ValueError(f"Expected 0 < committed < context, got {committed} and {context}.")
    config, device = drafter.config, target.device
    features = config.target_layer_ids
    generator = torch.Generator().manual_seed(0)

    def random_ids(length):
        return torch.randint(0, config.vocab_size, (batch_size, length), generator=generator).to(device)

    cache = DynamicCache(config=target.config.get_text_config())
    cache.activate_past_recording()  # otherwise sliding layers could not be cropped
    # With hidden states, so that transformers sets its hooks for them now and twins share them.
    states_read = [i + 1 for i in features]
    target(random_ids(context), cache=cache, use_cache=True, logits_to_keep=1, output_hidden_states=states_read)
    cache.crop(0)
    block = random_ids(config.num_drafts + 1)

    def verify(target):
        target(block, cache=cache, use_cache=True, output_hidden_states=states_read)

    def take_back():
        cache.crop(-block.shape[1])

    width = len(features) * config.target_hidden_size
    states = torch.randn(batch_size, context, width, generator=generator).to(drafter.device, drafter.dtype)
    block_ids = torch.full((batch_size, config.block_size), config.mask_token_id, device=device)
    table = target.get_input_embeddings()

    def draft(drafter, head, start=context - committed, stop=context):
        positions = torch.arange(start, stop + config.block_size, device=drafter.device).expand(batch_size, -1)
        drafter_cache.set_previous_accepted_tokens(stop - start)
        hidden = drafter(
            drafter.embed_block(block_ids, table), states[:, start:stop], position_ids=positions, cache=drafter_cache
        ).last_hidden_state
        drafter.compute_logits(hidden[:, config.block_size - config.num_drafts :], head, config.vocab_size)

    drafter_cache = DFlashContextCache(config.num_hidden_layers)
    draft(drafter, target.get_output_embeddings(), 0, context - committed)
    filled = copy.deepcopy(drafter_cache)

    def take_back_context():
        nonlocal drafter_cache
        drafter_cache = copy.deepcopy(filled)

    take_back_context()
    clock, num_rows = Clock(device), batch_size * config.block_size
    versions: dict[str, tuple] = {"as_it_is": (target, drafter, {})}
    for name in ("without_target_copies", "best_kernels"):
        of_target, kernels = with_kernels(target, batch_size * block.shape[1], copies=name == "best_kernels")
        of_drafter, more = with_kernels(drafter, num_rows, copies=True)
        named = {f"target {shape}": kind for shape, kind in kernels.items()}
        versions[name] = (of_target, of_drafter, named | {f"drafter {shape}": kind for shape, kind in more.items()})
    cycles: list[float] = []
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in versions}
    for number in range(rounds + 1):
        seconds = cycle()
        if seconds <= 0:
            raise ValueError(f"cycle() must return the positive seconds of a cycle, got {seconds}.")
        of_round = {
            name: (
                _median_time(clock, partial(verify, one), take_back, passes),
                _median_time(clock, partial(draft, other, one.get_output_embeddings()), take_back_context, passes),
            )
            for name, (one, other, _) in versions.items()
        }
        if number:  # the first round warms up
            cycles.append(seconds)
            for name, pair in of_round.items():
                times[name].append(pair)
    result: dict = {"context": context, "committed": committed, "batch_size": batch_size, "cycle_s": median(cycles)}
    for name, pairs in times.items():
        result[name] = {
            "efficiency": median(sum(pair) / seconds for pair, seconds in zip(pairs, cycles, strict=True)),
            "target_s": median(one for one, _ in pairs),
            "drafter_s": median(other for _, other in pairs),
            "kernels": versions[name][2],
        }
    return {"efficiency": result["best_kernels"]["efficiency"], **result}


def _median_time(clock: Clock, work, reset, passes: int) -> float:
    seconds = []
    for _ in range(passes):
        clock.wait()
        start = clock.now()
        work()
        end = clock.now()
        clock.wait()
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


def _few_rows(weight, bias, rows):
    layer = FewRowsLinear(1, 1, bias=bias is not None, device="meta")
    layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), bias
    return layer.forward


def _kernels(weight: torch.Tensor, copies: bool = True) -> dict:
    """Ways of computing a linear layer on this machine, by name: float32 on the CPU has several."""
    kernels = {"linear": _linear}
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        kernels["padded"], kernels["few rows"] = _padded, _few_rows
        if copies and torch.backends.mkl.is_available():
            kernels["mkl"] = _mkl
        if copies and torch.backends.mkldnn.is_available():
            kernels["onednn"] = _onednn
    return kernels


def with_kernels(model: nn.Module, rows: int, copies: bool) -> tuple[nn.Module, dict[str, str]]:
    """A second object for `model` whose linear layers take the kernel that is fastest for their shape at `rows` rows.

    Args:
        model: the target, the drafter or any other module; it stays as it is.
        rows: of the input, batch and positions together.
        copies: try kernels that need a repacked copy of the weight, too. For the LM head they are always tried.

    Returns:
        the second object, and the names of the kernels by shape of the weight. Subclasses of `nn.Linear` (quantized
        ones, say) are left alone.
    """
    twin, chosen = with_cpu_kernels(model), {}
    head = getattr(twin, "get_output_embeddings", lambda: None)()
    for module in twin.modules():
        if not isinstance(module, nn.Linear) or type(module) not in (nn.Linear, FewRowsLinear):
            continue
        if "forward" in vars(module):
            continue
        weight, bias, shape = module.weight.detach(), module.bias, tuple(module.weight.shape)
        kernels = _kernels(weight, copies or module is head)
        if len(kernels) == 1:
            continue
        if shape not in chosen:
            chosen[shape] = _fastest(kernels, weight, bias, rows)
        module.forward = kernels[chosen[shape]](weight, bias, rows)  # type: ignore[method-assign]  # of the twin
    return twin, {" x ".join(map(str, shape)): name for shape, name in chosen.items()}


def _fastest(kernels: dict, weight: torch.Tensor, bias, rows: int) -> str:
    x = torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    clock = Clock(weight.device)
    times: dict[str, list[float]] = {name: [] for name in kernels}
    ready = {name: make(weight, bias, rows) for name, make in kernels.items()}
    for _ in range(9):  # in turns
        for name, forward in ready.items():
            times[name].append(_median_time(clock, partial(forward, x), lambda: None, 3))
    return min(times, key=lambda name: median(times[name]))
