"""The tests mirror the packages. Nothing is downloaded: Hub look-ups fail at once instead of
retrying."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
