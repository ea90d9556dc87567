"""Drawing: arrays in, matplotlib figures out. Nothing is computed here but colours and places."""
