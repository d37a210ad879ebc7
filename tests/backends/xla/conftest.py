"""Tests of XLA on the CPU. They run where JAX is installed (make test-xla), and are not collected elsewhere."""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob = [] if importlib.util.find_spec("jax") else ["test_*.py"]

# Read when JAX starts: the CPU alone, as several devices, so that sharding can be tried.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
