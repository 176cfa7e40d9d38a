"""``python -m bridge._cli`` is `swa`."""

from bridge._cli import main

if __name__ == "__main__":
    main()
