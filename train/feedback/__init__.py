"""Records of verifications become training data: see `build`, and `write_branches` for text that is still to be generated."""

from train.feedback.branches import BRANCHES, write_branches
from train.feedback.build import build
from train.feedback.config import FeedbackConfig

__all__ = ["BRANCHES", "FeedbackConfig", "build", "write_branches"]
