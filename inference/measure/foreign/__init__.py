"""What runs in an environment of another project, as a script: Python puts this folder in front of
all others, so that nothing may lie here whose name a library imports. Nothing here imports
Headstart."""
