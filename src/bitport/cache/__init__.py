"""Keys and values of the tokens that a model has seen, kept in few bits."""

from bitport.cache.format import CacheFormat, cache_format
from bitport.cache.store import KeyValueStore

__all__ = ["CacheFormat", "KeyValueStore", "cache_format"]
