"""What dos reaches in torch that is no public interface: one file for each kind, which says why and since which torch.

No other file of dos may (tests/test_layering.py). For each file here, tests/dos/torch_internals has a test of what it
assumes, which fails when torch changes that, and of why no public interface serves.
"""
