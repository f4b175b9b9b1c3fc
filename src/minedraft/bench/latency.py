"""How long one request waited, and percentiles over many.

Makespan over requests is no latency: it is the throughput once more. So all is taken per request.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from minedraft.bench.records import Request


@dataclass(frozen=True)
class Percentiles:
    """Seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Latencies:
    """Of all requests that were answered; None if there is nothing to take it from."""

    ttft: Percentiles | None
    """Time to first token."""
    inter_token: Percentiles | None
    end_to_end: Percentiles | None


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """With linear interpolation; None of nothing."""
    found = list(values)
    if not found:
        return None
    p50, p90, p99 = np.percentile(found, (50, 90, 99)).tolist()
    return Percentiles(p50, p90, p99)


def latencies(requests: Iterable[Request]) -> Latencies:
    """Requests that failed have none."""
    answered = [request for request in requests if not request.failed]
    return Latencies(
        ttft=percentiles(s for r in answered if (s := ttft_s(r)) is not None),
        inter_token=percentiles(s for r in answered for s in inter_token_s(r)),
        end_to_end=percentiles(s for r in answered if (s := end_to_end_s(r)) is not None),
    )


def ttft_s(request: Request) -> float | None:
    """From arrival to the first output token; None without one."""
    return next((time - request.arrived_s for time, _ in _outputs(request)), None)


def end_to_end_s(request: Request) -> float | None:
    """From arrival to the last output token; None without one."""
    last = max((time for time, _ in _outputs(request)), default=None)
    return None if last is None else last - request.arrived_s


def inter_token_s(request: Request) -> list[float]:
    """A value for each token that came after the first output.

    Several tokens may come together, as they do after a verification. The gap before them is then
    divided by their number and counts so many times: otherwise a way to decode that gives three
    tokens every 60 ms would look slower than one that gives one every 30 ms. Tokens that come
    with the first have no gap, so the values add up to end-to-end latency less TTFT.
    """
    return [
        (after - before) / count
        for (before, _), (after, count) in pairwise(_outputs(request))
        for _ in range(count)
    ]


def _outputs(request: Request) -> Iterator[tuple[float, int]]:
    """A server may send what holds no token."""
    pairs = zip(request.times_s, request.counts, strict=True)
    return ((time, count) for time, count in pairs if count)
