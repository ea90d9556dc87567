"""The model: configuration, parts in the order an image meets them, the zoo and the layer table."""
