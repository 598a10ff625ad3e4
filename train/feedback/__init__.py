"""Records of verifications become training data (`build`), and prompts for text that is still to be
generated (`branches`, `variations`)."""
