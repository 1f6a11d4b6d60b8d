"""What makes a notebook a page of this book: sliders, claims, records, the pad to draw on.

figures: `explore`, figures that move without a kernel. ledger: a claim and what was measured.
records: measurements as data, with provenance. drawing: a pad that reads your handwriting.
No lesson is in here, and none is imported: what a chapter teaches stands in `helpers/*.py`.
"""
