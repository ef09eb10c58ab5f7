"""aiorpc's pages in torch's debug server, where a program runs it."""

from __future__ import annotations

import html
import pickle
import socket
import sys
from pathlib import Path

import pytest

from aiorpc.errors import RpcUsageError
from aiorpc.observability.debug_pages import handlers
from tests.examples.programs import run_program
from tests.ports import free_port

PROGRAM = """
import multiprocessing, os, sys, time, urllib.request

from torch.distributed.debug._frontend import main

import aiorpc as rpc
from aiorpc.observability.debug_pages import handlers

def work(seconds):
    time.sleep(seconds)

if __name__ == "__main__":
    options = rpc.RpcBackendOptions(init_method=f"file://{os.getcwd()}/meet")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    call = rpc.rpc_async("alone", work, args=(60,))
    port = int(sys.argv[1])
    # As start_debug_server does, which also serves pages of its own, and needs further packages for these.
    front_end = {"port": port, "dump_dir": None, "dump_interval": 60.0, "handlers": handlers(), "enabled_dumps": set()}
    process = multiprocessing.get_context(sys.argv[2]).Process(target=main, kwargs=front_end, daemon=True)
    process.start()
    for page in ("diagnosis", "wait_graph", "stacks"):
        for attempt in range(400):
            try:
                with urllib.request.urlopen(f"http://localhost:{port}/aiorpc_{page}") as answer:
                    print(answer.read().decode())
                break
            except OSError:
                time.sleep(0.1)
    process.terminate()
    process.join()
    call.cancel()
    rpc.shutdown(graceful=False)
"""


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", pytest.param("fork", marks=pytest.mark.long)])
def test_its_front_end_shows_them(start_method: str, tmp_path: Path) -> None:
    """The diagnosis, the wait graph and the stacks of the groups on its host, with links to them."""
    if not has_ipv6():
        pytest.skip("torch's debug server listens on IPv6, which this host has not")
    port = free_port()
    (tmp_path / "program.py").write_text(PROGRAM)
    outcome = run_program(["program.py", str(port), start_method], tmp_path, timeout=100.0)
    text = html.unescape(outcome.out)
    assert outcome.code == 0, outcome.err
    for part in (
        '<a href="/aiorpc_wait_graph">aiorpc: wait graph</a>',
        "nothing found (workers: 1, calls under way: 1",
        "for __main__:work on worker 'alone'",
        "--- worker alone ---",
        "serves __main__:work for alone",
    ):
        assert part in text, f"{part!r} is not in\n{text}\n{outcome.err}"


def test_they_go_to_a_front_end_in_another_process() -> None:
    """And its periodic dumps have them."""
    made = pickle.loads(pickle.dumps(handlers()))
    assert [each.dump_filename() for each in made] == ["aiorpc_diagnosis", "aiorpc_wait_graph", "aiorpc_stacks"]
    assert isinstance(made[1].dump(), str)


def test_a_torch_without_such_pages_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install."""
    monkeypatch.setitem(sys.modules, "torch.distributed.debug._frontend", None)
    with pytest.raises(RpcUsageError, match="pip install jinja2"):
        handlers()
