"""Training: from a folder of images to a good model, and a run that cannot be lost."""
