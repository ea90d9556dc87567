"""Learning from images alone: each method is one file that reads like its paper, and a row of `TASKS`."""
