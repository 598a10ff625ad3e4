"""A measurement's results: `model` types report.json, and `markdown`, `plots` and `page` show
it."""
