"""The machinery of ablations: questions, plans, runs, records, tables and charts."""
