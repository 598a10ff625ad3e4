"""report.html: one self-contained page of one or several measurements, without libraries or
requests.

`gather` reads what is shown, `tables`, `figures` and `viewer` choose what of it stands where,
`charts` computes where a drawing's parts lie, and `render` fills the templates.
"""
