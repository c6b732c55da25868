"""How many problems a policy solves, and with what memory."""
