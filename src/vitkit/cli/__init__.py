"""The command: arguments in, one call each, words or JSON out."""
