"""The tasks that ``configs/`` runs; each is also a template for a task of your own."""
