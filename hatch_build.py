"""The hook of hatchling that builds the native library into the wheel.

Where nothing can be built, the wheel is pure Python, and the package gives the reason that is packed with it.
``POLYATTN_PLATFORM`` names another platform to build for, as ``nox -s wheels`` does; then a failure is an error.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import tempfile
import types
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "polyattn_native"


class NativeBuildHook(BuildHookInterface):
    """Builds the library for the platform of the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build: for an editable installation in the source tree, else in a temporary folder."""
        if self.target_name != "wheel":
            return
        package = Path(self.root, "backends", PACKAGE)
        build, targets = _module(package, "_build"), _module(package, "_targets")
        chosen = os.environ.get("POLYATTN_PLATFORM") or None
        self.temporary = tempfile.TemporaryDirectory()
        folder = package / "_lib" if version == "editable" else Path(self.temporary.name)
        try:
            manifest = build.build(folder, chosen)
            names = [targets.MANIFEST, *manifest["files"]]
            self.app.display_info(f"native kernels for {manifest['platform']}, by {manifest['compiler']}")
        except (build.BuildError, OSError) as error:
            if chosen:
                raise
            build.give_reason(folder, str(error))
            names = [targets.REASON]
            self.app.display_warning(f"no native kernels: {error}")
        if version == "editable":
            return
        build_data["force_include"].update({str(folder / name): f"{PACKAGE}/_lib/{name}" for name in names})
        if names != [targets.REASON]:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_tag(manifest, targets)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if self.target_name == "wheel":
            self.temporary.cleanup()


def _module(package: Path, name: str) -> types.ModuleType:
    """Import a module of the package without the package's own imports, which are not installed here."""
    if PACKAGE not in sys.modules:
        bare = types.ModuleType(PACKAGE)
        bare.__path__ = [str(package)]
        sys.modules[PACKAGE] = bare
    return importlib.import_module(f"{PACKAGE}.{name}")


def _tag(manifest: Any, targets: types.ModuleType) -> str:
    """Return the platform's tag: zig's library runs wherever the tag says, another compiler's on this machine."""
    if manifest["compiler"].startswith("zig"):
        return str(targets.TARGETS[manifest["platform"]].tag)
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
