"""`python -m vitkit` is the command `vitkit`."""

from vitkit.cli.main import run

run()
