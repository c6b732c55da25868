"""Programs that another thread compiles, for tests."""

from concurrent.futures import wait


def compile_later(service):
    """Waits until what no request waits for is compiled, too."""
    wait(service.call(lambda engine: [*engine.runner.programs._coming.values()]).result())
    service.call(lambda engine: engine.runner.foreseen.collect()).result()
