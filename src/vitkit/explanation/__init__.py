"""What a Vision Transformer has learned: `table` lists the figures, `build` draws them (then matplotlib is needed)."""
