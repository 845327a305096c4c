"""The descriptions of GPUs, under the name that the programs of this folder use."""

from experiments.targets import mesh, plugin_library, target_config

__all__ = ["mesh", "plugin_library", "target_config"]
