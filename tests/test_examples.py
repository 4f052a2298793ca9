"""The examples that use a drafter, each run as it is with a tiny pair, against plain generate()."""

import importlib.util
from pathlib import Path

import pytest
import torch

from drafters import make_drafter
from hub_server import TOKEN, HubServer
from targets import make_target

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TEMPLATE = "{% for m in messages %}{{ m.content }}n{% endfor %}"


@pytest.fixture
def tokenizer(byte_tokenizer):
    """The tiny one, with a chat template; what it does not know of a prompt becomes id 0."""
    before = byte_tokenizer.padding_side
    byte_tokenizer.chat_template, byte_tokenizer.pad_token = TEMPLATE, "0"
    yield byte_tokenizer
    byte_tokenizer.chat_template, byte_tokenizer.pad_token, byte_tokenizer.padding_side = None, None, before


@pytest.fixture
def pair():
    target = make_target("llama")
    target.generation_config.pad_token_id = 0
    # A pipeline compares the special ids of both.
    return target, make_drafter(pad_token_id=target.config.pad_token_id, bos_token_id=target.config.bos_token_id)


def example(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(target, tokenizer, messages, new: int) -> str:
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    out = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return tokenizer.decode(out[0, ids.shape[1] :])


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("name", "prompt", "new"),
    [
        ("generate", "A box holds 24 pencils, a third of them red. How many are red?", 96),
        ("stream", "List the steps to boil an egg.", 96),
        ("pipeline", "What is the capital of France?", 32),
    ],
)
def test_one_prompt(name, prompt, new, pair, tokenizer, capsys):
    target, drafter = pair
    expected = plain(target, tokenizer, [user(prompt)], new)
    assert example(name).main(target, tokenizer, drafter) == expected
    shown = capsys.readouterr().out
    assert expected in shown and f"{new} tokens in" in shown


def test_chat_answers_as_without_a_cache(pair, tokenizer, capsys):
    target, drafter = pair
    module, messages = example("chat"), []
    answers = module.main(target, tokenizer, drafter)
    for turn, answer in zip(module.TURNS, answers, strict=True):
        messages.append(user(turn))
        assert answer == plain(target, tokenizer, messages, 64)
        messages.append({"role": "assistant", "content": answer})
    # A template that forgets: the cache of the first turn no longer fits the second.
    tokenizer.chat_template = "{{ messages[-1].content }}n"
    expected = [plain(target, tokenizer, [user(turn)], 64) for turn in module.TURNS]
    assert module.main(target, tokenizer, drafter) == expected


def test_batch_answers_each_as_alone(pair, tokenizer, capsys):
    target, drafter = pair
    module = example("batch")
    expected = [plain(target, tokenizer, [user(question)], 48) for question in module.QUESTIONS]
    assert module.main(target, tokenizer, drafter) == expected


def test_sampled_text_belongs_to_the_seed(pair, tokenizer, capsys):
    target, drafter = pair
    main = example("sample").main
    first, again = main(target, tokenizer, drafter), main(target, tokenizer, drafter)
    assert first == again and len(set(first.values())) == 2
    drafter.generation_config.num_assistant_tokens = 1
    fewer = main(target, tokenizer, drafter)
    assert fewer["coupled"] == first["coupled"] and fewer["rejection"] != first["rejection"]


def test_publish_loads_what_it_published_by_its_name(pair, tmp_path, monkeypatch, capsys):
    _, drafter = pair
    drafter.save_pretrained(tmp_path / "drafter")
    with HubServer(TOKEN) as hub:
        hub.serve(monkeypatch, tmp_path / "cache")
        done = example("publish").main(
            str(tmp_path / "drafter"), "me/example", base_model="someone/target", license="apache-2.0"
        )
        assert {"README.md", "LICENSE", "model.safetensors", "modeling_dflash.py"} <= set(hub.files("me/example"))
        assert done.revision == hub.repos["me/example"].branches["main"]
    shown = capsys.readouterr().out
    assert done.url in shown and f"loads as DFlashDraftModel with {drafter.num_parameters():,} parameters" in shown
    assert TOKEN not in shown
