"""Pictures of what a cache kept and what that cost: `jkv.viz.kept(out)`; figures of matplotlib but for that page of HTML.

A figure shows itself in a notebook and is saved by `figure.savefig(path)`. matplotlib is imported when a figure is drawn.
"""

from jkv.viz.cache_size import cache_size
from jkv.viz.distances import distances
from jkv.viz.frontier import frontier
from jkv.viz.kept import Kept, kept
from jkv.viz.learning import learning
from jkv.viz.ranking import ranking
from jkv.viz.redundancy import redundancy
from jkv.viz.throughput import throughput

__all__ = ["Kept", "cache_size", "distances", "frontier", "kept", "learning", "ranking", "redundancy", "throughput"]
