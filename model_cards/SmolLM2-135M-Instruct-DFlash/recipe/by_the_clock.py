"""Phase 3: the learning rate falls linearly to 0 at a time of day (UTC), whatever else the machine does.

    python by_the_clock.py DRAFTER OUT HH:MM FEATURES

FEATURES is the folder that holds the feature folders gsm8k, others, gsm8k_heldout and others_heldout.
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

start_from, out, end, features = sys.argv[1:5]
hour, minute = map(int, end.split(":"))
END = dt.datetime.now(dt.UTC).replace(hour=hour, minute=minute, second=0).timestamp()
START = time.time()
PEAK = 8e-4


class ByTheClock(TrainerCallback):
    saved = START

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        left = max(0.0, (END - time.time()) / (END - START))
        for group in optimizer.param_groups:
            group["lr"] = PEAK * left * min(1.0, (state.global_step + 1) / 20)

    def on_step_end(self, args, state, control, **kwargs):
        if time.time() > END - 5:
            control.should_training_stop = control.should_save = True
        elif time.time() > self.saved + 300:
            self.saved = time.time()
            control.should_save = True


target, _ = load_smollm2()
target.eval()
drafter = DFlashDraftModel.from_pretrained(start_from, dtype="float32")
folders = Path(features)
arguments = DFlashTrainingArguments(
    output_dir=out,
    learning_rate=PEAK,
    lr_scheduler_type="constant",
    warmup_steps=0,
    max_steps=4000,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=1,
    num_anchors=64,
    distillation_weight=0.5,
    loss_gamma=2.5,
    answer_vocabulary=True,
    seed=3,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
    logging_steps=20,
    save_strategy="steps",
    save_steps=5000,
    save_total_limit=2,
    eval_strategy="steps",
    eval_steps=250,
)
held = {name: read_dataset([folders / name]) for name in ("gsm8k_heldout", "others_heldout")}
train_data = read_dataset([folders / "gsm8k", folders / "others", folders / "others"])
trainer = DFlashTrainer(drafter, target, arguments, train_data, held, callbacks=[ByTheClock()])
trainer.train()
trainer.save_model()
