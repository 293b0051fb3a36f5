"""``python -m enginebay``: the same as the ``enginebay`` script."""

from __future__ import annotations

from enginebay.cli import main

if __name__ == "__main__":
    main()
