"""What a decoding process does when its decoder is broken. Light, because the process imports it."""

import os
import resource


def crash(connection: object, limits: object) -> None:
    os.abort()


def burn(connection: object, limits: object) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
    while True:
        pass
