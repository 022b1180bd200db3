"""What can be proven: sampling, accounting, plans, the gate, the ledger, the statement."""
