"""The C extension. FUNCCOLL_PURE_WHEEL=1 builds a wheel without it, which fits every Python."""

import os

from setuptools import Extension, setup

# It is optional: without a C compiler Python does the same (funccoll/core/c_extension.py).
extension = Extension("funccoll._native", ["funccoll/_native.c", "funccoll/_free_list.c"], optional=True)
setup(ext_modules=[] if os.environ.get("FUNCCOLL_PURE_WHEEL") == "1" else [extension])
