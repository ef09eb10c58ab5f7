"""torchrl's RPC collector and remote replay buffer on aiorpc, by one import: the programs of docs/howto/torchrl.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.programs import ROOT, Outcome, run_program, torchrun
from tests.ports import free_port

pytest.importorskip("torchrl", reason="needs the extra `neighbours`")
pytestmark = [pytest.mark.slow, pytest.mark.time_limit(400)]

PAGE = (ROOT / "docs" / "howto" / "torchrl.md").read_text(encoding="utf-8")
COLLECT, REPLAY = re.findall(r"^```py\n(.+?)^```", PAGE, re.DOTALL | re.MULTILINE)
LIMIT = 300.0  # seconds for what takes twenty
#: Whose workers these are: each is one of aiorpc's, or the others could not meet it.
WHOSE = "\n    from torch.distributed import rpc\n    print(rpc.init_rpc.__module__.partition('.')[0])\n"


def written(program: str, path: Path) -> Path:
    """The program as a file, which tells at last whose RPC it has used."""
    path.write_text(program.rstrip() + WHOSE)
    return path


def lines(outcome: Outcome, *wanted: str) -> list[str]:
    """Those lines of the output; the others are torchrl's log."""
    return [line for line in outcome.out.splitlines() if line in wanted]


def test_the_collector_collects(tmp_path: Path) -> None:
    """Two processes play, and their frames come in batches."""
    program = written(COLLECT.replace("10003", str(free_port())), tmp_path / "collect.py")
    outcome = run_program([str(program)], tmp_path, timeout=LIMIT)
    assert outcome.code == 0, outcome.err
    assert lines(outcome, "100", "aiorpc") == ["100", "100", "100", "aiorpc"]


def test_the_replay_buffer_is_filled_and_sampled(tmp_path: Path) -> None:
    """By another process than the one that has it."""
    written(REPLAY, tmp_path / "replay.py")
    outcome = run_program(torchrun(2, "replay.py"), tmp_path, timeout=LIMIT)
    assert outcome.code == 0, outcome.err
    assert sorted(lines(outcome, "aiorpc", "torch.Size([32])")) == ["aiorpc", "aiorpc", "torch.Size([32])"]


def test_an_import_that_comes_too_late_is_told(tmp_path: Path) -> None:
    """torchrl has torch's names by then: an error says which module was sooner."""
    source = "import torchrl.collectors.distributed.rpc\nimport aiorpc.compat.torchrl\n"
    (tmp_path / "late.py").write_text(source)
    outcome = run_program([str(tmp_path / "late.py")], tmp_path, timeout=LIMIT)
    assert outcome.code == 1
    assert "RpcUsageError: import aiorpc.compat.torchrl before torchrl: torchrl.collectors" in outcome.err
    (tmp_path / "late.py").write_text("import aiorpc.compat.torch\naiorpc.compat.torch.install()\n" + source)
    assert run_program([str(tmp_path / "late.py")], tmp_path, timeout=LIMIT).code == 0
