"""What runs, who waits for whom, where time went: what a worker shows of itself to other programs."""
