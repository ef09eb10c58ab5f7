"""Programs one after the other in the processes that torchrun starts: most of what a run takes is to import torch."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence

#: What rank 0 prints behind the lines of a program.
END = "--- end of "


def main(programs: Mapping[str, Sequence[str]]) -> int:
    """Run the ``main`` of these modules with these options."""
    for module, options in programs.items():
        code = importlib.import_module(module).main(options)
        if code:
            return int(code)
        if os.environ["RANK"] == "0":
            print(f"{END}{module}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
