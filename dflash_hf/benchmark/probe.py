"""Instruments: where the time of a generate call goes, what its cycles did, and how much memory it took."""

import ctypes
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

MIB = 2**20


class Clock:
    """Moments on the device's own time line: no synchronisation where work is queued (CUDA)."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start, end) -> float:
        """Between two moments; on CUDA only after a synchronisation."""
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


@dataclass
class TargetPass:
    """One forward pass of the target: tokens it took, positions in the cache before it, and its times."""

    num_tokens: int
    past: int
    start: object
    end: object = None


@dataclass
class Cycles:
    """What the passes after the first did, for one sequence.

    Attributes:
        first_tokens: tokens that the first pass committed; 1 unless drafts came with the prompt.
        committed: tokens committed by each pass after it.
        offered: drafts in each of those passes.
    """

    first_tokens: int = 1
    committed: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)

    def by_slot(self) -> tuple[list[int], list[int]]:
        """For every slot: how many cycles accepted it, how many offered it."""
        slots = range(max(self.offered, default=0))
        accepted = [sum(c - 1 > slot for c in self.committed) for slot in slots]
        return accepted, [sum(o > slot for o in self.offered) for slot in slots]


class Probe:
    """Watches one generate call through forward hooks on the target, and on the models that draft where there are any.

    Drafting is the time in the models that draft, and in the target's head outside of a pass of the target;
    verifying is the time in the target's passes after the first. Python, logits processing, acceptance and the care
    of caches are neither.

    Example:
        >>> with Probe(target, [drafter]) as probe:                                            # doctest: +SKIP
        ...     ids = target.generate(**inputs, assistant_model=drafter)
        >>> probe.seconds, probe.drafting_s, probe.verifying_s                                 # doctest: +SKIP
    """

    def __init__(self, target, draft_models=()):
        self.clock = Clock(target.device)
        self.passes: list[TargetPass] = []
        self._drafts: list[list] = []
        self._in_target = False
        self._draft_depth = 0
        self._target = target
        heads = [target.get_output_embeddings()] if draft_models else []
        heads += [getattr(model, "lm_head", None) for model in draft_models]
        modules = {id(m): m for m in [*draft_models, *heads] if m is not None}
        self._drafting_modules = list(modules.values())

    def __enter__(self) -> "Probe":
        target = self._target
        self._handles = [
            target.register_forward_pre_hook(self._target_starts, with_kwargs=True),
            target.register_forward_hook(self._target_ends),
        ]
        for module in self._drafting_modules:
            self._handles += [
                module.register_forward_pre_hook(self._draft_starts),
                module.register_forward_hook(self._draft_ends),
            ]
        self.clock.wait()
        self._wall, self._start = time.perf_counter(), self.clock.now()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.clock.wait()
        self.seconds = time.perf_counter() - self._wall
        for handle in self._handles:
            handle.remove()

    def _target_starts(self, module, args, kwargs):
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs["inputs_embeds"]
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = 0 if cache is None else int(cache.get_seq_length())
        self.passes.append(TargetPass(tokens.shape[1], past, self.clock.now()))
        self._in_target = True

    def _target_ends(self, *_):
        self.passes[-1].end = self.clock.now()
        self._in_target = False

    def _draft_starts(self, *_):
        self._draft_depth += 1
        if not self._in_target and self._draft_depth == 1:
            self._drafts.append([self.clock.now(), None])

    def _draft_ends(self, *_):
        self._draft_depth -= 1
        if not self._in_target and self._draft_depth == 0:
            self._drafts[-1][1] = self.clock.now()

    def _spent(self, passes) -> float:
        return sum(self.clock.seconds(p.start, p.end) for p in passes)

    @property
    def first_token_s(self) -> float:
        """From the call to the end of the target's first pass, which gives the first token."""
        return self.clock.seconds(self._start, self.passes[0].end)

    @property
    def verifying_s(self) -> float:
        return self._spent(self.passes[1:])

    @property
    def drafting_s(self) -> float:
        return sum(self.clock.seconds(start, end) for start, end in self._drafts)

    def cycles(self, prompt_length: int, new_tokens: int) -> Cycles:
        """What each pass committed, read off where the next one starts in the cache; for a batch of one."""
        starts = [p.past for p in self.passes[1:]] + [prompt_length + new_tokens - 1]
        return Cycles(
            first_tokens=starts[0] - prompt_length + 1,
            committed=[b - a for a, b in pairwise(starts)],
            offered=[p.num_tokens - 1 for p in self.passes[1:]],
        )


class PeakMemory:
    """The most memory in use while it was watched, in MiB: `peak`, and `start` when the watch began.

    CUDA: what PyTorch allocated on the device. CPU: the process's resident set by Linux's own high-water mark (reset
    through /proc/self/clear_refs); unused heap is given back first. Both are None where that cannot be read.
    """

    peak: float | None = None
    start: float | None = None
    how = "not measured"


@contextmanager
def peak_memory(device: torch.device):
    """Measure the block: `with peak_memory(device) as memory: ...`, then read `memory.peak` (see `PeakMemory`)."""
    memory = PeakMemory()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        memory.how, memory.start = "torch.cuda.max_memory_allocated", torch.cuda.memory_allocated(device) / MIB
        yield memory
        memory.peak = torch.cuda.max_memory_allocated(device) / MIB
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5): resets VmHWM
        memory.how, memory.start = "resident set, VmHWM after a reset", _status_mib("VmRSS")
    except OSError:
        yield memory
        return
    yield memory
    memory.peak = _status_mib("VmHWM")


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))
