"""What a chapter draws: one module a chapter, and nothing that the text explains.

The lessons are in `helpers/*.py`; here is only where the boxes, arrows and colors go.
"""
