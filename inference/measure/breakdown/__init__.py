"""Splits the difference between the speed that a draft could give and the measured speed into
terms.

`watch` decodes a sample of prompts and observes both models' distributions along the answers.
`counts` sums the observations. `split` turns the sums, the measured times and the cost of wider
verifications into factors whose product is the measured speedup. `block` makes the report's `lost`
from the split, and `transcripts` makes the data that the page shows token by token.
"""
