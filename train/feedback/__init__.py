"""Conversion of records of verifications to training data (`build`), and to prompts for new text
(`branches`, `variations`)."""
