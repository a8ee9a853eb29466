"""The optimizer's parameters, and the changes that user code makes to them."""
