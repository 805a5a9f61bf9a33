"""The tensor mathematics of token merging: pure functions on torch tensors, no state, no random numbers."""
