"""`diagnose`: does a drafter fit its target, is the text right, how much is accepted, why not more, does it pay."""

import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from huggingface_hub import ModelCard

from ..benchmark import Prompt, Report, bench
from ..benchmark.prompts import encode
from ..benchmark.report import write_json
from ..checkpoints import load_drafter
from ..checkpoints.files import fetch
from ..memory import is_out_of_memory
from .evidence import Evidence, Score, gather, score
from .formats import other_formats
from .search import LEAST_FIRST, Fault, Findings, find_faults, is_more

HEALTHY, DOES_NOT_FIT, OTHER_TEXT, FAULT, LOW, SLOWER = 0, 3, 4, 5, 6, 7
LOW_TAU = 1.25  # below this in every category, drafting cannot pay anywhere
LOW_FIRST = 0.5  # of the first drafts right; drafters that were trained on such texts are above it

# For `dflash-hf check` without a file. Written for this purpose.
PROMPTS = [
    Prompt("maths-1", "A pen costs 3 dollars. Mia buys 4 and pays with 20. What is her change?", "maths"),
    Prompt("maths-2", "A bus makes 6 trips a day with 45 seats. How many people can it carry in 5 days?", "maths"),
    Prompt("code-1", "Write a Python function that returns the largest even number of a list, or None.", "code"),
    Prompt("code-2", "Write a Python function that counts how often each word occurs in a text.", "code"),
    Prompt("chat-1", "What should I think of before I adopt a dog?", "chat"),
    Prompt("chat-2", "Explain to a child why the sky is blue.", "chat"),
    Prompt("writing-1", "Write a short letter that invites a friend to a birthday party in a garden.", "writing"),
    Prompt("writing-2", "Summarize in three sentences how a letter travels from one town to another.", "writing"),
]  # fmt: skip


@dataclass
class Diagnosis:
    """What the doctor found about a pair.

    Attributes:
        problems: why the drafter does not load or does not fit; the rest is empty then.
        report: of `bench`, with the methods plain, constant and adaptive.
        before: acceptance as the config is (tokens a cycle `tau`, `first` draft right), by teacher forcing.
        faults: mistakes whose correction raises it, the one that costs most first.
        notes: what else was noticed.

    Example:
        >>> diagnosis = diagnose(target, drafter, prompts, tokenizer=tokenizer)                # doctest: +SKIP
        >>> diagnosis.exit_code, diagnosis.verdict                                             # doctest: +SKIP
        (0, 'Healthy: ...')
    """

    problems: list[str] = field(default_factory=list)
    report: Report | None = None
    before: dict | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def differences(self) -> list[dict]:
        """Where texts with and without the drafter part: `method`, `prompt`, and what `top2_gap` of
        dflash_hf/benchmark/runner.py says (`position` counts the prompt's `prompt_tokens`, too), tokens as text."""
        runs = [] if self.report is None else self.report.runs
        return [
            {"method": run["method"], "prompt": run["prompts"][d["row"]], **d}
            for run in runs
            for d in run.get("differences", ())
        ]

    @property
    def tau(self) -> float | None:
        """Tokens that a cycle of full blocks commits; None where nothing was drafted."""
        return self._constant().get("tau")

    @property
    def acceptance_by_position(self) -> list[float]:
        """How often the draft at each slot was accepted."""
        return self._constant().get("acceptance_by_position", [])

    @property
    def tau_by_category(self) -> dict[str, float]:
        """`tau` of each category of prompts."""
        if self.report is None:
            return {}
        by = {category: self._constant(category).get("tau") for category in self._categories()}
        return {category: tau for category, tau in by.items() if tau is not None}

    @property
    def ratio(self) -> dict | None:
        """Speed over plain decoding, adaptive lengths: `value` and the 95% interval `low` to `high`."""
        return None if self.report is None else self.report.summary().get("adaptive", {}).get("ratio")

    def _categories(self) -> list[str]:
        return [] if self.report is None else sorted({run["category"] for run in self.report.runs})

    @property
    def _refused(self) -> dict[str, str]:
        return {} if self.report is None else self.report.refused

    def _constant(self, category: str | None = None) -> dict:
        if self.report is None:
            return {}
        return self.report.summary(lambda run: category in (None, run["category"])).get("constant", {})

    @property
    def exit_code(self) -> int:
        """0 healthy; 3 does not load or fit; 4 other text than the target's; 5 a mistake that costs acceptance;
        6 low acceptance that no known mistake explains; 7 slower than plain decoding on this machine."""
        if self.problems:
            return DOES_NOT_FIT
        if any(not difference["near_tie"] for difference in self.differences) or self._refused:
            return OTHER_TEXT
        if self.faults:
            return FAULT
        if max(self.tau_by_category.values(), default=1.0) < LOW_TAU:
            return LOW
        return SLOWER if self.ratio is not None and self.ratio["high"] < 1 else HEALTHY

    @property
    def verdict(self) -> str:
        """One closing sentence."""
        code = self.exit_code
        if code == DOES_NOT_FIT:
            return f"Not a pair: {self.problems[0]}"
        if code == OTHER_TEXT:
            real = [difference for difference in self.differences if not difference["near_tie"]]
            if not real:
                return f"Does not generate: {next(iter(self._refused.values()))}"
            return (
                f"Wrong text: {len(real)} answers with the drafter differ from the target's own and no rounding "
                f"explains it, first in prompt {real[0]['prompt']!r} at token "
                f"{real[0]['position'] - real[0]['prompt_tokens'] + 1} of the answer; please report it."
            )
        if code == FAULT:
            one = self.faults[0]
            more = "" if len(self.faults) == 1 else f", and {len(self.faults) - 1} more"
            return (
                f"Misconfigured: {one.kind}: {one.says} (tau {one.tau_without:.2f} without that, "
                f"{one.tau_with:.2f} with it){more}."
            )
        tau = f"tau {self.tau:.2f}" if self.tau is not None else "no drafts"
        if code == LOW:
            return (
                f"Low acceptance ({tau}) that none of the known mistakes explains: the drafter was made for another "
                "model, for other texts than these, or trained too little."
            )
        speed = "" if self.ratio is None else (
            f"{self.ratio['value']:.2f} times plain decoding ({self.ratio['low']:.2f} to {self.ratio['high']:.2f})"
        )  # fmt: skip
        if code == SLOWER:
            return f"Nothing is wrong ({tau}), but it does not pay on this machine: {speed}."
        pays = "and it pays" if self.ratio and self.ratio["low"] > 1 else "though a gain is not certain"
        return f"Healthy: the target's own text, {tau}, {pays} on this machine: {speed}."

    def to_dict(self) -> dict:
        """JSON-ready."""
        return {
            "exit_code": self.exit_code,
            "verdict": self.verdict,
            "problems": self.problems,
            "tau": self.tau,
            "tau_by_category": self.tau_by_category,
            "acceptance_by_position": self.acceptance_by_position,
            "ratio": self.ratio,
            "differences": self.differences,
            "before": self.before,
            "faults": [asdict(fault) for fault in self.faults],
            "notes": self.notes,
            "report": None if self.report is None else self.report.to_dict(),
        }

    def print(self) -> None:
        """Print the findings, the verdict last."""
        if self.report is not None:
            differences = self.differences
            ties = sum(difference["near_tie"] for difference in differences)
            compared = sum(len(run.get("ids_equal", ())) for run in self.report.runs)
            print(f"Fits and loads: yes\nSame text: {compared - len(differences)} of {compared} answers; "
                  f"{ties} part at a near-tie, {len(differences) - ties} for real")  # fmt: skip
            for d in differences:
                kind, place = "near-tie" if d["near_tie"] else "REAL", d["position"] - d["prompt_tokens"] + 1
                print(f"  {d['prompt']} ({d['method']}), token {place} of the answer: {d['plain_text']} became "
                      f"{d['other_text']}; top-2 logit gap {d['top2_gap']:.2g}, rounding {d['rounding']:.2g}: "
                      f"{kind}")  # fmt: skip
            for method, reason in self.report.refused.items():
                print(f"  {method}: {reason}")
        if self.tau is not None:
            by_category = ", ".join(f"{category} {tau:.2f}" for category, tau in self.tau_by_category.items())
            slots = " ".join(f"{share:.2f}" for share in self.acceptance_by_position)
            print(f"Tau: {self.tau:.2f} ({by_category})\nAccepted by position: {slots}")
        if self.ratio is not None:
            print(f"Speed: {self.ratio['value']:.2f} times plain decoding, 95% {self.ratio['low']:.2f} to "
                  f"{self.ratio['high']:.2f}")  # fmt: skip
        for fault in self.faults:
            print(f"Mistake, {fault.kind}: {fault.says} (tau {fault.tau_without:.2f} to {fault.tau_with:.2f})")
        if self.before is not None and not self.faults:
            few = self.before["first"] < LEAST_FIRST
            print(f"Mistakes: none found{', but with so few right drafts little can be told' if few else ''}")
        for note in self.notes:
            print(f"Note: {note}")
        print(self.verdict)

    def save(self, path: str | os.PathLike) -> None:
        """Write the JSON under a temporary name, then rename: an older file is replaced whole or not at all."""
        write_json(path, self.to_dict())


def diagnose(
    target,
    drafter,
    prompts: list[Prompt] | None = None,
    *,
    tokenizer=None,
    max_new_tokens: int = 64,
    repeats: int = 1,
    other_targets: dict | None = None,
    progress: bool = False,
) -> Diagnosis:
    """Examine a drafter and its target; nothing of either is changed.

    Args:
        target: a causal LM in eval mode.
        drafter: a `DFlashDraftModel`, or the folder or Hub name of one, in z-lab's or speculators' layout.
        prompts: to answer; unset: eight of four categories (`PROMPTS`).
        tokenizer: the target's; needed where prompts are texts.
        max_new_tokens: of an answer.
        repeats: rounds of the comparison with plain decoding.
        other_targets: models that the drafter may have been made for, by name; tried where acceptance is low.
        progress: say what is being done, and show a bar.

    Raises:
        OSError: there is no such drafter, or it cannot be downloaded.
        ValueError: prompts cannot be read without a tokenizer, are empty or longer than the target's context, or
            every answer is too short.

    Example:
        >>> print(diagnose(target, "z-lab/Qwen3-8B-DFlash-b16", tokenizer=tokenizer).verdict)  # doctest: +SKIP
    """
    prompts = PROMPTS if prompts is None else prompts
    encoded = [encode(prompt, tokenizer) for prompt in prompts]
    _refuse_lengths(target, encoded, max_new_tokens)
    if isinstance(drafter, str | os.PathLike):
        fetch(drafter)  # a wrong name or a network that fails says nothing about the pair
    try:
        name = drafter if isinstance(drafter, str | os.PathLike) else drafter.config.name_or_path
        if isinstance(drafter, str | os.PathLike):
            drafter = load_drafter(drafter, dtype=target.dtype).to(target.device)
        drafter.check_target(target, target.generation_config)
        _refuse_damaged_weights(drafter)
    except Exception as error:  # whatever a damaged or foreign folder raises is the answer to "does it load?"
        if is_out_of_memory(error):
            raise  # says something about this machine, not about the pair
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        return Diagnosis(problems=[kind + " ".join(str(error).split()) + _layer_hint(target, drafter)])
    fitting, unfit = {}, []
    for other_name, other in (other_targets or {}).items():
        try:
            drafter.check_target(other)
            fitting[other_name] = other
        except ValueError as error:
            unfit.append(f"{other_name} was not tried: {error}")
    result = Diagnosis()
    _say(progress, f"Prompts are answered ({len(prompts)}), then other readings of the drafter's config are tried ...")
    evidence = gather(target, encoded, num_drafts=drafter.config.num_drafts, max_new_tokens=max_new_tokens)
    findings = find_faults(drafter, evidence, tokenizer=tokenizer)
    result.before, result.faults = _facts(findings.before), findings.faults
    if findings.after.first < LOW_FIRST:
        result.faults += _elsewhere(findings, evidence, prompts, tokenizer, max_new_tokens, fitting)
    _say(progress, "Every prompt is answered with and without the drafter ...")
    result.report = bench(
        target,
        drafter,
        prompts,
        tokenizer=tokenizer,
        methods=["constant", "adaptive"],
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        progress=progress,
    )
    for run in result.report.runs:
        for difference in run.get("differences", ()):
            difference |= {f"{side}_text": _word(difference[side], tokenizer) for side in ("plain", "other")}
    result.notes = _notes(result, name, target) + unfit
    return result


def _refuse_lengths(target, encoded: list[list[int]], max_new_tokens: int) -> None:
    """Raise ValueError where there is nothing to answer, or no room for answers."""
    if not encoded or not all(encoded):
        raise ValueError("Expected at least one prompt, and tokens in each; there is none, or one is empty.")
    if max_new_tokens < 3:
        raise ValueError(f"Expected answers of 3 tokens or more (max_new_tokens), got {max_new_tokens}.")
    longest = max(map(len, encoded))
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest + max_new_tokens > positions:
        raise ValueError(
            f"The longest prompt's {longest} tokens and {max_new_tokens} new ones are more than the target's "
            f"{positions} positions; leave long prompts out or ask for fewer tokens."
        )


def _refuse_damaged_weights(drafter) -> None:
    for name, weight in drafter.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(
                f"The drafter's {name} holds NaN or infinite values in {weight.dtype}: its weights are damaged, or "
                "too large for this dtype; fetch them again, or load the target in another dtype."
            )


def _say(progress: bool, text: str) -> None:
    if progress:
        print(text, file=sys.stderr)


def _word(token: int | None, tokenizer) -> str:
    if token is None:
        return "the end"
    return str(token) if tokenizer is None else f"{token} {tokenizer.decode([token])!r}"


def _layer_hint(target, drafter) -> str:
    """What to do where the config counts layers from 1."""
    ids = getattr(getattr(drafter, "config", None), "target_layer_ids", None)
    if not ids or min(ids) < 1 or max(ids) != target.config.get_text_config().num_hidden_layers:
        return ""
    return f" The ids look counted from 1, as in speculators' layout: try target_layer_ids {[i - 1 for i in ids]}."


def _facts(found: Score) -> dict:
    return {"tau": found.tau, "first": found.first, "anchors": len(found.accepted)}


def _elsewhere(
    findings: Findings, evidence: Evidence, prompts, tokenizer, max_new_tokens: int, other_targets: dict
) -> list[Fault]:
    """Faults outside of the drafter's config: how prompts are written, and which target it is."""
    drafter, options = findings.corrected, {"max_new_tokens": max_new_tokens}
    options["num_drafts"] = drafter.config.num_drafts
    here = score(drafter, evidence.fresh())
    texts = [prompt for prompt in prompts if prompt.text is not None and prompt.ids is None]
    tried = []
    if texts and tokenizer is not None:
        usual = [encode(prompt, tokenizer) for prompt in texts]
        for form in other_formats(tokenizer):
            written = [form.encode(prompt) for prompt in texts]
            if written != usual:
                there = gather(evidence.target, written, **options)
                tried.append((score(drafter, there.fresh()), form.kind, form.says))
    for name, other in other_targets.items():
        prompt_ids = [ids[:start].tolist() for ids, start in zip(evidence.sequences, evidence.starts, strict=True)]
        there = gather(other, prompt_ids, **options)
        tried.append((score(drafter, there.fresh()), "target", f"the drafter does better with {name}"))
    better = [f for f in tried if f[0].first >= LEAST_FIRST and is_more(f[0].accepted, here.accepted)]
    if not better:
        return []
    best, kind, says = max(better, key=lambda found: found[0].accepted.mean().item())
    return [Fault(kind, says, here.tau, best.tau)]


def _notes(result: Diagnosis, name, target) -> list[str]:
    found, taus = [], result.tau_by_category
    if taus and max(taus.values()) - 1 > 2 * (min(taus.values()) - 1) and max(taus.values()) >= LOW_TAU:
        best, worst = max(taus, key=taus.__getitem__), min(taus, key=taus.__getitem__)
        found.append(
            f"Acceptance depends on the text: tau {taus[best]:.2f} on {best}, {taus[worst]:.2f} on {worst}; a drafter "
            "knows the kind of texts that it was trained on."
        )
    base = _stated_target(name)
    if base and result.exit_code in (FAULT, LOW) and Path(base).name != Path(target.config.name_or_path).name:
        found.append(f"The drafter's card says that it was made for {base}; the target is {_name(target)}.")
    return found


def _name(target) -> str:
    return target.config.name_or_path or type(target).__name__


def _stated_target(name) -> str | None:
    """The base model that the card in a drafter's folder names."""
    card = Path(str(name)) / "README.md"
    if not name or not card.is_file():
        return None
    try:
        base = ModelCard.load(card).data.base_model
    except (ValueError, OSError):
        return None
    return base[0] if isinstance(base, list) and base else base
