"""The private parts of torch that dos uses: one file for each kind, which says why and since which version.

No other file of dos may (tests/test_layering.py). For each file here, tests/dos/torch_internals has a test of what it
assumes, which fails when torch changes that, and of why no public interface serves.
"""
