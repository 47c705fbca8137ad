"""`python -m xinfer`."""

__all__: list[str] = []

from xinfer.cli import main

if __name__ == "__main__":
    main()
