"""Examples under torchrun: it starts the workers, and only rank 0 speaks; test_batch_rl.py and test_cuda_rpc.py, too.

There each program is started by its name. Here they are run by the same three processes, one after the other.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.examples.programs import matches, run_program, torchrun
from tests.examples.several import END

pytestmark = pytest.mark.slow
LIMIT = 90.0  # seconds for a run that takes about ten
OPTIONS = {
    "rnn": "--epochs 2 --hidden 16 --text ab.txt --sample 8 --lr 0.1",
    "pipeline": "--micro 2 --num-steps 1 --batch-size 4 --width 8 --depth 1",
    "parameter_server": "--num-steps 2 --batch-size 4",
    "batch_ps": "--model resnet18 --image-size 16 --batch-size 4 --num-steps 2",
}
SPOKEN = {
    "rnn": (
        r"epoch   1   perplexity .*",
        r"epoch   2   perplexity .*",
        r"400 letters, 2 different ones: 2 steps in .*",
        r"it writes: ababab[ab]{8}",
    ),
    "pipeline": (r"micro-batches  2   step   1   loss .*", r" 2 micro-batches: .* for a batch of 4 .*"),
    "parameter_server": (r"2 trainers, 4 steps in .* accuracy .* -> .*",),
    "batch_ps": (
        r"step   1   loss .*",
        r"step   2   loss .*",
        r"resnet18 \(11\.2 M parameters\), 2 trainers, batched: .* samples/s; loss .* -> .*",
    ),
}


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each program said."""
    folder = tmp_path_factory.mktemp("anywhere")
    (folder / "ab.txt").write_text("ab" * 200)
    programs = {f"aiorpc.examples.{name}": options.split() for name, options in OPTIONS.items()}
    outcome = run_program(torchrun(3, "-m", "tests.examples.several", json.dumps(programs)), folder, timeout=LIMIT)
    assert outcome.code == 0, outcome.err
    said, rest = {}, outcome.out
    for name in OPTIONS:
        said[name], _, rest = rest.partition(f"{END}aiorpc.examples.{name}\n")
    assert rest == ""
    return said


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_it_runs_unchanged_under_torchrun(spoken: dict[str, str], name: str) -> None:
    """Each worker finds its place, the results are right, and nobody else speaks."""
    assert matches(spoken[name], SPOKEN[name]), spoken[name]


@pytest.mark.long
@pytest.mark.time_limit(2 * LIMIT + 30)
def test_a_job_that_is_started_again_goes_on_from_what_it_has_written(tmp_path: Path) -> None:
    """As with `--max-restarts`: one worker is killed, all meet anew at torchrun's store, none by hand."""
    options = ["--max-restarts", "2", "--monitor-interval", "0.1"]
    program = torchrun(3, *options, "-m", "tests.examples.restarted", str(tmp_path), "7", "4")
    outcome = run_program(program, tmp_path, timeout=2 * LIMIT)
    assert outcome.code == 0, outcome.err
    assert re.search(r"^7 steps, from 4 on, after 1 restarts$", outcome.out, re.MULTILINE), outcome.out
    assert (tmp_path / "steps1").read_text() == "7"
