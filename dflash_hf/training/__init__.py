"""Training of drafters: prompts, the target's answers to them, the loss, and the Trainer."""
