"""A Ray cluster of two nodes on this machine, as a program: its address on a line, then it obeys the lines it reads.

`kill` ends the second node with all that runs on it, as a machine does that loses its power; `add` starts another one.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

ROOM = 2  # CPUs of the first node; the second one has 1


def main() -> None:
    """Serve until the end of stdin."""
    head = {"num_cpus": ROOM, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        second = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        print(cluster.address, flush=True)
        for line in sys.stdin:
            if line == "kill\n":
                cluster.remove_node(second, allow_graceful=False)
            elif line == "add\n":
                second = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
            print(line, end="", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
