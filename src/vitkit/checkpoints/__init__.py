"""Checkpoints of every family <-> (configuration, tensors); `load` puts them into a model."""
