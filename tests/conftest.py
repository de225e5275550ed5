"""Sixteen simulated devices for every test, and ``--long`` for the large sweeps."""

import os

import pytest
from hypothesis import settings

os.environ["JAX_PLATFORMS"] = "cpu"
_COUNT = "--xla_force_host_platform_device_count"
_others = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_COUNT)]
os.environ["XLA_FLAGS"] = " ".join([*_others, f"{_COUNT}=16"])

# How long an example takes says more of the machine than of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--long"):
        return
    kept = [item for item in items if "long" not in item.keywords]
    dropped = [item for item in items if "long" in item.keywords]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture
def kept_environment(monkeypatch):
    """Opening a program sets variables of the process; put them back, when jax has read them."""
    import jax  # not before the variables above are set

    assert len(jax.devices()) == 16
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])
