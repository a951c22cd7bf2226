"""Searching an index that is spread over shards: each holds some segments of one generation, and several may hold the same ones."""

from retrieval.sharding.index import ShardedIndex, open_sharded
from retrieval.sharding.plan import Sharding, ShardPlan, plan_shards
from retrieval.sharding.replicas import Patience

__all__ = ["Patience", "ShardPlan", "ShardedIndex", "Sharding", "open_sharded", "plan_shards"]
