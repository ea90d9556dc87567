"""Hugging Face folders (config.json, preprocessor_config.json, weights) <-> vitkit: one row of KINDS by model_type.

The kinds stand in the files of their groups: `vit.py`, `beit.py`, `clip.py`, `dinov3.py`; what they share in `kind.py`.
"""

from vitkit.checkpoints.huggingface.reader import matches as matches
from vitkit.checkpoints.huggingface.reader import read as read
from vitkit.checkpoints.huggingface.writer import write as write
