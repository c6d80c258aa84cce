"""The documentation as a site: `make docs`.

`pages` reads the Markdown, `reference` writes pages from the code, `widgets` makes views to embed, `hooks` joins them
in MkDocs, and `check` reads the built site once more.
"""
