"""The Space in examples/space: what it computes, against plain generate(), and what a visitor sees in a browser."""

import copy
import importlib.util
import re
import shutil
import sys
import threading
from html import unescape
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")
import torch

from drafters import BLOCK, HITS, oracle
from targets import make_target

APP = Path(__file__).resolve().parents[1] / "examples" / "space" / "app.py"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEW = 32  # tokens, two steps of the page's slider


def load_app():
    spec = importlib.util.spec_from_file_location("space_app", APP)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pair(byte_tokenizer):
    """Target, a drafter that is right two in three, tokenizer, the prompt's length, plain text as ids."""
    byte_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}n{% endfor %}"
    target = make_target("llama")
    target.generation_config.pad_token_id = 0
    messages = [{"role": "user", "content": PROMPT}]
    ids = byte_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    out = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    text = out[0].tolist()
    yield target, oracle(text, "sometimes"), byte_tokenizer, ids.shape[1], text[ids.shape[1] :]
    byte_tokenizer.chat_template = None


PROMPT = "Why does the moon look different from night to night?"  # the page's first


def accepted_runs(start: int) -> tuple[list[bool], int]:
    """Which of the new tokens are accepted drafts, and the number of target passes, by full blocks."""
    hit, flags, passes = HITS["sometimes"], [False], 1
    while len(flags) < NEW:
        position = start + len(flags)
        room = min(BLOCK - 1, NEW - len(flags) - 1)
        right = next((i for i in range(room) if not hit(position + i)), room)
        flags, passes = flags + [True] * right + [False], passes + 1
    return flags, passes


def marked(html: str) -> list[tuple[str, bool]]:
    """Characters of a column's text, each with whether it is shaded."""
    text = re.search(r'<div class="text">(.*?)</div>', html, re.DOTALL)[1]
    parts = re.split("(<mark>.*?</mark>)", text)
    return [
        (letter, part.startswith("<mark>"))
        for part in parts
        for letter in unescape(re.sub("</?mark>", "", part))
    ]  # fmt: skip


def stand_in_for_gradio(monkeypatch) -> ModuleType:
    """What the page is given to show does not need it."""
    monkeypatch.setitem(sys.modules, "gradio", stand_in := ModuleType("gradio"))
    stand_in.themes, stand_in.Blocks = SimpleNamespace(Default=lambda **options: None), None
    return load_app()


def figures(html: str) -> dict[str, float]:
    found = re.findall(r"<b>([^<]*)</b><small>([^<]*)</small>", html)
    return {name: float(value.rstrip("x")) for value, name in found}


def test_both_columns_hold_the_targets_text_and_the_figures_of_the_run(pair, monkeypatch):
    app = stand_in_for_gradio(monkeypatch)
    target, drafter, tokenizer, start, ids = pair
    expected = tokenizer.decode(ids)
    shown = list(app.compare(target, drafter, tokenizer, app.PROMPTS[0], NEW, "constant", threading.Event()))
    plain, drafted = shown[-1]
    flags, passes = accepted_runs(start)
    assert "<" in expected and "".join(letter for letter, _ in marked(plain)) == expected
    assert marked(drafted) == list(zip(expected, flags, strict=True))
    assert figures(plain)["target passes"] == NEW and figures(drafted)["target passes"] == passes
    assert figures(drafted)["tau"] == pytest.approx((NEW - 1) / (passes - 1), abs=0.005)
    assert f"{NEW} tokens in" in drafted and "; the same text" in drafted
    # Of the plain run's column nothing moves any more while the other one fills.
    assert all(p == plain for p, d in shown if figures(d))
    with pytest.raises(ValueError, match="prompt is empty"):
        next(app.compare(target, drafter, tokenizer, " ", NEW, "constant", threading.Event()))
    # A visitor who leaves takes the decoding with him.
    before, options = threading.active_count(), {"stopped": threading.Event(), "max_new_tokens": 400}
    running = app.decode(target, tokenizer, torch.tensor([ids]), **options)
    next(running)
    assert threading.active_count() == before + 1
    running.close()
    assert threading.active_count() == before


def test_a_call_that_is_decoded_without_the_drafter_shows_no_drafts(pair, monkeypatch):
    app, (_, drafter, tokenizer, *_) = stand_in_for_gradio(monkeypatch), pair
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    target = make_target("phi3", rope_parameters=rope, original_max_position_embeddings=64)  # the prompt has 54 tokens
    with pytest.warns(UserWarning, match="cross 64 positions"):
        *_, (plain, drafted) = app.compare(target, drafter, tokenizer, PROMPT, NEW, "constant", threading.Event())
    assert marked(drafted) == marked(plain) and not any(shaded for _, shaded in marked(drafted))
    assert figures(drafted)["target passes"] == NEW and figures(drafted)["tau"] == 1


def test_an_answer_that_ends_at_once_has_no_speed_up(pair, monkeypatch):
    app, (target, drafter, tokenizer, _, ids) = stand_in_for_gradio(monkeypatch), pair
    target.generation_config.eos_token_id = ids[0]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(ids[0])})
    *_, (plain, drafted) = app.compare(target, drafter, tokenizer, PROMPT, NEW, "constant", threading.Event())
    assert marked(plain) == marked(drafted) == [] and "the same text" in drafted
    assert figures(plain)["tokens/s"] == 0 and "speed-up" not in figures(drafted)


# -- in a browser --


@pytest.fixture
def visit(pair, monkeypatch):
    """`(page of a browser at the Space, gate)`; every pass of the target waits while the gate is closed."""
    missing = [name for name in ("gradio", "playwright") if importlib.util.find_spec(name) is None]
    if missing or CHROMIUM is None:
        pytest.skip(f"needs {', '.join([*missing, *['Chromium'] * (CHROMIUM is None)])}")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    from playwright.sync_api import sync_playwright

    target, drafter, tokenizer, *_ = pair
    gate, forward = Gate(), type(target).forward
    monkeypatch.setattr(type(target), "forward", lambda self, *a, **k: gate.wait() or forward(self, *a, **k))
    app = load_app()
    blocks = app.page(target, drafter, tokenizer)
    _, url, _ = blocks.launch(css=app.CSS, theme=app.THEME, prevent_thread_lock=True, quiet=True)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            page.set_default_timeout(60_000)
            page.goto(url)
            page.get_by_label("number input for New tokens at most").fill(str(NEW))
            page.get_by_label("always full blocks (constant)").check()
            yield page, gate
            browser.close()
    finally:
        gate.open()
        blocks.close()


class Gate:
    """Lets `passes` passes through, then closes."""

    def __init__(self):
        self._permits = threading.Semaphore(0)
        self._open = False

    def let(self, passes: int) -> None:
        self._permits.release(passes)

    def open(self) -> None:
        self._open = True
        self.let(1000)

    def wait(self) -> None:
        self._open or self._permits.acquire()


def test_a_visitor_sees_both_stream_and_compare(visit, pair):
    page, gate = visit
    *_, tokenizer, start, ids = pair
    expected, (flags, passes) = tokenizer.decode(ids), accepted_runs(start)
    plain, drafted = page.locator(".run").all()

    def reads(column, text: str) -> None:
        column.locator(".text", has_text=re.compile(f"^{re.escape(text)}$")).wait_for()

    page.get_by_role("button", name="Generate").click()
    gate.let(10)  # the prompt's pass and nine more, of which the last token is still held back
    reads(plain, expected[:9])
    assert "waits for the other column" in drafted.inner_text()
    gate.let(NEW - 10)
    reads(plain, expected)
    gate.let(4)
    fourth = [i for i, accepted in enumerate(flags) if not accepted][3]  # where the fourth pass ends
    reads(drafted, expected[:fourth])
    assert "speed-up" in drafted.inner_text() and "the same text" not in drafted.inner_text()
    gate.open()
    drafted.locator("footer", has_text="the same text").wait_for()
    reads(drafted, expected)
    assert marked(drafted.inner_html()) == list(zip(expected, flags, strict=True))
    shown, before = figures(drafted.inner_html()), figures(plain.inner_html())
    assert shown["target passes"] == passes and before["target passes"] == NEW
    assert shown["tau"] == pytest.approx((NEW - 1) / (passes - 1), abs=0.005)
    assert shown["speed-up"] == pytest.approx(shown["tokens/s"] / before["tokens/s"], rel=0.1)
    ground = "element => getComputedStyle(element).backgroundColor"
    colours = {drafted.locator(part).first.evaluate(ground) for part in (".text mark", ".text")}
    assert len(colours) == 2


def test_a_visitor_can_stop_and_is_told_what_is_wrong(visit, pair):
    page, gate = visit
    plain, drafted = page.locator(".run").all()
    page.get_by_role("button", name="Generate").click()
    gate.let(5)
    plain.locator(".text", has_text=re.compile("^.{4}$")).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.wait_for_timeout(500)
    gate.let(2)  # the pass that is under way ends, and the decoding with it
    plain.locator("footer", has_text="stopped").wait_for()
    assert not any("(work)" in thread.name for thread in threading.enumerate())
    gate.open()
    page.get_by_label("Prompt").fill(" ")
    page.get_by_role("button", name="Generate").click()
    page.get_by_text("The prompt is empty").wait_for()
    page.get_by_text("Write a Python function").click()  # one of the prompts to try
    page.get_by_role("button", name="Generate").click()
    drafted.locator("footer", has_text=f"{NEW} tokens in").wait_for()
