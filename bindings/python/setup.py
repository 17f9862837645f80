# SPDX-License-Identifier: Apache-2.0
"""The tag of the wheel: any Python 3, and the machine that the library was built for.

No compiler runs here: `make wheel` has put libsluice.so.1 into the package.
"""

import os
import sysconfig

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.dist import Distribution

LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "src", "sluice", "_lib",
                       "libsluice.so.1")


class Carries(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class Tagged(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        if not os.path.exists(LIBRARY):
            raise SystemExit(f"{LIBRARY} is missing: run make wheel")
        return "py3", "none", self.plat_name.replace("-", "_").replace(".",
            "_") if self.plat_name else machine()


def machine() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


setup(distclass=Carries, cmdclass={"bdist_wheel": Tagged})
