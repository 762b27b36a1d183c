"""The parts of torture_managers.py: programs of a manager that are killed, and what must be there.

From top to bottom; a file uses only files above it:

states   what a step holds, and how a loaded one differs
rules    the rules of managers, and which steps they surely keep or may keep
ledger   what a program does, line by line, outside of the run
children processes that are forked and killed
clock    steps of the clock that all processes here see
place    where a run is, and how its checkpoints are written
program  the training that is killed
others   a second job, and a reader beside the first
look     what a fresh process finds
oracle   what must be there, by the ledger
user     who has files of their own in the run
tidy     what may be in the run's directories at all
life     one run from its first save to its last kill
"""
