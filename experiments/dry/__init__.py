"""The library on a GPU that is only time: a dry accelerator, which moves no byte and computes nothing."""
