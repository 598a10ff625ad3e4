"""Records of verifications become training data: see `build`."""

from train.feedback.build import build
from train.feedback.config import FeedbackConfig

__all__ = ["FeedbackConfig", "build"]
