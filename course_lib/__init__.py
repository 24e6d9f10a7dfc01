"""Policy gradients for language models: the mathematics, one trainer, and what the lessons use.

Each module stands on its own: `from course_lib.losses import grpo_loss`.
"""
