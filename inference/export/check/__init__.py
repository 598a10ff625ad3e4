"""Checks whether an exported folder is what its engine needs: by its files, and by serving it."""
