"""Records of verifications become training data (`build`), and prompts for text that is still to be
generated (`write_branches`, `write_variations`).
"""

from train.feedback.branches import BRANCHES, write_branches
from train.feedback.build import build
from train.feedback.config import FeedbackConfig
from train.feedback.variations import VARIATIONS, write_variations

__all__ = [
    "BRANCHES",
    "VARIATIONS",
    "FeedbackConfig",
    "build",
    "write_branches",
    "write_variations",
]
