"""The private parts of torch that dos uses: one file for each kind, which says why and since which version.

No other file of dos may use any (tests/test_layering.py). For each file here, tests/dos/torch_internals has a test of
its assumptions, which fails when torch changes, and of the lack of a public interface.
"""
