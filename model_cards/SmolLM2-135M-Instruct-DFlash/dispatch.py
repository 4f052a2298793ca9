"""The one hook into transformers: `generate(assistant_model=drafter)` asks the drafter how to draft.

Three methods of `GenerationMixin` are wrapped once per process. The wrappers look at the assistant OBJECT (attribute
`dflash_protocol`), so the pip package and any number of copies loaded by trust_remote_code share one hook. Each copy
registers under its module name; when the last one leaves, transformers is exactly as it was.
"""

import copy
import functools
from collections.abc import Callable

from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

PROTOCOL = 1  # of the handlers below; a newer copy replaces an older copy's handlers
_STATE = "_dflash_hook"
NOT_FOR_DECODE = ("synced_gpus", "inputs_tensor", "tokenizer", "assistant_tokenizer")  # of transformers' loop


def _is_drafter(assistant_model, generation_config) -> bool:
    """Whether this call is ours: other ways of assisting that the user asked for keep their precedence."""
    return (
        getattr(assistant_model, "dflash_protocol", None) is not None
        and generation_config.assistant_early_exit is None
        and generation_config.prompt_lookup_num_tokens is None
        and not generation_config.use_mtp
        and generation_config.speculation_type != "dflash"
    )


def _validate(original: Callable, target, generation_mode, generation_config, generation_mode_kwargs):
    drafter = generation_mode_kwargs.get("assistant_model")
    if not _is_drafter(drafter, generation_config):
        return original(target, generation_mode, generation_config, generation_mode_kwargs)
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"A DFlash drafter serves greedy decoding and sampling, these options ask for {generation_mode.value}; "
            "leave out them (num_beams, penalty_alpha, ...) or assistant_model."
        )
    drafter.check_target(target, generation_config, generation_mode_kwargs)
    if target._is_stateful:
        return None  # which transformers' loop could not serve; check_target knows which ones ours can
    # transformers compares vocabularies and tokenizers of two language models; check_target has done so already.
    others = {key: value for key, value in generation_mode_kwargs.items() if key != "assistant_model"}
    one = copy.copy(generation_config)
    one.num_return_sequences = 1  # our loop serves several, transformers' does not
    return original(target, generation_mode, one, others)


def _candidate_generator(original: Callable, target, generation_config, *args, assistant_model=None, **kwargs):
    if not _is_drafter(assistant_model, generation_config):
        return original(target, generation_config, *args, assistant_model=assistant_model, **kwargs)
    return assistant_model.candidate_generator(
        target,
        generation_config=generation_config,
        logits_processor=kwargs["logits_processor"],
        model_kwargs=kwargs["model_kwargs"],
    )


def _assisted_decoding(original: Callable, target, input_ids, *args, assistant_model=None, **kwargs):
    generation_config = kwargs.get("generation_config")
    ours = generation_config is not None and _is_drafter(assistant_model, generation_config)
    # Ensemble verification (not lossless, the user's choice) and lockstep over several processes stay transformers'.
    if not ours or kwargs.get("synced_gpus") or generation_config.assistant_ensemble_weight is not None:
        return original(target, input_ids, *args, assistant_model=assistant_model, **kwargs)
    return assistant_model.decode(target, input_ids, **kwargs)


_HANDLERS = {
    "_validate_generation_mode": _validate,
    "_get_candidate_generator": _candidate_generator,
    "_assisted_decoding": _assisted_decoding,
}


def _wrap(name: str, original: Callable, state: dict) -> Callable:
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        if not state["owners"]:  # removed, but something else has wrapped us since: step aside
            return original(self, *args, **kwargs)
        return state["handlers"][name](original, self, *args, **kwargs)

    return wrapper


def install(owner: str = __name__) -> None:
    """Register `owner` with the hook, creating the hook if no other copy has. Doing it twice changes nothing.

    Example:
        >>> install("my-copy"); install("my-copy"); remove("my-copy")
    """
    state = GenerationMixin.__dict__.get(_STATE)
    if state is None:
        state = {
            "protocol": PROTOCOL,
            "handlers": dict(_HANDLERS),
            "owners": set(),
            "wrappers": {},
            "originals": {},
        }
        for name in _HANDLERS:
            state["originals"][name] = GenerationMixin.__dict__[name]
            state["wrappers"][name] = _wrap(name, state["originals"][name], state)
            setattr(GenerationMixin, name, state["wrappers"][name])
        setattr(GenerationMixin, _STATE, state)
    elif state["protocol"] < PROTOCOL:
        state["protocol"] = PROTOCOL
        state["handlers"].update(_HANDLERS)
    state["owners"].add(owner)


def remove(owner: str = __name__) -> None:
    """Withdraw `owner`; with the last owner gone, transformers' own methods are put back."""
    state = GenerationMixin.__dict__.get(_STATE)
    if state is None:
        return
    state["owners"].discard(owner)
    ours_on_top = all(GenerationMixin.__dict__[name] is wrapper for name, wrapper in state["wrappers"].items())
    if not state["owners"] and ours_on_top:
        for name, original in state["originals"].items():
            setattr(GenerationMixin, name, original)
        delattr(GenerationMixin, _STATE)
