"""How a ledger's tables came to be, one step a file in ``versions``. Run by alembic from ``Ledger.open``."""
