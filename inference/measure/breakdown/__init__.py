"""What is lost where: the way from the speed that a draft could give to the one that was measured,
term by term.

`watch` decodes a sample of prompts and sees both models' distributions along the answers; `counts`
sums what it saw; `split` turns that, the measured times and the cost of wider verifications into
factors whose product is the measured speedup; `block` makes the report's `lost` of it, and
`transcripts` what the page shows token by token.
"""
