"""Other ways of writing a prompt than the target's chat template does, for a drafter that was trained with one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ..benchmark import Prompt
from ..benchmark.prompts import encode

# The three that most open models use, each with the token that a vocabulary has if it knows them.
_WELL_KNOWN = {
    "ChatML": ("<|im_start|>", "<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"),
    "Llama 3": (
        "<|start_header_id|>",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{text}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Gemma": ("<start_of_turn>", "<bos><start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n"),
}


@dataclass(frozen=True)
class Format:
    """A way of writing a prompt: `kind` and what it `says` as of a fault, and `encode` from a prompt to token ids."""

    kind: str
    says: str
    encode: Callable[[Prompt], list[int]]


def other_formats(tokenizer) -> Iterator[Format]:
    """Thinking on and off where the template knows it, no template, and well-known ones whose tokens are there."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = " ".join(template.values())

    def words(prompt: Prompt) -> str:
        return "\n\n".join(filter(None, [prompt.system, prompt.text]))

    def bare(form: str, prompt: Prompt) -> list[int]:
        return tokenizer(form.replace("{text}", words(prompt)), add_special_tokens=False)["input_ids"]

    if template and "enable_thinking" in template:
        for thinking in (False, True):
            yield Format(
                "thinking mode",
                f"prompts were written in the template's default mode, try enable_thinking={thinking}",
                partial(encode, tokenizer=tokenizer, enable_thinking=thinking),
            )
    vocabulary = tokenizer.get_vocab()
    for name, (token, form) in _WELL_KNOWN.items():
        if token in vocabulary:
            yield Format(
                "chat template",
                f"prompts were written {'in the chat template' if template else 'as bare text'} of the tokenizer, try "
                f"the bare template of {name}",
                partial(bare, form),
            )
    if template:
        yield Format(
            "chat template",
            "prompts were written in the tokenizer's chat template, try bare text",
            lambda prompt: tokenizer(words(prompt))["input_ids"],
        )
