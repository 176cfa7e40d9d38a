"""``torch.cuda`` where there is none: a graph replays at once, on the CPU, and takes 1 ms."""

from contextlib import contextmanager, nullcontext


class Stream:
    def wait_stream(self, other):
        pass


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1.0


class Graph:
    replays = 0

    def replay(self):
        Graph.replays += 1


@contextmanager
def graph(captured):
    assert isinstance(captured, Graph)
    yield


REPLACED = {
    "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": graph, "current_stream": Stream,
    "stream": lambda stream: nullcontext(), "synchronize": lambda: None, "empty_cache": lambda: None,
    "current_device": lambda: 0, "set_device": lambda index: None,
}  # fmt: skip


def install(monkeypatch):
    """Put them in place of torch's."""
    import torch

    for name, value in REPLACED.items():
        monkeypatch.setattr(torch.cuda, name, value)
