"""report.html: one self-contained page of one or several measurements, without libraries, fonts or requests.

`data` gathers what is shown, `markup` writes HTML that cannot be broken out of, `scale`, `charts` and `waterfall` draw SVG, the
`sections` modules fill the page, `page` puts it together with style.css and script.js.
"""
