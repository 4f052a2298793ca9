"""What is measured on: prompts from a JSONL file or a data set, in a target's chat template, in batches."""

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..training.answers import messages_of, read_records


@dataclass
class Prompt:
    """One prompt.

    Attributes:
        id: names it in the report.
        text: the user turn; None where `ids` are given.
        category: figures are also reported by category.
        ids: token ids, ready for the target.
        context: tokens that the prompt was filled up to (`fill_contexts`); None: it is as it came.
        system: message that goes before the text; None: the chat template's own.

    Example:
        >>> Prompt("sky", "Why is the sky blue?", category="science").text
        'Why is the sky blue?'
    """

    id: str
    text: str | None = None
    category: str = "all"
    ids: list[int] | None = None
    context: int | None = None
    system: str | None = None


def read_prompts(
    source: str | os.PathLike,
    *,
    categories: list[str] | None = None,
    per_category: int | None = None,
    limit: int | None = None,
    split: str = "test",
    column: str | None = None,
) -> tuple[list[Prompt], str | None]:
    """Read prompts, first turns only, and the SHA-256 of the file (None for a data set).

    Files and records are those of `training.answers.read_prompts`; `category` is optional. An `id` may come twice.

    Args:
        source: a JSONL file (`.jsonl`, `.jsonl.gz`, `.jsonl.xz`), else a name that `datasets.load_dataset` knows.
        categories: keep these only.
        per_category: keep the first ones of every category.
        limit: keep the first ones of what is left.
        split: of a data set.
        column: key of a text that is the user turn.

    Raises:
        FileNotFoundError: no such file.
        ModuleNotFoundError: a data set is asked for and `datasets` is not installed.
        ValueError: a record of another form, a category that is not there, or no prompt is left.

    Example:
        >>> prompts, sha256 = read_prompts("gsm8k_dev.jsonl", limit=30)                         # doctest: +SKIP
    """
    prompts = []
    for number, (where, record) in enumerate(read_records(source, split), 1):
        messages = messages_of(record, column, where)
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        text = messages[0 if system is None else 1]["content"]
        category = str(record.get("category", "all"))
        prompts.append(Prompt(str(record.get("id", number)), text, category, system=system))
    there = sorted({prompt.category for prompt in prompts})
    if unknown := sorted(set(categories or ()) - set(there)):
        raise ValueError(f"{source} has no category {', '.join(unknown)}; it has {', '.join(there)}.")
    kept, count = [], dict.fromkeys(there, 0)
    for prompt in prompts:
        if categories and prompt.category not in categories:
            continue
        count[prompt.category] += 1
        if per_category is None or count[prompt.category] <= per_category:
            kept.append(prompt)
    kept = kept[:limit]
    if not kept:
        raise ValueError(f"{source} holds no prompts{'' if limit is None else f' (limit {limit})'}.")
    path = Path(source)
    return kept, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def encode(prompt: Prompt, tokenizer, **options) -> list[int]:
    """Token ids of a prompt, in the tokenizer's chat template where it has one; `options` are the template's.

    Raises:
        ValueError: the prompt is a text and there is no tokenizer, or the chat template cannot write it.
    """
    if prompt.ids is not None:
        return prompt.ids
    if tokenizer is None:
        raise ValueError(f"Prompt {prompt.id!r} is a text: pass the target's tokenizer, or prompts with `ids`.")
    if getattr(tokenizer, "chat_template", None) is None:
        if prompt.system is not None:
            raise ValueError(
                f"Prompt {prompt.id!r} has a system message, and the target's tokenizer no chat template to write it "
                "in: take the message out of the prompts."
            )
        return tokenizer(prompt.text)["input_ids"]
    said = {"system": prompt.system, "user": prompt.text}
    chat = [{"role": role, "content": content} for role, content in said.items() if content is not None]
    options |= {"add_generation_prompt": True, "return_dict": True}
    try:
        return tokenizer.apply_chat_template(chat, **options)["input_ids"]
    except Exception as error:  # whatever the template raises (jinja2 has its own classes)
        raise ValueError(f"The target's chat template refuses prompt {prompt.id!r}: {error}") from error


def fill_contexts(prompts: list[Prompt], contexts: list[int], tokenizer) -> list[Prompt]:
    """Every prompt at every context length: the texts of the others, in order, go before it in the same user turn.

    The length is met to within a few tokens (text is cut and tokenized again); the report holds the true one. A
    prompt that is longer already stays as it is.
    """
    encoded = [encode(prompt, tokenizer) for prompt in prompts]
    between = [
        prompt.ids or tokenizer(f"{prompt.text}\n\n", add_special_tokens=False)["input_ids"] for prompt in prompts
    ]
    filled = []
    for context in contexts:
        for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            more: list[int] = []
            missing, other = context - len(ids), number
            while len(more) < missing:
                other = (other + 1) % len(prompts)
                more += between[other]
            more = more[: max(missing, 0)]
            if prompt.text is None:
                filled.append(replace(prompt, ids=more + ids, context=context))
            else:
                text = tokenizer.decode(more) + prompt.text
                filled.append(replace(prompt, text=text, context=context))
    return filled


@dataclass
class Batch:
    """Prompts that go through a method together: `input_ids` and `attention_mask` `[B, P]` long, padded left.

    `numbers` count the prompts through the whole run, whatever the batch size.
    """

    prompts: list[Prompt]
    numbers: list[int]
    rows: list[list[int]]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


def make_batches(prompts: list[Prompt], tokenizer, batch_size: int, pad_token_id: int, device) -> list[Batch]:
    """Neighbours of one category and context in batches of `batch_size`; the last of each group may be smaller."""
    groups: dict[tuple, list[tuple[int, Prompt]]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault((prompt.category, prompt.context), []).append((number, prompt))
    batches = []
    for group in groups.values():
        for start in range(0, len(group), batch_size):
            numbers, chosen = zip(*group[start : start + batch_size], strict=True)
            rows = [list(encode(prompt, tokenizer)) for prompt in chosen]
            longest = max(map(len, rows))
            ids = torch.tensor([[pad_token_id] * (longest - len(row)) + row for row in rows], device=device)
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
            batches.append(Batch(list(chosen), list(numbers), rows, ids, mask))
    return batches
