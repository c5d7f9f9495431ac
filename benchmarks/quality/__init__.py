"""Cost and gain of few bits, smaller caches and drafts on published models and the embedded one: `make quality`.

See docs/quality.md, which is written from what this measures.
"""
