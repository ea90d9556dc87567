"""The articles' experiments, each one command: short trainings, a table, a figure, two sentences.

`vitkit.study.run.run("positions", "digits")` does what `vitkit study positions` does.
"""
