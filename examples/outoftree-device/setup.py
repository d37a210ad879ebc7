"""Compile csrc/ against the headers of the installed torch, hence ``pip install --no-build-isolation .``"""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    ext_modules=[
        CppExtension(
            "bitport_simdev._sim",
            ["csrc/device.cpp", "csrc/linear.cpp"],
            include_dirs=["csrc"],
            extra_compile_args=["-O1", "-g0"],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)},
)
