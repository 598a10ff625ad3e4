"""Fast paths of single operations, each with a plain-torch meaning beside it and a test that they
are equal."""
