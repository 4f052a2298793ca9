"""Prompts to the target's own answers, which is what a drafter is trained on (paper, section 4.1 and appendix).

The answers are text of the target, token for token: a drafter learns what the target would say, not what a data set
says. Answers come from plain `generate()` on batches. Continuous batching (`generate_batch`) is left out: it hands
over its results at the end only, so a run that is killed would lose them all.
"""

import gzip
import hashlib
import json
import lzma
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

# Finished rows leave the batch this often. Each time costs one copy of the cache, as much as a few steps do.
STEPS_BETWEEN_REMOVALS = 16
# Batches are formed from this many neighbours in the prompts' order, so that their lengths agree and yet any prefix
# of the answers is as mixed as the prompts are.
BATCHES_IN_A_WINDOW = 8
# Settings of a generation config that count the tokens of a call: with them a batch stays together to its end.
COUNTING = (
    "min_length", "min_new_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty",
)  # fmt: skip
OPENERS: dict[str, Callable] = {".gz": gzip.open, ".xz": lzma.open}


@dataclass
class Prompt:
    """A conversation whose assistant turns are to be written by the target.

    Attributes:
        id: names the prompt in the answers' file; unique.
        messages: `{"role", "content"}` each: at most one system message, then user turns.
    """

    id: str
    messages: list[dict[str, str]]


@dataclass
class Sample:
    """One conversation of the target, ready for training.

    Attributes:
        id: of the prompt.
        ids: all token ids, chat template included.
        spans: `[start, stop)` of each answer in `ids`. The token that ended an answer belongs to it; an answer that
            was cut at its limit has none.
    """

    id: str
    ids: list[int]
    spans: list[tuple[int, int]]


@dataclass
class AnswerRun:
    """What one call of `answer` did: samples written, samples that were there before, prompts left out because they
    were too long, new tokens, and seconds of wall clock."""

    written: int = 0
    found: int = 0
    too_long: int = 0
    tokens: int = 0
    seconds: float = 0.0


# -- reading --


def read_prompts(source: str | os.PathLike, split: str = "train", column: str | None = None) -> list[Prompt]:
    """Read prompts from a JSONL file (`.jsonl`, `.jsonl.gz`, `.jsonl.xz`), or a data set by its name on the Hub.

    Each record holds `turns` (user turns) or `messages` (a conversation in transformers' form, of which the assistant
    turns are dropped: the target writes its own). An `id` is optional; without one the record's number is taken.

    Args:
        source: path of an existing file, else a name that `datasets.load_dataset` knows.
        split: of the data set.
        column: of a text column or key that holds a single user turn, in place of `turns` and `messages`.

    Raises:
        FileNotFoundError: no such file, and it cannot be the name of a data set.
        ModuleNotFoundError: a data set is asked for, and the package `datasets` is not installed.
        ValueError: a record is of another form, or an id comes twice; says which line.

    Example:
        >>> read_prompts("prompts.jsonl")[0].messages                      # doctest: +SKIP
        [{'role': 'user', 'content': 'Who wrote Faust?'}]
    """
    prompts, seen = [], set()
    for number, (where, record) in enumerate(read_records(source, split)):
        prompt = Prompt(str(record.get("id", number)), messages_of(record, column, where))
        if prompt.id in seen:
            raise ValueError(f"{where}: the id {prompt.id!r} comes a second time; every prompt needs its own.")
        seen.add(prompt.id)
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{source} holds no prompts.")
    return prompts


def read_records(source: str | os.PathLike, split: str) -> Iterator[tuple[str, dict]]:
    """Yield each record of a JSONL file or a data set with where it stands (`prompts.jsonl:3`), for messages.

    Args, FileNotFoundError and ModuleNotFoundError are those of `read_prompts`.

    Raises:
        ValueError: the file is damaged, or a line is not a JSON object in UTF-8; says which line.

    Example:
        >>> where, record = next(read_records("prompts.jsonl", "train"))   # doctest: +SKIP
    """
    path = Path(source)
    if path.is_file():
        return ((f"{path}:{number}", record) for number, record in _json_lines(path))
    if path.suffix in {".jsonl", ".json", *OPENERS}:
        raise FileNotFoundError(f"There is no file {path}; expected a JSONL file with prompts, or a data set's name.")
    return _dataset_records(str(source), split)


def _dataset_records(name: str, split: str) -> Iterator[tuple[str, dict]]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"There is no file {name}, and to look for a data set of that name the package `datasets` is needed: "
            'pip install "dflash-hf[train]", or ".[train]" in a clone.'
        ) from error
    for number, record in enumerate(load_dataset(name, split=split)):
        yield f"{name}[{number}]", record


def _json_lines(path: Path) -> Iterator[tuple[int, dict]]:
    """Yield `(line number from 1, object)`."""
    number = 0
    with OPENERS.get(path.suffix, open)(path, "rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(line, f"{path}:{number}")
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise ValueError(
                f"{path} is damaged or cut off after line {number} ({error}): fetch or write it again."
            ) from None


def _object(line: bytes, where: str) -> dict:
    try:
        record = json.loads(line.decode("utf-8-sig"))  # some editors put a mark at the beginning
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 (byte {error.start + 1} of the line is 0x{line[error.start]:02x}); save it as UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); expected one object a line.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}.")
    return record


def messages_of(record: dict, column: str | None, where: str) -> list[dict[str, str]]:
    """The system message and the user turns of a record, `{"role", "content"}` each.

    Args:
        record: what `read_records` yields.
        column: key of a text that is the only user turn, in place of `turns` and `messages`.
        where: says in a message which record it is.

    Raises:
        ValueError: the record is of another form.

    Example:
        >>> messages_of({"turns": ["Who wrote Faust?"]}, None, "prompts.jsonl:1")
        [{'role': 'user', 'content': 'Who wrote Faust?'}]
    """
    if column is not None:
        turns = [record.get(column)]
    elif "turns" in record:
        turns = record["turns"]
    elif "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list):
            raise ValueError(f"{where}: `messages` must be a list of turns, got {repr(messages)[:80]}.")
        roles = [m.get("role") if isinstance(m, dict) else None for m in messages]
        if not all(role in ("system", "user", "assistant") for role in roles) or "system" in roles[1:]:
            raise ValueError(
                f"{where}: `messages` must hold user and assistant turns after at most one system message, "
                f"got the roles {roles}."
            )
        system = [{"role": "system", "content": messages[0].get("content")}] if roles[:1] == ["system"] else []
        turns = [m.get("content") for m in messages if m["role"] == "user"]
        if system and not isinstance(system[0]["content"], str):
            raise ValueError(f"{where}: the system message must be text.")
        return system + _user_turns(turns, where)
    else:
        raise ValueError(
            f"{where}: expected `turns` (a list of user turns) or `messages`, got the keys {sorted(record)}; "
            "name a text column with `column` (--column)."
        )
    return _user_turns(turns, where)


def _user_turns(turns, where: str) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise ValueError(f"{where}: expected at least one user turn, each a non-empty text, got {repr(turns)[:80]}.")
    return [{"role": "user", "content": turn} for turn in turns]


def read_samples(path: str | os.PathLike) -> list[Sample]:
    """Read a file that `answer` wrote, plain or compressed (`.gz`, `.xz`).

    Lines of the form `{"p": prompt ids, "r": response ids}` are read too; their id is the line's number from 0.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is of another form, or cut off, and says which; or there is no line.

    Example:
        >>> sample = read_samples("answers.jsonl")[0]                      # doctest: +SKIP
        >>> [tokenizer.decode(sample.ids[start:stop]) for start, stop in sample.spans]      # doctest: +SKIP
        ['Goethe wrote Faust.<|im_end|>']
    """
    path = Path(path)
    samples = [_sample(record, f"{path}:{number}", number - 1) for number, record in _json_lines(path)]
    if not samples:
        raise ValueError(f"{path} holds no answers: expected a file that `dflash-hf answer` wrote.")
    return samples


def check_ids(where: str, largest: int, target) -> None:
    """Refuse token ids that a target has no embedding for.

    Args:
        where: says in the message what holds them.
        largest: of the ids.

    Raises:
        ValueError: it is beyond the target's embedding table.
    """
    rows = target.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise ValueError(
            f"{where} holds the token id {largest}, and the target's vocabulary has {rows}: these are answers of "
            "another target. Let this one write its own with `dflash-hf answer`."
        )


def fingerprint(target) -> str:
    """Tells targets apart by a few numbers of every parameter: a fine-tune has other features.

    Example:
        >>> fingerprint(target) == FeatureDataset("features").index["target"]      # doctest: +SKIP
        True
    """
    found = hashlib.sha256()
    for name, parameter in target.named_parameters():
        found.update(name.encode() + parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def _sample(record: dict, where: str, number: int) -> Sample:
    if {"p", "r"} <= set(record):
        prompt, response = record["p"], record["r"]
        if isinstance(prompt, list) and isinstance(response, list):
            record = {"id": number, "ids": prompt + response, "spans": [[len(prompt), len(prompt) + len(response)]]}
    if not {"id", "ids", "spans"} <= set(record):
        raise ValueError(f"{where}: expected the keys id, ids and spans (or p and r), got {sorted(record)}.")
    ids, spans = record["ids"], record["spans"]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{where}: `ids` must be a list of token ids, at least one, whole numbers from 0.")
    try:
        bounds = [edge for start, stop in spans for edge in (start, stop)]
        edges = [0, *bounds, len(ids)]
        ordered = all(type(edge) is int for edge in bounds) and edges == sorted(edges)
    except (TypeError, ValueError):
        ordered = False
    if not ordered or not bounds:
        raise ValueError(
            f"{where}: `spans` must be [start, stop] pairs in order within the {len(ids)} ids, got {repr(spans)[:80]}."
        )
    return Sample(str(record["id"]), ids, [tuple(span) for span in spans])


# -- answering --


def answer(
    target,
    tokenizer,
    prompts: list[Prompt],
    out: str | os.PathLike,
    *,
    max_new_tokens: int = 512,
    max_prompt_tokens: int = 2048,
    batch_size: int = 64,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    progress: bool = False,
) -> AnswerRun:
    """Let the target answer prompts; append one sample a line to `out`, a finished batch at a time.

    Greedy answers have the token ids of plain `generate()` on each prompt alone. A conversation with several user
    turns is answered in order, each turn after the target's own answers; those stay in the context token for token,
    reasoning included, whatever the chat template does with the past. A run that was killed goes on where it stopped:
    call it again. Samples in `out` are kept and their prompts skipped, a half-written last line is cut off. Beside
    `out` stands what it was made with (`answers.jsonl.settings.json`), so that other answers are not mixed in.

    Args:
        target: a decoder-only model that generates, in eval mode. Its own generation config counts where the
            arguments here say nothing (repetition penalty, end-of-sequence ids).
        tokenizer: with a chat template.
        out: a `.jsonl` file, made if it is not there.
        max_new_tokens: limit of each answer.
        max_prompt_tokens: prompts that are longer (earlier turns count) are left out and counted.
        batch_size: conversations in a batch. On a CPU a small model is fastest with 64 to 96 short prompts.
        do_sample, temperature, top_p: how to choose tokens; `seed` seeds the run, the caller's RNG stays as it was.
        progress: show progress in the terminal (needs the package `rich`).

    Raises:
        FileNotFoundError: the folder of `out` is not there.
        ValueError: the tokenizer has no chat template or refuses a prompt, `out` holds something else than samples of
            these prompts, or samples of another target or other settings, the target's generation config asks for
            beams or stop strings, or an argument is out of its range. Nothing is written then.

    Example:
        >>> answer(target, tokenizer, read_prompts("prompts.jsonl"), "answers.jsonl").written     # doctest: +SKIP
        8
    """
    if batch_size < 1 or max_new_tokens < 1:
        raise ValueError(f"batch_size and max_new_tokens must be at least 1, got {batch_size} and {max_new_tokens}.")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be from 0 to 2**64 - 1, got {seed}.")
    if tokenizer.chat_template is None:
        raise ValueError(
            "The tokenizer has no chat template; expected an instruction-tuned target. For another one set "
            "tokenizer.chat_template to the format that its prompts should have."
        )
    out = Path(out)
    if out.suffix in OPENERS:
        raise ValueError(f"{out} would be compressed, and answers are appended as they come: write to a .jsonl file.")
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"{out} cannot be written, there is no folder {out.parent}: make it, or name another.")
    config = target.generation_config
    if (config.num_beams or 1) > 1 or config.stop_strings:
        raise ValueError(
            f"The target's generation config has num_beams={config.num_beams} and stop_strings={config.stop_strings}; "
            "expected neither, answers are one greedy or sampled text that ends with a token. Unset them in "
            "target.generation_config, or in the target's generation_config.json."
        )
    chats = [_Chat(prompt, _opening_ids(tokenizer, prompt)) for prompt in prompts]
    for prompt in prompts:  # so that a template that refuses a later turn does so now
        for answered in range(1, sum(message["role"] == "user" for message in prompt.messages)):
            _text_between(tokenizer, prompt, answered)
    done = _recover(out)
    run = AnswerRun()
    waiting = []
    for chat in chats:
        if (sample := done.get(chat.prompt.id)) is not None:
            if sample.ids[: sample.spans[0][0]] != chat.ids:
                raise ValueError(
                    f"{out} holds an answer to another prompt under the id {chat.prompt.id!r} (or by another chat "
                    "template): write the answers to these prompts to a new file."
                )
            run.found += 1
        elif len(chat.ids) > max_prompt_tokens:
            run.too_long += 1
        else:
            waiting.append(chat)
    del chats
    choose: dict = {"do_sample": do_sample, "max_new_tokens": max_new_tokens}
    if do_sample:
        choose |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    _check_settings(out, {"target": fingerprint(target)} | choose, new=not done)
    devices = [target.device] if target.device.type == "cuda" else []
    started = time.perf_counter()
    bar = _progress(len(waiting)) if progress else nullcontext(lambda samples, tokens: None)
    with open(out, "a", encoding="utf-8") as file, bar as advance, torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for batch in _batches(waiting, batch_size):
            before = run.tokens
            pending = batch
            while pending:
                run.tokens += _answer_turn(target, tokenizer, pending, choose)
                pending = [chat for chat in pending if chat.turns_left]
                for chat in pending:
                    chat.ids += _ids_between(tokenizer, chat)
                run.too_long += sum(len(chat.ids) > max_prompt_tokens for chat in pending)
                pending = [chat for chat in pending if len(chat.ids) <= max_prompt_tokens]
            finished = [chat for chat in batch if not chat.turns_left]
            file.write("".join(json.dumps(chat.line(), separators=(",", ":")) + "\n" for chat in finished))
            file.flush()
            run.written += len(finished)
            advance(len(batch), run.tokens - before)
    run.seconds = time.perf_counter() - started
    return run


class _Chat:
    """A conversation under way: its ids so far, ready for the target's next answer."""

    def __init__(self, prompt: Prompt, ids: list[int]):
        self.prompt, self.ids = prompt, ids
        self.spans: list[list[int]] = []

    @property
    def turns_left(self) -> int:
        return sum(message["role"] == "user" for message in self.prompt.messages) - len(self.spans)

    def line(self) -> dict:
        return {"id": self.prompt.id, "ids": self.ids, "spans": self.spans}


def _opening_ids(tokenizer, prompt: Prompt) -> list[int]:
    """Ids up to the first answer."""
    first = 2 if prompt.messages[0]["role"] == "system" else 1
    return _templated(tokenizer, prompt, prompt.messages[:first], tokenize=True)["input_ids"]


def _templated(tokenizer, prompt: Prompt, messages: list[dict], tokenize: bool):
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=tokenize)
    except Exception as error:  # whatever the template raises (jinja2 has its own classes)
        raise ValueError(f"The chat template refuses the prompt {prompt.id!r}: {error}") from error


def _text_between(tokenizer, prompt: Prompt, answered: int) -> str:
    """The template's text from behind the last of so many answers up to the next one, with the user turn in it."""
    messages, mark = [], "\ufffcANSWER\ufffc"
    users = 0
    for message in prompt.messages:
        if message["role"] == "user" and users > answered:
            break
        if message["role"] == "user" and users:
            messages.append({"role": "assistant", "content": mark})
        users += message["role"] == "user"
        messages.append(message)
    text = _templated(tokenizer, prompt, messages, tokenize=False)
    if mark not in text:
        raise ValueError(
            f"The chat template loses the earlier answers of the prompt {prompt.id!r}: give it one turn, or set "
            "tokenizer.chat_template to one that keeps them."
        )
    return text.rpartition(mark)[2]


def _ids_between(tokenizer, chat: _Chat) -> list[int]:
    """Ids from behind the last answer up to the next one."""
    text = _text_between(tokenizer, chat.prompt, len(chat.spans))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # The answer usually ends with the token that the template would put there.
    return ids[1:] if ids and chat.ids[-1] == ids[0] else ids


def _batches(chats: list[_Chat], batch_size: int) -> Iterator[list[_Chat]]:
    window = batch_size * BATCHES_IN_A_WINDOW
    for start in range(0, len(chats), window):
        near = sorted(chats[start : start + window], key=lambda chat: len(chat.ids))
        batches = [near[first : first + batch_size] for first in range(0, len(near), batch_size)]
        random.Random(start).shuffle(batches)  # an interrupted window is mixed too, and the time left is no guess
        yield from batches


@torch.inference_mode()
def _answer_turn(target, tokenizer, chats: list[_Chat], choose: dict) -> int:
    """Append the target's next answer to every conversation; return the number of new tokens."""
    ends = target.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.long).flatten()
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else int(ends[0]) if len(ends) else 0
    width = max(len(chat.ids) for chat in chats)
    ids = torch.tensor([[pad] * (width - len(chat.ids)) + chat.ids for chat in chats])  # [B, width]
    mask = torch.tensor([[0] * (width - len(chat.ids)) + [1] * len(chat.ids) for chat in chats])
    rows, cache, steps = list(chats), None, choose["max_new_tokens"]
    together = any(getattr(target.generation_config, name) for name in COUNTING)
    while rows:
        steps_now = steps if together else min(STEPS_BETWEEN_REMOVALS, steps)
        output = target.generate(
            ids.to(target.device),
            attention_mask=mask.to(target.device),
            cache=cache,
            **choose | {"max_new_tokens": steps_now},
            pad_token_id=pad,
            return_dict_in_generate=True,
        )
        ids, cache = output.sequences.cpu(), output.cache
        steps -= steps_now
        is_end = torch.isin(ids[:, width:], ends)  # [rows, new]
        ended = is_end.any(dim=1) if steps else torch.ones(len(rows), dtype=torch.bool)
        for row in ended.nonzero().flatten().tolist():
            length = int(is_end[row].int().argmax()) + 1 if is_end[row].any() else is_end.shape[1]
            chat = rows[row]
            chat.spans.append([len(chat.ids), len(chat.ids) + length])
            chat.ids = chat.ids + ids[row, width : width + length].tolist()
        keep = (~ended).nonzero().flatten()
        rows = [rows[i] for i in keep.tolist()]
        ids = ids[keep]
        mask = torch.cat([mask[keep], mask.new_ones(len(keep), ids.shape[1] - mask.shape[1])], dim=1)
        if ended.any() and rows:
            cache.batch_select_indices(keep.to(target.device))
    return sum(stop - start for start, stop in (chat.spans[-1] for chat in chats))


def _check_settings(out: Path, settings: dict, new: bool) -> None:
    """Compare `settings` with those that the answers in `out` were made with, or keep them for a `new` file."""
    path = out.with_name(out.name + ".settings.json")
    if new:
        write_json(path, settings)
    elif path.is_file():  # answers that were made elsewhere have none
        try:
            found = dict(json.loads(path.read_text()).items())
        except (ValueError, AttributeError):
            raise ValueError(
                f"{path} is damaged: delete it if {out} was made with this target and these settings, else both."
            ) from None
        names = [name for name in settings | found if found.get(name) != settings.get(name)]
        differ = [f"{name} {found.get(name)}, now {settings.get(name)}" for name in names]
        if differ:
            raise ValueError(
                f"{out} holds answers of another kind ({'; '.join(differ)}): go on with what they were made with, or "
                "name a new file."
            )


def _recover(out: Path) -> dict[str, Sample]:
    """The samples that are already in `out`, by id; a half-written last line is cut off the file."""
    if not out.exists():
        return {}
    if not out.is_file():  # a folder, or a device that may never end
        raise FileExistsError(f"Expected the name of a file to write, {out} is something else.")
    content = out.read_bytes()
    whole = content.rfind(b"\n") + 1
    samples = {}
    for number, line in enumerate(content[:whole].splitlines(), 1):
        if not line.strip():  # as `read_samples` has it
            continue
        try:
            sample = _sample(json.loads(line), f"{out}:{number}", number - 1)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{out} is there already and line {number} is no sample: {error}") from None
        samples[sample.id] = sample
    if whole < len(content):
        start = b'{"id":'
        if whole == 0 and content[: len(start)] != start[: len(content)]:
            raise ValueError(f"{out} is there already and holds no samples: name a new file.")
        os.truncate(out, whole)
    return samples


@contextmanager
def _progress(total: int):
    """Yield `advance(samples, tokens)`: a bar in a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns: list = ["answers", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f} tokens/s")]
    with Progress(*columns, TimeRemainingColumn(elapsed_when_finished=True), console=console) as bar:
        task = bar.add_task("", total=total, rate=0.0)
        started, answers, tokens = time.perf_counter(), 0, 0

        def advance(new_answers: int, new_tokens: int) -> None:
            nonlocal answers, tokens
            answers, tokens = answers + new_answers, tokens + new_tokens
            seconds = time.perf_counter() - started
            bar.update(task, advance=new_answers, rate=tokens / seconds)
            if not console.is_terminal:
                left = seconds * (total - answers) / answers / 60
                print(f"{answers}/{total} answers, {tokens / seconds:.0f} tokens/s, {left:.0f} min left", flush=True)

        yield advance
