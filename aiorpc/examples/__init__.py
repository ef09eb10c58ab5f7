"""Programs that use aiorpc for the work it was made for; run them with ``python -m aiorpc.examples.<name>``.

batch_rl: reinforcement learning, one agent that chooses the actions of many observers in batches.
actor_learner: reinforcement learning, actors that play at their own pace, weights that are published, and a queue.
batch_ps: data-parallel training through a parameter server that updates in batches.
cuda_rpc: a model in two shards, activations and gradients sent by way of the CPU and from GPU to GPU.
rnn: a language model whose layers live on three workers, trained on a page of text.
parameter_server: a model on a server, trained by several trainers at once.
pipeline: a model in two stages on two workers, fed with micro-batches.

They need the packages of ``pip install aiorpc-torch[examples]``.
"""

from __future__ import annotations

from importlib.util import find_spec

for _name in ("gymnasium", "matplotlib", "rich"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(f"the examples need {_name}: pip install 'aiorpc-torch[examples]'", name=_name)
