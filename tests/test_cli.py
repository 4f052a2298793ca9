"""`dflash-hf generate` and `chat` against plain generate(), and bad input to every command."""

import gzip
import io
import json
import os
import pkgutil
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("typer")
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel, __version__
from dflash_hf.checkpoints import convert
from dflash_hf.cli import _load_pair, app
from dflash_hf.terminal import AcceptedStreamer, Conversation, answer, encode, shaded
from drafters import BLOCK, HITS, make_drafter, oracle
from targets import make_target, prompt_ids

SHADE, END = "\x1b[30;42m", "\x1b[0m"
# Every turn ends with a letter for who spoke; the tiny tokenizer knows the characters from 0 to o.
TURN = "{{ m.content }}{{ {'system': 'm', 'user': 'n', 'assistant': 'o'}[m.role] }}"
TEMPLATE = f"{{% for m in messages %}}{TURN}{{% endfor %}}"


@pytest.fixture
def tokenizer(byte_tokenizer):
    """The tiny one, with a chat template."""
    byte_tokenizer.chat_template = TEMPLATE
    yield byte_tokenizer
    byte_tokenizer.chat_template = None


@pytest.fixture(scope="module")
def pair(tmp_path_factory, byte_tokenizer):
    """Folders of a tiny target and its drafter, as options of a command."""
    folder = tmp_path_factory.mktemp("pair")
    make_target("llama").save_pretrained(folder / "target")
    byte_tokenizer.chat_template = TEMPLATE
    byte_tokenizer.save_pretrained(folder / "target")
    byte_tokenizer.chat_template = None
    make_drafter().save_pretrained(folder / "drafter")
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--device", "cpu"]


def invoke(command, *arguments, stdin=None, **env):
    return CliRunner().invoke(app, [command, *arguments], input=stdin, env={"NO_COLOR": None} | env)


def plain(target, ids, new):
    ids = torch.tensor([ids])
    out = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return out[0, ids.shape[1] :].tolist()


# -- which tokens were drafted --


def accepted_by_hand(start: int, end: int, hit) -> list[bool]:
    """Of the positions from `start` to `end`: whether a draft that `hit` says is right put the token there."""
    flags = [False]  # the prefill's
    while len(flags) < end - start:
        position = start + len(flags)
        room = min(BLOCK - 1, end - position - 1)
        right = next((i for i in range(room) if not hit(position + i)), room)
        flags += [True] * right + [False]
    return flags


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("new", [1, 2, 9, 30])
def test_accepted_drafts_are_those_that_were_right(hit, new, byte_tokenizer):
    target, ids = make_target("llama"), prompt_ids()
    expected = plain(target, ids[0].tolist(), new)
    drafter, pieces = oracle([*ids[0].tolist(), *expected], hit), []
    done = answer(
        target,
        drafter,
        byte_tokenizer,
        ids,
        lambda *piece: pieces.append(piece),
        do_sample=False,
        max_new_tokens=new,
    )
    assert done.ids == expected
    assert done.accepted == accepted_by_hand(ids.shape[1], ids.shape[1] + new, HITS[hit])
    assert sum(done.accepted) == sum(done.run.accepted)
    assert pieces == list(zip(byte_tokenizer.convert_ids_to_tokens(expected), done.accepted, strict=True))
    assert done.text == "".join(text for text, _ in pieces)


def longrope_target():
    """Decoded plainly where a text crosses 16 positions."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return make_target("phi3", rope_parameters=rope, original_max_position_embeddings=16)


def test_a_call_that_is_decoded_without_the_drafter_shows_no_drafts(byte_tokenizer):
    target, ids, pieces = longrope_target(), prompt_ids(), []
    options = {"do_sample": False, "max_new_tokens": 9}
    with pytest.warns(UserWarning, match="cross 16 positions"):
        done = answer(target, make_drafter(), byte_tokenizer, ids, lambda *piece: pieces.append(piece), **options)
    assert done.ids == plain(target, ids[0].tolist(), 9)
    assert done.accepted == [accepted for _, accepted in pieces] == [False] * 9
    assert str(done).endswith(" tokens/s), decoded without the drafter; 9 target passes, 0 with drafts")
    shown = json.loads(done.to_json())
    assert (shown["tau"], shown["target_passes"], shown["accepted"]) == (None, 9, [False] * 9)


def test_text_comes_whole_when_characters_take_several_tokens():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer, pieces = PreTrainedTokenizerFast(tokenizer_object=backend), []
    text = "a é 中\n😀bc"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    drafter = SimpleNamespace(last_run=SimpleNamespace(target_passes=0))
    streamer = AcceptedStreamer(tokenizer, drafter, lambda *piece: pieces.append(piece))
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for number, token in enumerate([*ids, ids[-5]]):  # one byte of the emoji more, and no end to it
        drafter.last_run.target_passes = 1 + number // 2
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(piece for piece, _ in pieces) == text + "\ufffd"
    assert len(ids) % 2 == 1 and streamer.accepted == [True, False] * ((len(ids) + 1) // 2)
    assert [piece for piece, _ in pieces][:4] == ["a", " ", "é", " "]


@pytest.mark.parametrize(
    ("options", "env", "expected"),
    [
        ({"force_terminal": True, "color_system": "256"}, {}, f"own{SHADE}one{END}\n{SHADE}two{END}"),
        ({"force_terminal": True, "color_system": "256"}, {"NO_COLOR": "1"}, "ownone\ntwo"),
        ({"force_terminal": True}, {"TERM": "dumb"}, "ownone\ntwo"),
        ({}, {}, "ownone\ntwo"),  # not a terminal
    ],
)
def test_shading(options, env, expected):
    write = shaded(Console(file=(file := io.StringIO()), _environ=env, **options))
    write("own", False)
    write("one\ntwo", True)
    assert file.getvalue() == expected


# -- the commands --


def test_generate_streams_the_targets_own_text(pair, tokenizer):
    target = make_target("llama")
    ids = encode(tokenizer, [{"role": "user", "content": "ABCD"}])[0].tolist()
    assert tokenizer.decode(ids) == "ABCDn"
    expected = tokenizer.decode(plain(target, ids, 20))
    done = invoke("generate", "ABCD", *pair, "--max-new-tokens", "20")
    assert done.exit_code == 0, done.output
    assert done.stdout == expected + "\n"
    assert "20 tokens in" in done.stderr and "tokens/s" in done.stderr and "tau" in done.stderr

    raw = invoke("generate", "-", *pair, "--max-new-tokens", "20", "--raw", stdin="ABCD")
    assert raw.stdout == tokenizer.decode(plain(target, ids[:-1], 20)) + "\n" != done.stdout
    coloured = invoke("generate", "ABCD", *pair, "--max-new-tokens", "20", FORCE_COLOR="1", TERM="xterm")
    assert coloured.stdout.replace(SHADE, "").replace(END, "") == done.stdout


def test_generate_json_holds_what_happened(pair, tokenizer):
    constant = ["--schedule", "constant", "--json"]
    done = invoke("generate", "ABCD", *pair, *constant, "--max-new-tokens", "20")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    ids = encode(tokenizer, [{"role": "user", "content": "ABCD"}])[0].tolist()
    assert result["ids"] == plain(make_target("llama"), ids, 20)
    assert result["text"] == tokenizer.decode(result["ids"])
    assert result["target_passes"] == 20 - sum(result["accepted"])
    assert result["tau"] == pytest.approx(19 / (result["target_passes"] - 1))
    assert result["tokens_per_second"] == pytest.approx(20 / result["seconds"])
    one = json.loads(invoke("generate", "ABCD", *pair, *constant, "--max-new-tokens", "1").stdout)
    assert one["tau"] is None and one["ids"] == result["ids"][:1]


def test_sampling_options_reach_generate(pair):
    def text(*options):
        done = invoke("generate", "ABCD", *pair, "--max-new-tokens", "20", *options)
        assert done.exit_code == 0, done.output
        return done.stdout

    hot = ["--sample", "--temperature", "3"]
    assert text(*hot) == text(*hot) != text(*hot, "--seed", "1")
    assert text(*hot, "--top-k", "1") == text(*hot, "--top-p", "1e-6") == text()


def test_all_devices_there_are_may_be_one(pair):
    pytest.importorskip("accelerate")
    command = ["generate", "ABCD", *pair, "--max-new-tokens", "20"]
    assert invoke(*command, "--device", "auto").stdout == invoke(*command).stdout != ""


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_pairs_come_in_one_dtype_and_rope_in_float32(layout, dtype, pair, tmp_path):
    target, drafter = (pair[pair.index(f"--{name}") + 1] for name in ("target", "drafter"))
    if layout == "speculators":
        # Without the knobs: speculators' layout holds no schedule.
        shutil.copytree(drafter, tmp_path / "z", ignore=shutil.ignore_patterns("generation_config.json"))
        convert(tmp_path / "z", tmp_path / "s", to=layout, target="someone/some-target")
        drafter = str(tmp_path / "s")
    model, assistant, _ = _load_pair(target, drafter, "constant", dtype=dtype, device="cpu")
    assert assistant.dtype == model.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    assert assistant.rotary_emb.inv_freq.dtype == torch.float32 and assistant.config.name_or_path == drafter
    assert assistant.generation_config.num_assistant_tokens_schedule == "constant"


def test_chat_answers_as_if_each_turn_were_told_from_the_beginning(pair, tokenizer):
    turns, messages, expected = ["ABCD", "", "EFGH", "IJ"], [], []
    for turn in filter(None, turns):
        messages.append({"role": "user", "content": turn})
        text = tokenizer.decode(plain(make_target("llama"), encode(tokenizer, messages)[0].tolist(), 12))
        messages.append({"role": "assistant", "content": text})
        expected.append(text)
    options = [*pair, "--max-new-tokens", "12"]
    done = invoke("chat", *options, stdin="\n".join(turns))
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == expected
    assert done.stderr.count("12 tokens in") == 3
    lines = invoke("chat", *options, "--json", stdin="\n".join(turns)).stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == expected
    told = invoke("chat", *options, "--system", "KLM", stdin="ABCD").stdout
    system = [{"role": "system", "content": "KLM"}, {"role": "user", "content": "ABCD"}]
    ids = encode(tokenizer, system)[0].tolist()
    assert told == tokenizer.decode(plain(make_target("llama"), ids, 12)) + "\n"


def test_chat_goes_on_after_a_turn_without_room_and_takes_the_room_that_is_left(pair, tokenizer, tmp_path):
    drafter = pair[pair.index("--drafter") + 1]
    make_target("llama", max_position_embeddings=32).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target, messages, expected = make_target("llama", max_position_embeddings=32), [], []
    for turn, room in [("ABCD", 12), ("EF", 11)]:  # 5 tokens, then 5 + 12 + the turn's end + 3 of 32
        messages.append({"role": "user", "content": turn})
        text = tokenizer.decode(plain(target, encode(tokenizer, messages)[0].tolist(), room))
        messages.append({"role": "assistant", "content": text})
        expected.append(text)
    options = ["--target", str(tmp_path), "--drafter", drafter, "--device", "cpu"]
    done = invoke("chat", *options, "--max-new-tokens", "12", stdin="\n".join(["ABCD", 40 * "A", "EF", "G"]))
    assert done.exit_code == 0 and done.stdout.splitlines() == expected, done.output
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert [line.partition(",")[0] for line in errors] == [
        "Error: With this turn the talk has 59 tokens", "Error: With this turn the talk has 35 tokens"
    ]  # fmt: skip
    assert "the target's 32 positions leave no room for an answer" in errors[0]
    alone = invoke("chat", *options, "--json", stdin="ABCD")  # by default as many as there are
    assert len(json.loads(alone.stdout)["ids"]) == 32 - 5


def test_a_conversation_keeps_its_cache_and_gives_it_up_where_the_text_changes(tokenizer, monkeypatch):
    target, drafter = make_target("llama"), make_drafter()
    seen = []
    prefill = type(target)._prefill
    monkeypatch.setattr(
        type(target),
        "_prefill",
        lambda self, ids, config, kwargs, **more: (
            seen.append(ids.shape[1] - kwargs["cache"].get_seq_length()) or prefill(self, ids, config, kwargs, **more)
        ),
    )
    talk, options = Conversation(target, drafter, tokenizer), {"do_sample": False, "max_new_tokens": 10}

    def say(text, write=lambda *_: None):
        said = [*talk.messages, {"role": "user", "content": text}]
        expected = plain(target, encode(tokenizer, said)[0].tolist(), 10)
        seen.clear()
        assert talk.say(text, write, **options).ids == expected
        return seen[0]

    assert say("ABCD") == 5
    assert say("EFG") == 1 + 1 + 4  # the last token, the turn's end, and the new turn
    tokenizer.chat_template = TEMPLATE.replace("messages", "messages[-3:]")
    assert say("HIJ") == 4 + 11 + 4

    def interrupt(piece, accepted):
        raise KeyboardInterrupt

    before = list(talk.messages)
    with pytest.raises(KeyboardInterrupt):
        talk.say("KLM", interrupt, **options)
    assert talk.messages == before
    say("NOP")


# -- bad input --


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def write_list(folder):
    (folder / "config.json").write_text("[]")


def spoil(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def as_pickle(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")


# name: the folder that it is a damaged copy of, and what is done to it
DAMAGED = {
    "target-cut": ("target", lambda f: cut(f / "model.safetensors", 5000)),
    "target-config-cut": ("target", lambda f: cut(f / "config.json", 50)),
    "target-tokenizer-cut": ("target", lambda f: cut(f / "tokenizer.json", 100)),
    "target-no-weights": ("target", lambda f: (f / "model.safetensors").unlink()),
    "target-pickle": ("target", as_pickle),
    "target-size": ("target", lambda f: edit_json(f / "config.json", intermediate_size=40)),
    "target-no-chat": ("target", lambda f: (f / "chat_template.jinja").unlink()),
    "target-list": ("target", write_list),
    "target-bad-chat": ("target", lambda f: (f / "chat_template.jinja").write_text("{% for")),
    "drafter-cut": ("drafter", lambda f: cut(f / "model.safetensors", 5000)),
    "drafter-empty": ("drafter", lambda f: cut(f / "model.safetensors", 0)),
    "drafter-config-cut": ("drafter", lambda f: cut(f / "config.json", 50)),
    "drafter-pickle": ("drafter", as_pickle),
    "drafter-no-weights": ("drafter", lambda f: (f / "model.safetensors").unlink()),
    "drafter-list": ("drafter", write_list),
    "drafter-nan": ("drafter", spoil),
    "drafter-latin": ("drafter", lambda f: (f / "README.md").write_bytes("# Café".encode("latin-1"))),
    "drafter-knobs": ("drafter", lambda f: edit_json(f / "generation_config.json", num_assistant_tokens="x")),
    "drafter-mask": ("drafter", lambda f: edit_json(f / "config.json", mask_token_id=999, dflash_config={})),
}
FILES = {
    "text": "hello\n",
    "x.gguf": "GGUF" + 40 * "\0",
    "prompts.jsonl": '{"turns": ["ABCD"]}\n',
    "nothing.jsonl": "",
    "long.jsonl": json.dumps({"turns": [600 * "A"]}) + "\n",
    "no-turns.jsonl": '{"turns": []}\n',
    "turns-text.jsonl": '{"turns": "ABCD"}\n',
    "messages-odd.jsonl": '{"messages": ["ABCD"]}\n',
    "system.jsonl": '{"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]}\n',
    "empty-prompt.jsonl": '{"turns": [""]}\n',
    "answers.jsonl": json.dumps({"id": "a", "ids": list(range(8, 40)), "spans": [[4, 30]]}) + "\n",
    "answers-cut.jsonl": '{"id": "a", "ids": [1, 2',
    "answers-span.jsonl": json.dumps({"id": "a", "ids": [8, 9], "spans": [[4, 30]]}) + "\n",
    "answers-other.jsonl": json.dumps({"id": "a", "ids": [8, 9999, 9], "spans": [[1, 3]]}) + "\n",
    "measured.json": "{}",
    "measured-cut.json": '{"a"',
}
GENERATE = "generate ABCD --target target --drafter drafter --device cpu --max-new-tokens 4"
CHAT = "chat --target target --drafter drafter --device cpu --max-new-tokens 4"
ANSWER = "answer target prompts.jsonl out --device cpu --max-new-tokens 4"
FEATURES = "features target answers.jsonl out --drafter drafter --device cpu"
TRAIN = "train target --data answers.jsonl --output_dir out --max_steps 1 --mask-token-id 3 --report_to none --use_cpu"
BENCH = "bench target drafter prompts.jsonl --out out --device cpu --max-new-tokens 4"
CHECK = "check target drafter --device cpu --max-new-tokens 4"
CONVERT = "convert drafter out"
PUSH = "push drafter me/x --license mit --base-model a/b --out out"
# a command that works, what is put in place of what in it (or behind it), and what the error must say
BAD = [
    (GENERATE, {"ABCD": "''"}, "prompt is empty"),
    (GENERATE, {"ABCD": "-"}, "prompt is empty"),  # nothing on standard input
    (GENERATE, {"ABCD": 600 * "A"}, "601 tokens and 4 new ones are more than the target's 512"),
    (GENERATE, {"ABCD": "--raw " + 600 * "A"}, "600 tokens and 4 new ones"),
    (GENERATE, {" target ": " nowhere/at/all "}, "Expected a folder, a GGUF file or a Hub name like owner/name"),
    (GENERATE, {" target ": " text "}, "Expected a folder, a GGUF file or a Hub name like owner/name, got text"),
    (GENERATE, {" target ": " nothing "}, "connect"),  # taken for a name on the Hub
    (GENERATE, {" target ": " someone/nothing "}, "someone/nothing cannot be loaded: We couldn't connect"),
    (GENERATE, {" target ": " '' "}, "or a Hub name like owner/name, got nothing"),
    (GENERATE, {" target ": " empty "}, "tokenizer"),
    (GENERATE, {" target ": " target-list "}, "A file of target-list is damaged"),
    (GENERATE, {" target ": " drafter "}, "does not hold the weights of a Qwen3ForCausalLM: 2 tensors"),
    (GENERATE, {" target ": " target-cut "}, "A file of target-cut is damaged or incomplete"),
    (GENERATE, {" target ": " target-config-cut "}, "target-config-cut/config.json' is not a valid JSON file"),
    (GENERATE, {" target ": " target-tokenizer-cut "}, "A file of target-tokenizer-cut is damaged"),
    (GENERATE, {" target ": " target-no-weights "}, "no file named model.safetensors"),
    (GENERATE, {" target ": " target-pickle "}, "does not hold the weights of a LlamaForCausalLM"),
    (GENERATE, {" target ": " target-size "}, "15 tensors are missing or of another shape"),
    (GENERATE, {" target ": " target-no-chat "}, "no chat template; use `dflash-hf generate --raw`"),
    (GENERATE, {" target ": " target-bad-chat "}, "chat template refuses the conversation"),
    (GENERATE, {" target ": " target-other "}, "vocabulary of 64 tokens, the target has 80"),
    (GENERATE, {" target ": " x.gguf "}, "x.gguf"),
    (GENERATE, {" target ": " no.gguf "}, "no.gguf"),
    (GENERATE, {"--drafter drafter": "--drafter nowhere"}, "Expected a drafter's folder or a Hub name"),
    (GENERATE, {"--drafter drafter": "--drafter someone/nothing"}, "someone/nothing cannot be fetched"),
    (GENERATE, {"--drafter drafter": "--drafter drafter-list"}, "config.json must hold an object, got a list"),
    (GENERATE, {"--drafter drafter": "--drafter empty"}, "empty has no config.json"),
    (GENERATE, {"--drafter drafter": "--drafter target"}, "Expected a DFlash drafter"),
    (GENERATE, {"--drafter drafter": "--drafter drafter-cut"}, "drafter-cut/model.safetensors cannot be read"),
    (GENERATE, {"--drafter drafter": "--drafter drafter-empty"}, "drafter-empty/model.safetensors cannot be read"),
    (GENERATE, {"--drafter drafter": "--drafter drafter-config-cut"}, "config.json is not valid JSON"),
    (GENERATE, {"--drafter drafter": "--drafter drafter-pickle"}, "pytorch_model.bin may run code"),
    (GENERATE, {"--drafter drafter": "--drafter drafter-no-weights"}, "drafter-no-weights has no model.safetensors"),
    (GENERATE, {"--drafter drafter": "--drafter drafter-mask"}, "an id of the vocabulary, 0 to 63, got 999"),
    (GENERATE, "--sample --temperature 0", "Expected a finite temperature > 0"),
    (GENERATE, "--sample --temperature nan", "Expected a finite temperature > 0"),
    (ANSWER, "--sample --temperature inf", "Expected a finite temperature > 0"),
    (GENERATE, "--sample --top-p 2", "0 < top_p <= 1"),
    (GENERATE, "--temperature 0.6 --top-k 20", "and --temperature, --top-k would be ignored: add --sample"),
    (CHAT, "--top-k 0", "and --top-k would be ignored: add --sample"),
    (ANSWER, "--top-p 1", "and --top-p would be ignored: add --sample"),
    (BENCH, "--temperature 1", "and --temperature would be ignored: add --sample"),
    (GENERATE, "--seed 18446744073709551616", "'--seed': Input should be less than"),
    (GENERATE, "--dtype float99", "got 'float99'"),
    (GENERATE, "--dtype int64", "got 'int64'"),
    (GENERATE, "--device mars", "The device 'mars' cannot be had here"),
    (GENERATE, "--schedule heuristic", "'heuristic' is not one of"),
    (GENERATE, "--max-new-tokens 0", "greater than or equal"),
    (GENERATE, "--gguf-file no.gguf", "no.gguf"),
    (GENERATE, "--nope", "No such option: --nope"),
    (GENERATE, {"--target target": ""}, "Missing option '--target'"),
    (CHAT, {" target ": " target-cut "}, "A file of target-cut is damaged"),
    (CHAT, {" target ": " target-no-chat "}, "no chat template"),
    (CHAT, {" target ": " target-other "}, "vocabulary of 64 tokens, the target has 80"),
    (CHAT, "--seed -1", "'--seed': Input should be greater than"),
    (CHAT, {"--drafter drafter": ""}, "Missing option '--drafter'"),
    (ANSWER, {"prompts.jsonl": "nowhere.jsonl"}, "There is no file nowhere.jsonl"),
    (ANSWER, {"prompts.jsonl": "text"}, "text:1: not JSON"),
    (ANSWER, {"prompts.jsonl": "latin.jsonl"}, "latin.jsonl:1: not UTF-8"),
    (ANSWER, {"out": "text/x"}, "text/x"),
    (ANSWER, {"out": "pipe"}, "Expected the name of a file to write"),
    (ANSWER, {"prompts.jsonl": "nothing.jsonl"}, "nothing.jsonl holds no prompts"),
    (ANSWER, {"prompts.jsonl": "no-turns.jsonl"}, "no-turns.jsonl:1: expected at least one user turn"),
    (ANSWER, {"prompts.jsonl": "empty-prompt.jsonl"}, "each a non-empty text, got ['']"),
    (ANSWER, {"target": "target-no-chat"}, "no chat template"),
    (ANSWER, {"out": "empty"}, "empty"),
    (ANSWER, {"out": "nowhere/out"}, "nowhere/out"),
    (ANSWER, "--sample --temperature 0", "Expected a finite temperature > 0"),
    (ANSWER, "--batch-size 0", "greater than or equal"),
    (ANSWER, "--max-new-tokens -1", "greater than or equal"),
    (FEATURES, {"answers.jsonl": "nowhere.jsonl"}, "nowhere.jsonl"),
    (FEATURES, {"answers.jsonl": "answers-cut.jsonl"}, "answers-cut.jsonl:1: not JSON"),
    (FEATURES, {"answers.jsonl": "latin.jsonl"}, "latin.jsonl:1: not UTF-8"),
    (FEATURES, {"answers.jsonl": "answers-other.jsonl"}, "token id 9999, and the target's vocabulary has 64"),
    (FEATURES, {"out": "target"}, "target holds another model"),
    (FEATURES, {"answers.jsonl": "answers-span.jsonl"}, "pairs in order within the 2 ids"),
    (FEATURES, {"answers.jsonl": "nothing.jsonl"}, "nothing.jsonl holds no answers"),
    (FEATURES, {"drafter drafter": "drafter target"}, "Expected a DFlash drafter"),
    (FEATURES, {"out": "text"}, "text"),
    (FEATURES, "--storage int4", "got 'int4'"),
    (TRAIN, {"answers.jsonl": "nowhere.jsonl"}, "nowhere.jsonl"),
    (TRAIN, {"answers.jsonl": "answers-cut.jsonl"}, "answers-cut.jsonl:1: not JSON"),
    (TRAIN, {"answers.jsonl": "empty"}, "expected a folder of `dflash-hf features`"),
    (TRAIN, {"max_steps 1": "max_steps one"}, "invalid int value: 'one'"),
    (TRAIN, {"mask-token-id 3": "mask-token-id 9999"}, "0 to 63, got 9999"),
    (TRAIN, {"out": "text"}, "text"),
    (TRAIN, {"_dir out": "_dir target"}, "target holds another model"),
    (TRAIN, {"data answers.jsonl": "data ,"}, "Expected answers or folders of features as --data"),
    (TRAIN, {"answers.jsonl": "answers-other.jsonl"}, "token id 9999"),
    (TRAIN, "--block-size 1", "greater than or equal to 2"),
    (TRAIN, "--seed 18446744073709551616", "seed must be from 0"),
    (TRAIN, "--init-from drafter-cut", "drafter-cut/model.safetensors cannot be read"),
    (TRAIN, "--num_anchors 0", "num_anchors must be at least 1"),
    (TRAIN, "--num-layers 0", "greater than or equal"),
    (TRAIN, "--nope 3", "--nope"),
    (TRAIN, "--optim galore_adamw --optim_target_modules fc", "galore_torch"),  # a package that is not there
    (BENCH, {"prompts.jsonl": "nowhere.jsonl"}, "There is no file nowhere.jsonl"),
    (BENCH, {"prompts.jsonl": "latin.jsonl"}, "latin.jsonl:1: not UTF-8"),
    (BENCH, {"prompts.jsonl": "nothing.jsonl"}, "nothing.jsonl holds no prompts"),
    (BENCH, {"prompts.jsonl": "empty-prompt.jsonl"}, "empty-prompt.jsonl:1: expected at least one user"),
    (BENCH, {"prompts.jsonl": "no-turns.jsonl"}, "no-turns.jsonl:1: expected at least one user turn"),
    (BENCH, {"prompts.jsonl": "turns-text.jsonl"}, "each a non-empty text, got 'ABCD'"),
    (BENCH, {"prompts.jsonl": "messages-odd.jsonl"}, "messages-odd.jsonl:1: `messages` must hold user and assistant"),
    (BENCH, {"prompts.jsonl": "cut.jsonl.gz"}, "cut.jsonl.gz is damaged or cut off"),
    (BENCH, {"prompts.jsonl": "nowhere.jsonl.xz"}, "There is no file nowhere.jsonl.xz"),
    (BENCH, {"target ": "target-bad-chat "}, "chat template refuses prompt '1'"),
    (BENCH, {"target ": "target-no-chat ", "prompts.jsonl": "system.jsonl"}, "Prompt '1' has a system message"),
    (BENCH, "--limit -5", "greater than or equal"),
    (BENCH, "--per-category 0", "greater than or equal"),
    (BENCH, "--max-new-tokens 0", "greater than or equal"),
    (BENCH, "--repeats 0", "greater than or equal"),
    (BENCH, "--batch-size 0", "greater than or equal"),
    (BENCH, {"target ": "target-cut "}, "A file of target-cut is damaged"),
    (BENCH, {"target ": "target-other "}, "vocabulary of 64 tokens, the target has 80"),
    (BENCH, {" drafter": " drafter-cut"}, "drafter-cut/model.safetensors cannot be read"),
    (BENCH, {"out out": "out nowhere/out"}, "There is no folder"),
    (BENCH, "--seed -1", "'--seed': Input should be greater than"),
    (BENCH, {"out out": "out empty"}, "Expected the name of a file to write"),
    (BENCH, {"out out": "out pipe"}, "Expected the name of a file to write"),
    (BENCH, "--contexts -5", "1 token or more"),
    (BENCH, "--block-lengths 9", "between 1 and 3"),
    (BENCH, {"prompts.jsonl": "long.jsonl"}, "601 tokens and 4 new ones are more than the target's 512"),
    (BENCH, "--threads 0", "greater than or equal"),
    (CHECK, {"target ": "target-cut "}, "A file of target-cut is damaged"),
    (CHECK, {"target ": "target-pickle "}, "does not hold the weights of a LlamaForCausalLM"),
    (CHECK, {" drafter": " nowhere"}, "Expected a drafter's folder or a Hub name"),
    (CHECK, {" drafter": " someone/nothing"}, "someone/nothing cannot be fetched"),
    (CHECK, "--prompts latin.jsonl", "latin.jsonl:1: not UTF-8"),
    (CHECK, "--prompts nowhere.jsonl", "There is no file nowhere.jsonl"),
    (CHECK, "--out pipe", "Expected the name of a file to write"),
    (CHECK, "--out nowhere/out", "There is no folder nowhere"),
    (CHECK, "--dtype float99", "got 'float99'"),
    (CONVERT, {"drafter": "target"}, "Expected a DFlash drafter"),
    (CONVERT, {"drafter": "drafter-empty"}, "drafter-empty/model.safetensors cannot be read"),
    (CONVERT, {"drafter": "drafter-nan"}, "not numbers (NaN)"),
    (CONVERT, {"drafter": "someone/nothing"}, "someone/nothing cannot be fetched"),
    (CONVERT, {"drafter": "drafter-knobs"}, "num_assistant_tokens must be a whole number from 1 on"),
    (CONVERT, {"out": "target"}, "target is there already"),
    (CONVERT, {"out": "nowhere/out"}, "There is no folder"),
    (CONVERT, "--to gguf", "Expected one of the layouts"),
    (PUSH, {"drafter": "target"}, "Expected a DFlash drafter"),
    (PUSH, {"drafter": "drafter-pickle"}, "may run code"),
    (PUSH, {"drafter": "drafter-knobs"}, "num_assistant_tokens must be a whole number from 1 on"),
    (PUSH, {"drafter": "drafter-latin"}, "README.md is not UTF-8"),
    (PUSH, {"me/x": "'me/a b'"}, "Expected a repository like owner/name"),
    (PUSH, {"--license mit": "--license apache-2.0", "--out out": ""}, "offline mode"),
    (PUSH, {"me/x": "me"}, "Expected a repository like owner/name"),
    (PUSH, {"out out": "out text"}, "text is there already"),
    (PUSH, "--measurements measured.json", "measured.json is not a report"),
    (PUSH, "--measurements measured-cut.json", "measured-cut.json is not a report"),
    (PUSH, "--measurements nowhere.json", "nowhere.json"),
    ("nope", {}, "No such command 'nope'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory, pair):
    """A folder with healthy and damaged models and files."""
    folder = tmp_path_factory.mktemp("places")
    for name in ("target", "drafter"):
        shutil.copytree(pair[pair.index(f"--{name}") + 1], folder / name)
    for name, (source, damage) in DAMAGED.items():
        shutil.copytree(folder / source, folder / name)
        damage(folder / name)
    shutil.copytree(folder / "target", folder / "target-other")
    make_target("llama", vocab_size=80).save_pretrained(folder / "target-other")
    (folder / "empty").mkdir()
    os.mkfifo(folder / "pipe")  # stands for every device: never to be replaced, nor waited for
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(FILES["prompts.jsonl"].encode())[:-9])
    (folder / "latin.jsonl").write_bytes('{"turns": ["café"]}\n'.encode("latin-1"))
    return folder


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(("command", "change", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_gives_one_line_and_changes_nothing(command, change, message, places, monkeypatch):
    monkeypatch.chdir(places)
    if isinstance(change, str):
        command += " " + change
    else:
        for old, new in change.items():
            assert old in command
            command = command.replace(old, new, 1)
    before = contents(places)
    done = CliRunner().invoke(app, shlex.split(command), input="")
    lines = [line for line in done.stderr.splitlines() if line.strip() and "Loading weights" not in line]
    assert isinstance(done.exception, SystemExit), done.exception
    if done.exit_code == 2:  # of the command line itself: typer's box, and how to get help
        assert message in " ".join(done.stderr.replace("│", " ").split())
    else:
        assert done.exit_code == 1
        assert len(lines) == 1 and lines[0].startswith("Error: ") and message in lines[0], lines
    assert done.stdout == ""
    assert contents(places) == before


OUT_OF_MEMORY = {  # error, what of it is shown
    "Python": (MemoryError(), ""),
    "an accelerator": (torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate 2 GiB"), "to allocate 2 GiB"),
    "a CPU": (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "can't allocate memory: 9 bytes"),
}


@pytest.mark.parametrize("of", OUT_OF_MEMORY)
@pytest.mark.parametrize("command", [GENERATE, CHECK])
def test_too_little_memory_is_one_line_with_a_hint(command, of, places, monkeypatch):
    monkeypatch.chdir(places)
    error, shown = OUT_OF_MEMORY[of]
    monkeypatch.setattr(DFlashDraftModel, "from_pretrained", Mock(side_effect=error))
    done = CliRunner().invoke(app, shlex.split(command))
    (line,) = [line for line in done.stderr.splitlines() if line.strip() and "Loading weights" not in line]
    assert done.exit_code == 1 and done.stdout == "", done.output
    assert line.startswith(
        "Error: Out of memory: try a shorter prompt, fewer tokens, a smaller batch, or a smaller dtype"
    )
    assert shown in line


def test_other_errors_are_not_hidden(places, monkeypatch):
    monkeypatch.chdir(places)
    monkeypatch.setattr(DFlashDraftModel, "from_pretrained", Mock(side_effect=RuntimeError("a bug")))
    assert isinstance(CliRunner().invoke(app, shlex.split(GENERATE)).exception, RuntimeError)


def test_without_typer_the_command_says_what_to_install(monkeypatch):
    scripts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "dflash_hf.cli")
    with pytest.raises(SystemExit, match=r'^Error: .*pip install "dflash-hf\[cli\]" \(in a clone: "\.\[cli\]"\)$'):
        pkgutil.resolve_name(scripts["dflash-hf"])()


def test_every_command_has_an_example_in_its_help():
    assert invoke("--version").stdout == f"{__version__}\n"
    assert "Example: dflash-hf generate " in " ".join(invoke("--help").stdout.split())
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert {"generate", "chat", "answer", "features", "train", "bench", "convert", "push"} <= set(names)
    for name in names:
        assert f"Example: dflash-hf {name} " in " ".join(invoke(name, "--help").stdout.split())
