"""What pyproject.toml cannot say: the embedded target and its prompts (assets/) ship inside the
package `headstart`, so that an installed wheel finds them and site-packages gets no `assets`."""

from setuptools import find_namespace_packages, setup

PACKAGES = find_namespace_packages(
    # the folders of conf/ hold YAML only; as namespace packages they count, so that they ship
    include=["headstart*", "heads*", "inference*", "train*", "scripts*", "conf*"],
    exclude=["*.__pycache__", "*.egg-info*"],
)

setup(packages=[*PACKAGES, "headstart.assets"], package_dir={"headstart.assets": "assets"})
