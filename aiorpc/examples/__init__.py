"""Programs that use aiorpc for the work it was made for; run them with ``python -m aiorpc.examples.<name>``.

batch_rl: reinforcement learning, one agent that chooses the actions of many observers in batches.
batch_ps: data-parallel training through a parameter server that updates in batches.

They need the packages of ``pip install aiorpc[examples]``.
"""
