"""Scripts that run in the environment of another project. Python puts this folder first in its
search path, so no file here may have the name of a module that a library imports. Nothing here
imports Headstart."""
