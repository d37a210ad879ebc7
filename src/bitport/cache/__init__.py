"""Quantized key-value caches."""

from bitport.cache.format import CacheFormat, cache_format
from bitport.cache.static import StaticStore
from bitport.cache.store import KeyValueStore

__all__ = ["CacheFormat", "KeyValueStore", "StaticStore", "cache_format"]
