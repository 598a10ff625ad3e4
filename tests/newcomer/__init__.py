"""What a newcomer does with README and the first pages: printed commands are run as they stand, on
the embedded target, in an empty folder, by a process with an environment of its own.

All of it is slow; the stages' own tests cover the same code in seconds.
"""
