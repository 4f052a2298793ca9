"""Print the held-out figures of a training log as CSV: python curve.py train.log ...

One line an evaluation: log, step (counted from the logged losses, 20 steps each), set, tau, accuracy of slot 1, loss.
"""

import ast
import re
import sys
from pathlib import Path

LOGGING_STEPS = 20


def rows(path: str):
    step = 0
    for line in Path(path).read_text(errors="replace").splitlines():
        for text in re.findall(r"\{'(?:loss|eval_)[^}]*\}", line):
            record = ast.literal_eval(text)
            if "loss" in record:
                step += LOGGING_STEPS
                continue
            for key, value in record.items():
                if match := re.fullmatch(r"eval_(.+)_tau", key):
                    name = match[1]
                    yield step, name, value, record[f"eval_{name}_accuracy_1"], record[f"eval_{name}_loss"]


if __name__ == "__main__":
    print("log,step,set,tau,accuracy_1,loss")
    for path in sys.argv[1:]:
        for row in rows(path):
            print(path, *row, sep=",")
