"""`dflash-hf generate` and `chat` against plain generate(), and bad input to every command."""

import io
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dflash_hf.cli import app
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
        drafter.last_run.target_passes = number // 2
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
