"""Reading a worker's metrics as Prometheus does, by HTTP."""

from __future__ import annotations

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from aiorpc import Worker


class Scrape:
    """What one request brought. kinds: of the metrics, by name."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.kinds: dict[str, str] = {family.name: family.type for family in families}
        self.samples = [sample for family in families for sample in family.samples]
        assert len({(each.name, *sorted(each.labels.items())) for each in self.samples}) == len(self.samples)

    def of(self, name: str, /, **labels: str) -> float:
        """The sum of the samples of that name with these labels. Fails if there are none."""
        found = [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]
        assert found, f"no {name} {labels}, but {sorted({each.name for each in self.samples})}"
        return sum(found)

    def labels(self, name: str, label: str) -> set[str]:
        """The values of a label in the samples of that name."""
        return {each.labels[label] for each in self.samples if each.name == name}


def read(address: str, token: str = "") -> str:
    """The text at an address. Blocks."""
    request = urllib.request.Request(f"http://{address}/metrics")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


async def scrape(worker: Worker) -> Scrape:
    """The metrics of a worker."""
    address = worker.metrics_address
    assert address is not None
    return Scrape(await asyncio.to_thread(read, address))
