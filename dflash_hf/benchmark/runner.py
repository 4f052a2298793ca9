"""The measurement: every method on every batch, one after the other, in one process."""

import gc
import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils import logging

from .efficiency import cycle_efficiency
from .methods import Method, Sampling, make_methods
from .probe import PeakMemory, Probe, peak_memory
from .prompts import Batch, Prompt, fill_contexts, make_batches
from .report import Report, environment, model_facts, weights_sha256

WARM_UP_TOKENS = 8
CYCLE_TOKENS = 32  # of a call that measures cycles between bare passes


def bench(
    target,
    drafter,
    prompts: list[Prompt],
    *,
    tokenizer=None,
    methods: list[str] | None = None,
    assistant=None,
    batch_size: int = 1,
    max_new_tokens: int = 128,
    repeats: int = 1,
    sampling: Sampling | None = None,
    block_lengths: list[int] | None = None,
    contexts: list[int] | None = None,
    simulated_taus: list[float] | None = None,
    efficiency: bool = False,
    seed: int = 0,
    source: dict | None = None,
    out: str | os.PathLike | None = None,
    progress: bool = False,
) -> Report:
    """Measure ways of generating against plain `generate()`; see docs/benchmark.md for what the figures mean.

    Every batch goes through all methods before the next one comes, and the order of the methods changes from batch to
    batch. Before that, every method runs twice on the longest batch: briefly, to warm up and to find out whether it
    refuses, and in full, to measure its memory. Ctrl-C ends the measurement and keeps what is complete.

    Args:
        target: the model that generates.
        drafter: its `DFlashDraftModel`.
        prompts: `Prompt`s with a text (then `tokenizer` is needed) or with ids.
        methods: names of `methods.NAMES`, plain is always measured; None: all that can run.
        assistant: a small language model with the target's vocabulary, for the method `assistant`.
        batch_size: prompts a batch; methods that cannot serve it are reported as refused.
        max_new_tokens, repeats: of every prompt.
        sampling: greedy if None.
        block_lengths: `num_assistant_tokens` values; `constant` runs once with each.
        contexts: prompt lengths in tokens that every prompt is filled up to.
        simulated_taus: drafts that are right as often as each of these tau asks (`simulation.simulated_drafter`).
        efficiency: measure the bare passes too, for the cycle efficiency (`efficiency.cycle_efficiency`).
        seed: of sampling, simulation and bootstrap.
        source: facts about the prompts for the report, e.g. name and SHA-256.
        out: JSON file; written after every batch, whole or not at all.
        progress: show a bar.

    Raises:
        ValueError: a setting that cannot be; says what was expected.

    Example:
        >>> report = bench(target, drafter, prompts, tokenizer=tokenizer, repeats=3)           # doctest: +SKIP
        >>> report.summary()["constant"]["ratio"]                                              # doctest: +SKIP
        {'value': 1.31, 'low': 1.24, 'high': 1.37}
    """
    for name, value in {"batch_size": batch_size, "max_new_tokens": max_new_tokens, "repeats": repeats}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if any(length < 1 for length in contexts or ()):
        raise ValueError(f"Prompts can be filled up to 1 token or more, got contexts {contexts}.")
    if not prompts:
        raise ValueError("Expected at least one prompt, got none.")
    if out is not None and not Path(out).parent.is_dir():
        raise FileNotFoundError(f"There is no folder {Path(out).parent} to write {Path(out).name} to; make it first.")
    if out is not None and Path(out).exists() and not Path(out).is_file():  # a folder, or a device to be replaced
        raise FileExistsError(f"Expected the name of a file to write, {out} is something else.")
    sampling = sampling or Sampling()
    pad_token_id = _pad_token_id(target, tokenizer)
    running = make_methods(
        methods,
        target,
        drafter,
        sampling=sampling,
        pad_token_id=pad_token_id,
        assistant=assistant,
        block_lengths=block_lengths,
        simulated_taus=simulated_taus,
        seed=seed,
    )
    if contexts:
        prompts = fill_contexts(prompts, contexts, tokenizer)
    batches = make_batches(prompts, tokenizer, batch_size, pad_token_id, target.device)
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    longest = max(batch.input_ids.shape[1] for batch in batches)
    if positions is not None and longest + max_new_tokens > positions:
        raise ValueError(
            f"The longest prompt's {longest} tokens and {max_new_tokens} new ones are more than the target's "
            f"{positions} positions; leave long prompts out or ask for fewer tokens."
        )
    weights = drafter.state_dict()
    report = Report(
        settings={
            "methods": [method.name for method in running],
            "batch_size": batch_size,
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            "sampling": asdict(sampling),
            "block_lengths": block_lengths,
            "contexts": contexts,
            "simulated_taus": simulated_taus,
            "seed": seed,
        },
        environment=environment(target.device),
        prompts={**(source or {}), "count": len(prompts), "batches": len(batches)},
        target=model_facts(target),
        drafter=model_facts(drafter) | {"weights_sha256": weights_sha256(weights, weights.__getitem__, drafter.dtype)},
    )
    bar = tqdm(total=len(batches) * repeats, unit="batch") if progress else None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a drafter that does not help would say so at every call; the table says it too
    with bar or nullcontext():
        try:
            _measure(target, drafter, running, batches, report, max_new_tokens, repeats, sampling, seed, out, bar)
            if efficiency:
                report.cycle_efficiency = _efficiency(target, drafter, report, running, batches)
        except KeyboardInterrupt:
            report.interrupted = True
        finally:
            logging.set_verbosity(verbosity)
    if out is not None:
        report.save(out)
    return report


def _pad_token_id(target, tokenizer) -> int:
    eos = target.generation_config.eos_token_id
    for value in (getattr(tokenizer, "pad_token_id", None), target.generation_config.pad_token_id, eos):
        if value is not None:
            return value if isinstance(value, int) else value[0]
    return 0


def _measure(target, drafter, methods, batches, report, max_new_tokens, repeats, sampling, seed, out, bar) -> None:
    """Warm up and measure memory, then take the figures; fills `report`."""
    longest = max(range(len(batches)), key=lambda i: batches[i].input_ids.shape[1])

    def run(method: Method, index: int, texts, *, tokens=max_new_tokens, repeat=0, memory=False):
        """One call, or None where the method refuses or fails; it is then left out from here on."""
        if method.name in report.refused:
            return None
        try:
            return _call(target, method, batches[index], index, texts, tokens, sampling, seed + repeat, memory)
        except Exception as error:
            if method.name == "plain":
                raise
            report.refused[method.name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return None

    texts = plain_peak = None
    gc.collect()  # what an interrupted or refused call left behind is nobody's memory
    for method in methods:  # plain is the first: nothing that a method keeps for later is there yet
        run(method, longest, texts, tokens=min(WARM_UP_TOKENS, max_new_tokens))
        result = run(method, longest, texts, memory=True)
        if result is None:
            continue
        memory = result.memory
        if method.name == "plain":
            texts, plain_peak = result.texts, memory.peak
        report.memory[method.name] = {"how": memory.how}
        if memory.peak is not None:
            figures = {"start": memory.start, "peak": memory.peak, "over_plain": memory.peak - plain_peak}
            report.memory[method.name] |= {f"{name}_mib": round(value, 1) for name, value in figures.items()}

    for repeat in range(repeats):
        for index, batch in enumerate(batches):
            plain_texts: list[list[int]] = []
            turn = 1 + (index + repeat) % max(len(methods) - 1, 1)
            for method in [methods[0], *methods[turn:], *methods[1:turn]]:
                result = run(method, index, plain_texts, repeat=repeat)
                if result is None:
                    continue
                record = {"method": method.name, "batch": index, "repeat": repeat, **result.record}
                if method.name == "plain":
                    plain_texts = result.texts
                elif not sampling.do_sample:
                    equal = [mine == plain for mine, plain in zip(result.texts, plain_texts, strict=True)]
                    record["ids_equal"] = equal
                    record["differences"] = [
                        top2_gap(target, plain_texts[row], result.texts[row], drafter.config.block_size)
                        | {"row": row, "prompt_tokens": len(batch.rows[row])}
                        for row in range(len(equal))
                        if not equal[row]
                    ]
                report.runs.append(record)
            if bar is not None:
                bar.update()
            if out is not None:
                report.save(out)


class _Result:
    """Of one call: `record` for the report, `texts` (whole sequences without padding), `memory`."""

    def __init__(self, record: dict, texts: list[list[int]], memory: PeakMemory | None):
        self.record, self.texts, self.memory = record, texts, memory


def _call(target, method: Method, batch: Batch, index, texts, max_new_tokens, sampling, seed, memory) -> _Result:
    if method.simulated and method.drafter is not None:
        method.drafter.set_texts(batch.numbers, texts)
    torch.manual_seed(seed + 1000 * index)
    with peak_memory(target.device) if memory else nullcontext() as peak, Probe(target, method.draft_models) as probe:
        ids = method.generate(batch, max_new_tokens)
    new = [_new_tokens(target, row) for row in ids[:, batch.input_ids.shape[1] :].tolist()]
    texts = [row + more for row, more in zip(batch.rows, new, strict=True)]
    num_new = sum(map(len, new))
    record: dict = {
        "prompts": [prompt.id for prompt in batch.prompts],
        "category": batch.prompts[0].category,
        "context": batch.prompts[0].context,
        "prompt_tokens": [len(row) for row in batch.rows],
        "new_tokens": [len(row) for row in new],
        "seconds": probe.seconds,
        "tokens_per_s": num_new / probe.seconds,
    }
    run = None if method.drafter is None else method.drafter.last_run
    if run is not None:
        record |= {"cycles": run.row_cycles, "committed": num_new - len(new), "passes": run.target_passes}
        record |= {"accepted": list(run.accepted), "offered": list(run.offered)}
    elif len(new) == 1:
        cycles = probe.cycles(len(batch.rows[0]), num_new)
        accepted, offered = cycles.by_slot()
        record |= {"cycles": len(cycles.committed), "committed": sum(cycles.committed), "passes": len(probe.passes)}
        record |= {"accepted": accepted, "offered": offered}
    else:
        record |= {"cycles": None, "committed": None, "passes": len(probe.passes), "accepted": [], "offered": []}
    # Our own loop uses a head that hooks do not see, so there its own clock counts. That is the host's, which does not
    # wait for an accelerator: on one it says when work was queued, not how long it took.
    times = probe if run is None else run
    timed = run is None or target.device.type == "cpu"
    record["first_token_s"] = probe.first_token_s
    record["drafting_s"] = times.drafting_s if timed else None
    record["verifying_s"] = times.verifying_s if timed else None
    return _Result(record, texts, peak)


def _new_tokens(target, ids: list[int]) -> list[int]:
    """Up to the first EOS, which counts; what follows is padding."""
    eos = target.generation_config.eos_token_id
    ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    for i, token in enumerate(ids):
        if token in ends:
            return ids[: i + 1]
    return ids


@torch.no_grad()
def top2_gap(target, plain: list[int], other: list[int], block_size: int) -> dict:
    """Whether two greedy texts part at a near-tie of the target's logits, or for real.

    The target is run on their common beginning three times: all at once; its last token by itself, as plain decoding
    does; and its last `block_size` tokens together, as verification does. What these differ by is rounding.

    Args:
        plain, other: token ids, different.

    Returns:
        `position` of the first difference, the tokens `plain` and `other` there (None where a text has ended), the
        logit `top2_gap` between the target's two best, `rounding` (largest difference between the three passes, any
        token), and `near_tie`: the two tokens are the two best and the gap is within twice the rounding.

    Example:
        >>> top2_gap(target, [5, 8, 9, 4], [5, 8, 9, 7], block_size=8)["position"]             # doctest: +SKIP
        3
    """
    pairs = zip(plain, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    ids = torch.tensor([plain[:at]], device=target.device)
    last = []
    for tail in sorted({0, 1, min(block_size, at - 1)}):
        cache = target(ids[:, : at - tail], use_cache=True).cache if tail and tail < at else None
        out = target(ids[:, at - tail :] if cache is not None else ids, cache=cache, use_cache=True)
        last.append(out.logits[0, -1].float())
    rows = torch.stack(last)  # [passes, V]
    best = rows[min(1, len(rows) - 1)].topk(2)
    tokens = [text[at] if at < len(text) else None for text in (plain, other)]
    gap, rounding = float(best.values[0] - best.values[1]), float((rows.amax(0) - rows.amin(0)).max())
    return {
        "position": at,
        "plain": tokens[0],
        "other": tokens[1],
        "top2_gap": gap,
        "rounding": rounding,
        "near_tie": set(tokens) == set(best.indices.tolist()) and gap <= 2 * rounding,
    }


def _efficiency(target, drafter, report: Report, methods: list[Method], batches: list[Batch]) -> dict | None:
    """Cycle efficiency of `constant`, which checks full blocks, on the first batch; None where it did not run."""
    method = next((m for m in methods if m.name == "constant"), None)
    runs = [run for run in report.runs if run["method"] == "constant" and run["cycles"]]
    if method is None or not runs:
        return None
    committed = round(sum(run["committed"] for run in runs) / sum(run["cycles"] for run in runs))

    def cycle(method=method) -> float:
        run = _call(target, method, batches[0], 0, None, CYCLE_TOKENS, Sampling(), 0, False).record
        return (run["seconds"] - run["first_token_s"]) / max(run["passes"] - 1, 1)

    context = batches[0].input_ids.shape[1] + CYCLE_TOKENS // 2
    found = cycle_efficiency(
        target, drafter, cycle, batch_size=report.settings["batch_size"], context=context, committed=max(committed, 1)
    )
    return {"method": method.name} | found
