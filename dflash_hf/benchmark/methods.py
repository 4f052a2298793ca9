"""The ways of generating that are measured against each other, each a function from a batch to token ids."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.generation.utils import GenerationMixin

from ..drafter.modeling_dflash import DFlashDraftModel
from .prompts import Batch
from .simulation import simulated_drafter

NAMES = "plain", "prompt-lookup", "assistant", "native", "pypi", "transformers", "constant", "coupled", "adaptive"
# Drafts come through the drafter's own code. What each sets in its generation_config:
OWN = {
    "transformers": {"num_assistant_tokens_schedule": "constant"},
    "constant": {"num_assistant_tokens_schedule": "constant", "assistant_sampling": "rejection"},
    "coupled": {"num_assistant_tokens_schedule": "constant", "assistant_sampling": "coupled"},
    # Lengths chosen by the clock are only allowed where they cannot decide what is sampled.
    "adaptive": {"num_assistant_tokens_schedule": "adaptive", "assistant_sampling": "coupled"},
}


@dataclass
class Sampling:
    """How tokens are chosen, the same for every method: greedy, or `temperature` > 0 with `top_k` (0: off) and
    `top_p` (1: off).

    Raises:
        ValueError: a value out of its range.

    Example:
        >>> Sampling(do_sample=True, temperature=0.6).options
        {'do_sample': True, 'temperature': 0.6, 'top_k': 0, 'top_p': 1.0}
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 < self.temperature < float("inf") or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                "Expected a finite temperature > 0, top_k >= 0 and 0 < top_p <= 1, got "
                f"{self.temperature}, {self.top_k} and {self.top_p}; for greedy decoding set do_sample=False."
            )

    @property
    def options(self) -> dict:
        """Arguments of `generate()`."""
        if not self.do_sample:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


@dataclass
class Method:
    """One way of generating.

    Attributes:
        name: unique in a run, e.g. `constant k=4 tau=6`.
        generate: `(batch, max_new_tokens) -> ids [B, P + new]` long.
        draft_models: modules whose passes are drafting, where `drafter` is None.
        drafter: the DFlash drafter whose `last_run` has the figures of the call; None for peers.
        simulated: its drafts are right as often as asked, and it must be told the texts.
    """

    name: str
    generate: Callable[[Batch, int], torch.Tensor]
    draft_models: tuple[nn.Module, ...] = ()
    drafter: DFlashDraftModel | None = None
    simulated: bool = False


def make_methods(
    names: list[str] | None,
    target,
    drafter,
    *,
    sampling: Sampling,
    pad_token_id: int,
    assistant=None,
    block_lengths: list[int] | None = None,
    simulated_taus: list[float] | None = None,
    seed: int = 0,
) -> list[Method]:
    """The methods of a run, plain decoding first.

    Args:
        names: of `NAMES`; None: all that can run, `coupled` only when sampling (with simulated taus: plain, constant
            and adaptive).
        block_lengths: drafts offered a cycle, `num_assistant_tokens`, for `constant`: one method each; None: the
            drafter's own setting.
        simulated_taus: one method each for `transformers`, `constant` and `adaptive`; the others have no simulation.
        assistant: a small language model with the target's vocabulary.

    Raises:
        ValueError: an unknown name, a method that lacks what it needs, a length or tau that the block cannot give, or
            simulated drafts with sampling.
    """
    if names is None:
        names = list(NAMES)
        if simulated_taus:
            names = ["plain", "constant", "adaptive"]
        possible = {
            "assistant": assistant is not None,
            "pypi": find_spec("dflash") is not None,
            "coupled": sampling.do_sample,
        }
        names = [name for name in names if possible.get(name, True)]
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"There is no method {', '.join(unknown)}; expected some of {', '.join(NAMES)}.")
    if "assistant" in names and assistant is None:
        raise ValueError("The method `assistant` needs a small language model: pass `assistant`.")
    if "pypi" in names and find_spec("dflash") is None:
        raise ValueError("The method `pypi` needs PyPI's dflash: pip install --no-deps dflash==0.1.0")
    most = drafter.config.num_drafts
    if wrong := [k for k in block_lengths or () if not 1 <= k <= most]:
        raise ValueError(f"A block length must lie between 1 and {most}, the drafts of a full block; got {wrong}.")
    if simulated_taus and sampling.do_sample:
        raise ValueError("Simulated drafts follow the greedy text: leave out sampling, or the simulated tau.")

    def generate(batch: Batch, max_new_tokens: int, **by):
        return target.generate(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_token_id,
            **sampling.options,
            **by,
        )

    def drafting(batch: Batch, max_new_tokens: int, *, name: str, drafter, length: int | None):
        by = {"assistant_model": drafter}
        if name == "transformers":
            loop = getattr(GenerationMixin._assisted_decoding, "__wrapped__", GenerationMixin._assisted_decoding)
            by = {"custom_generate": functools.partial(loop, assistant_model=drafter)}
        before = drafter.generation_config
        drafter.generation_config = copy.deepcopy(before)
        for key, value in OWN[name].items():
            setattr(drafter.generation_config, key, value)
        if length is not None:
            drafter.generation_config.num_assistant_tokens = length
        try:
            return generate(batch, max_new_tokens, **by)
        finally:
            drafter.generation_config = before

    methods = [Method("plain", generate)]
    if "prompt-lookup" in names:
        by = functools.partial(generate, prompt_lookup_num_tokens=10)
        methods.append(Method("prompt-lookup", by))
    if "assistant" in names:
        methods.append(Method("assistant", functools.partial(generate, assistant_model=assistant), (assistant,)))
    if "native" in names:
        by = functools.partial(generate, assistant_model=drafter, speculation_type="dflash")
        methods.append(Method("native", by, (drafter,)))
    if "pypi" in names:
        methods.append(_pypi_method(target, drafter, sampling))
    taus: list[float | None] = [*simulated_taus] if simulated_taus else [None]
    for name in [name for name in OWN if name in names]:
        lengths = block_lengths if name == "constant" and block_lengths else [None]
        for length in lengths:
            for tau in taus:
                mine = drafter if tau is None else simulated_drafter(drafter, tau, seed)
                full_name = name
                full_name += "" if length is None else f" k={length}"
                full_name += "" if tau is None else f" tau={tau:g}"
                by = functools.partial(drafting, name=name, drafter=mine, length=length)
                methods.append(Method(full_name, by, (), mine, tau is not None))
    return methods


def _pypi_method(target, drafter, sampling: Sampling) -> Method:
    """PyPI dflash 0.1.0's own loop over its own model class, which gets this drafter's very tensors."""
    from dflash.model import DFlashDraftModel as PypiDraftModel
    from dflash.model import dflash_generate

    eos = target.generation_config.eos_token_id
    stop_ids = None if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def generate(batch: Batch, max_new_tokens: int):
        if len(batch.rows) > 1:
            raise ValueError("PyPI dflash serves one sequence at a time.")
        return dflash_generate(
            model,
            target,
            batch.input_ids,
            max_new_tokens,
            stop_ids,
            temperature=sampling.temperature if sampling.do_sample else 0.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )

    raw = copy.deepcopy(drafter.config.to_dict())
    raw.pop("auto_map", None)
    config = Qwen3Config.from_dict(raw)
    config._attn_implementation = "sdpa"
    try:
        model = PypiDraftModel(config).to(drafter.device)  # its rotary tables stay float32, as when it is loaded
        model.load_state_dict(drafter.state_dict(), assign=True)
    except (RuntimeError, ValueError, TypeError) as error:  # a variant that it does not know
        reason = f"PyPI dflash cannot hold this drafter: {error}"

        def refuse(batch, max_new_tokens):
            raise ValueError(reason)

        return Method("pypi", refuse)
    return Method("pypi", generate, (model.eval(),))
