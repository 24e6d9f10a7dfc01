"""What holds for every test: no network, and property tests that neither depend on the clock nor differ from run to run."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

settings.register_profile("course", deadline=None, derandomize=True)
settings.load_profile("course")
