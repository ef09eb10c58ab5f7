"""The end of a child that was forked in a handler and returns from it: no worker lives there that could go on."""

from __future__ import annotations

import os
import traceback
from typing import NoReturn

STATUS = 1


def end_child(where: str, error: BaseException | None = None) -> NoReturn:
    """End this process, with no message but one to stderr.

    where: the place that it returned from. error: raised there, if any. SystemExit decides the status; any other error
    gives `STATUS` and a message. File buffers are not flushed: they are the parent's.
    """
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        os._exit((error.code or 0) & 0xFF)
    said = (
        f"aiorpc: process {os.getpid()} was forked in {where} and has come back out of it, where no worker lives. It "
        f"ends with status {STATUS}; the parent is not concerned. End a child inside of the handler that forks it, by "
        "os._exit() or sys.exit().\n"
    )
    try:
        if error is not None:
            said += "".join(traceback.format_exception(error))
        os.write(2, said.encode(errors="backslashreplace"))
    finally:
        os._exit(STATUS)
