"""Faults of processors are seen over a table model; a proposer that warps wrongly is only slow."""

from processor_laws import ProcessorFaults
from toys import TABLES


class TestFaults(ProcessorFaults):
    toys = TABLES
    FAULTY = "table chain"
