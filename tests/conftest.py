"""What holds for every test: no network; property tests ask no clock and are the same in every run."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

settings.register_profile("course", deadline=None, derandomize=True)
settings.load_profile("course")
