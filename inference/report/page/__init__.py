"""report.html: one self-contained page of one or several measurements, without libraries or
requests.

`gather` reads the content; `tables`, `figures` and `viewer` choose and arrange it; `charts`
computes the geometry of drawings; `render` fills the templates.
"""
