"""Drawing: arrays in, matplotlib figures out, for every part that draws. Nothing here imports matplotlib at once."""
