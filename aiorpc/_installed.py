"""Whether another project's distribution, `aiorpc` on the package index, lies in the same folder as this package."""

from __future__ import annotations

import os
import warnings

#: A module of that distribution (0.1.7, of 2020) which this package will never have.
THEIRS = "connection.py"


def warn_of_another(folder: str = os.path.dirname(__file__)) -> None:
    """Warn the program that imports aiorpc if both distributions have been installed into `folder`.

    Both own the import package `aiorpc`: installing one overwrites files of the other, and uninstalling either removes
    files of both. This is one look at the folder, some microseconds; it reads no metadata.
    """
    if os.path.exists(os.path.join(folder, THEIRS)):
        warnings.warn(
            "the distribution `aiorpc`, another project with the same import name, is installed beside `aiorpc-torch`. "
            f"Files of both are in {folder}, and either may be broken. To have aiorpc-torch alone: "
            "pip uninstall -y aiorpc aiorpc-torch; pip install aiorpc-torch",
            RuntimeWarning,
            stacklevel=3,
        )
