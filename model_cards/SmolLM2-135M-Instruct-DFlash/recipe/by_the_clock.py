"""Train until a time of day (UTC), whatever else the machine does: the later phases of the recipe.

    python by_the_clock.py DRAFTER OUT SEED FLAT END STOP FEATURES...

Times are HH:MM. The learning rate is constant until FLAT and falls linearly to 0 at END; this part stops at STOP, so
that more data can be taken up for the next. FEATURES are folders; a folder that is given twice counts twice.
gsm8k_heldout and others_heldout beside the first one are what tau is measured on.
"""

import datetime as dt
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from transformers import TrainerCallback

from dflash_hf import DFlashDraftModel
from dflash_hf.training.trainer import DFlashTrainer, DFlashTrainingArguments, read_dataset
from smollm2 import load_smollm2

start_from, out, seed, flat, end, stop, *features = sys.argv[1:]
PEAK = 8e-4


def seconds(clock: str) -> float:
    hour, minute = map(int, clock.split(":"))
    return dt.datetime.now(dt.UTC).replace(hour=hour, minute=minute, second=0).timestamp()


FLAT, END, STOP = map(seconds, (flat, end, stop))


class ByTheClock(TrainerCallback):
    saved = time.time()

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        left = min(1.0, max(0.0, (END - time.time()) / (END - FLAT)))
        for group in optimizer.param_groups:
            group["lr"] = PEAK * left * min(1.0, (state.global_step + 1) / 20)

    def on_step_end(self, args, state, control, **kwargs):
        if time.time() > STOP - 5:
            control.should_training_stop = control.should_save = True
        elif time.time() > self.saved + 300:
            self.saved = time.time()
            control.should_save = True


target, _ = load_smollm2()
target.eval()
drafter = DFlashDraftModel.from_pretrained(start_from, dtype="float32")
folder = Path(features[0]).parent
arguments = DFlashTrainingArguments(
    output_dir=out,
    learning_rate=PEAK,
    lr_scheduler_type="constant",
    warmup_steps=0,
    max_steps=6000,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=1,
    num_anchors=64,
    distillation_weight=0.5,
    loss_gamma=2.5,
    answer_vocabulary=True,
    seed=int(seed),
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
    logging_steps=20,
    save_strategy="steps",
    save_steps=5000,
    save_total_limit=2,
    eval_strategy="steps",
    eval_steps=300,
)
held = {name: read_dataset([folder / name]) for name in ("gsm8k_heldout", "others_heldout")}
trainer = DFlashTrainer(drafter, target, arguments, read_dataset(features), held, callbacks=[ByTheClock()])
trainer.train()
trainer.save_model()
